"""State dict of a model: saved as full tensors by name, loaded into slices.

Saving: names are those of `module.state_dict()`, values are full tensors, for any sharding.
Loading: everything is compared first; only then is the first value overwritten, each rank copying its own
    slice.

[Note: dtypes of buffers]
Parameters of another dtype are an error: the checkpoint was saved in another precision. Buffers are converted
between floating-point dtypes, as one precision can have either. A model of 16 bits has them in float32, where
earlier versions had 16 bits, and levels of Apex and a model that was built in 16 bits still have.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from colossalai.checkpoint_io._collective import called_by_all_ranks, on_every_rank
from colossalai.checkpoint_io._hugging_face_index import Stems
from colossalai.checkpoint_io._save_plan import LocalState, gather_states
from colossalai.checkpoint_io._single_experts import with_fused_experts
from colossalai.checkpoint_io._state import (
    FileLayout,
    Kind,
    LoadReport,
    NamedModel,
    merge_by_name,
    names_elsewhere,
    tied_names,
    without_common_prefix,
    without_prefix,
)
from colossalai.checkpoint_io.formats import load_state, save_sharded, save_whole
from colossalai.checkpoint_io.resharding import (
    FlatStateDict,
    ShardedStateDict,
    StoredStateDict,
    StoredTensor,
    TensorMetadata,
    fill,
    gathered,
    in_full_precision,
    names_by_tensor,
    new_like,
    notes_of,
    pack,
    stored_views,
    unpack,
    whole_shapes,
    with_own_memory,
)
from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, MODEL_FOLDER, listed
from colossalai.context import Mesh
from colossalai.logging import get_dist_logger
from colossalai.tensor import CACHED_TABLE, ROW_CACHE, FullPrecisionTensor, as_memory

_OTHERS = "extra state"  # under it are the values that are not tensors


def local_model_state(model: NamedModel) -> LocalState:
    """Return the state of a model on this rank: its own tensors, and all else in its state dict."""

    def values() -> dict[str, Any]:
        for param in model.module.parameters():
            if hasattr(param, ROW_CACHE):
                getattr(param, ROW_CACHE).check_readable()
        return model.values

    return LocalState(values, merge_by_name, flat_state, join=stored_values)


def model_state(module: nn.Module, *, prefix: str = "") -> ShardedStateDict:
    """Return the state of a model over all ranks, also the stages of a pipeline; collective."""
    return gather_states(local_model_state(NamedModel.of(module, prefix=prefix)))[0][0]


def gathered_weights(
    module: nn.Module,
    mesh: Mesh,
    *,
    device: torch.device,
    into: Callable[[str], torch.Tensor | None] = lambda name: None,
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield the tensors of a model whole, one after the other, with their names; collective.

    Every rank iterates over all of them. The additional memory is one tensor; a tensor that a rank holds
    whole is yielded as it is, and must not be written to.

    Args:
        module: The model; its parameters may be in parts on ranks, and stages on other ones.
        mesh: The ranks that hold it.
        device: Device of the gathered tensors.
        into: Returns memory for a tensor by its name, which is used where shape and dtype are the same.

    Raises:
        ValueError: `module` is not held whole by the ranks together.
    """
    with as_memory():
        state = model_state(module)
    groups = state.names_by_tensor
    tensors = {name: state.tensors[name] for name in groups}
    memory = {name: place for name in groups if (place := into(name)) is not None}
    whole = gathered(tensors, mesh, device=device, into=memory)
    for name in groups:
        with as_memory():  # not while the caller works on it
            found = next(whole)
        yield groups[name], found


def stored_values(state: FlatStateDict[Any]) -> Mapping[str, object]:
    """Return the values of the state dict that a flat one was made of.

    Raises:
        ValueError: The values of `state` other than tensors have no names, as a model's have.
    """
    if state.tree is None:
        return state.tensors
    others = unpack(state.tree, state.tensors)
    if not isinstance(others, dict) or not all(isinstance(name, str) for name in others):
        raise ValueError("damaged checkpoint: the values other than tensors have no names")
    inner = pack(others, at=_OTHERS)[1].keys()
    return {name: tensor for name, tensor in state.tensors.items() if name not in inner} | others


def flat_state(values: Mapping[str, Any]) -> FlatStateDict[Any]:
    """Return the values of a state dict as a flat one: tensors by name, and a tree of all else."""
    tensors = {
        name: value for name, value in values.items() if isinstance(value, torch.Tensor | TensorMetadata)
    }
    if len(tensors) == len(values):
        return FlatStateDict(tensors, None)
    tree, inner = pack({name: value for name, value in values.items() if name not in tensors}, at=_OTHERS)
    return FlatStateDict(tensors | inner, tree)


def _split(content: object) -> FlatStateDict[torch.Tensor]:
    if isinstance(content, nn.Module):  # a pickled one, which the caller has allowed
        content = content.state_dict()
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"there are no weights by name in it, but a {type(content).__name__}")
    if {"epoch", "model"} <= content.keys():
        raise ValueError("it was written by save_checkpoint: read it with load_checkpoint")
    return flat_state(content)


MODEL = Kind(
    MODEL_FOLDER, Stems(torch="pytorch_model", safetensors="model"), join=stored_values, split=_split
)


@dataclass(frozen=True)
class ModelLoadPlan:
    """A checkpoint that was compared with a model, ready to be copied.

    Attributes:
        module: The model.
        copies: Its own tensors that will be overwritten, each with its new value.
        computed: Values that only the module itself can load: extra state, and values of its hooks.
        report: Names that did not match.
        note: Rank 0's log line about converted buffers; empty if none is.
        notes: Functions that all ranks call when all have overwritten the model.
    """

    module: nn.Module
    copies: list[tuple[torch.Tensor, StoredTensor]]
    computed: dict[str, object]
    report: LoadReport
    note: str = ""
    notes: Collection[Callable[[], None]] = ()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context for `apply`, at whose end all ranks exchange the outcome, also of a failed one.

        Collective where the model keeps its parameters in sections.
        """
        try:
            with ExitStack() as tables:
                for param in self.module.parameters():
                    if hasattr(param, ROW_CACHE):
                        tables.enter_context(getattr(param, ROW_CACHE).loading())
                yield
        finally:
            for note_written in self.notes:
                note_written()

    def apply(self) -> None:
        """Overwrite the model; no communication: every rank reads its own slices, inside of `noted`."""
        fill(self.copies)
        if self.computed:
            self.module.load_state_dict(self.computed, strict=False)
        if self.note:
            get_dist_logger().info(self.note, ranks=[0])
        if not self.report.is_clean:
            get_dist_logger().warning(
                f"the checkpoint did not fit in full:\n{self.report.describe()}", ranks=[0]
            )


def plan_model_loading(
    model: NamedModel,
    content: Mapping[str, object],
    *,
    source: str,
    strict: bool,
    elsewhere: Collection[str] = (),
    saved_prefix: str | None = None,
    rename: "Renaming | None" = None,
    any_dtype: bool = False,
    same_shapes: bool = False,
    is_lazy: bool = False,
) -> ModelLoadPlan:
    """Compare a checkpoint with a model and overwrite nothing.

    Args:
        model: The model, or a part of one.
        content: The checkpoint, as `stored_values` returns it.
        source: Its name in messages.
        strict: Whether a misfit is an error.
        elsewhere: Names of the parts of the model that other ranks hold.
        saved_prefix: Prefix of the names in the checkpoint; default: detected.
        rename: Maps stored tensors to the names of the model, if they differ.
        any_dtype: Whether values of another dtype fit.
        same_shapes: Whether another shape is an error also where `strict` is not set.
        is_lazy: Whether tensors of the model may have no memory by now.

    Raises:
        ValueError: A name, shape or dtype in the checkpoint is not the model's and `strict` is set, or a
            shape and `same_shapes` is; all of them are named. For buffers see [Note: dtypes of buffers].
    """
    module, given = model.module, model.values
    wanted = {name: in_full_precision(value) for name, value in given.items()}
    _refuse_meta({} if is_lazy else wanted)
    params = {id(param) for param in module.parameters()}
    params |= {id(value) for value in wanted.values() if hasattr(value, CACHED_TABLE)}
    own = params | {id(buffer) for buffer in module.buffers()}
    targets = {name: value for name, value in wanted.items() if id(value) in own}
    notes = notes_of(targets)
    groups = names_by_tensor(targets)
    all_names = wanted.keys() | set(elsewhere)
    stored: dict[str, Any] = dict(content)
    if rename is not None:
        stored = rename(stored, all_names)
    if not stored.keys() >= all_names:
        stored = with_fused_experts(stored, all_names)
    if saved_prefix is None:
        stored = without_common_prefix(stored, all_names, groups)
    else:
        stored = dict(without_prefix(stored, saved_prefix))
    stored |= _under_other_names(wanted, stored)

    common = [name for name in wanted if name in stored]
    kinds = _kinds(wanted)
    stored_kinds = {
        name: (value.shape, value.dtype)
        for name, value in stored.items()
        if isinstance(value, TensorMetadata)
    }
    buffers = {name for name, tensor in targets.items() if id(tensor) not in params}
    # And what hooks have made of buffers alone: with a weight it would be of 16 bits.
    buffers |= {name for name, value in given.items() if isinstance(value, FullPrecisionTensor)}
    wrong = [
        name
        for name in common
        if not _fit(
            kinds.get(name), stored_kinds.get(name), any_dtype=any_dtype, any_precision=name in buffers
        )
    ]
    mismatched = [
        f"{name}: {_shown(stored_kinds.get(name))} in the checkpoint, {_shown(kinds.get(name))} in the model"
        for name in wrong
    ]
    wrong_shape = {name for name in wrong if _shape(kinds.get(name)) != _shape(stored_kinds.get(name))}
    covered = {name for names in groups.values() for name in names if not stored.keys().isdisjoint(names)}
    report = LoadReport(
        missing=tuple(name for name in wanted if name not in stored and name not in covered),
        unexpected=tuple(name for name in stored if name not in wanted and name not in elsewhere),
        mismatched=(*mismatched, *_torn(groups, stored)),
    )
    if (strict and not report.is_clean) or (same_shapes and wrong_shape):
        remedy = "" if wrong_shape or not wrong else _OTHER_PRECISION
        raise ValueError(f"{source} does not fit the model; nothing was loaded.\n{report.describe()}{remedy}")

    fitting = [name for name in common if name not in wrong_shape]
    # Of tied names the last counts.
    pairs = {id(wanted[name]): (stored_kinds[name], kinds[name]) for name in fitting if name in buffers}
    return ModelLoadPlan(
        module=module,
        copies=[(targets[name], stored[name]) for name in fitting if name in targets],
        computed={
            name.removeprefix(model.prefix): _own(stored[name], wanted[name])
            for name in fitting
            if name not in targets
        },
        report=report,
        note="" if any_dtype else _note_of(source, pairs.values(), is_part=bool(elsewhere)),
        notes=dict.fromkeys(notes[name] for name in fitting if name in notes),
    )


def _under_other_names(state: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that the checkpoint has under a name that the whole model ties to the wanted one."""
    found: dict[str, Any] = {}
    for name in [name for name in state if name not in stored]:
        for other in tied_names(state[name]):
            if other in stored:
                found.setdefault(name, stored[other])
    return found


_TensorKind = tuple[tuple[int, ...], torch.dtype]
_PRECISIONS = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])
_OTHER_PRECISION = (
    "\nThe checkpoint was saved in another precision than that of the model: train the model in that of the "
    "checkpoint (precision= of a plugin or mixed_precision= of Booster, where 'auto' chooses by the device; "
    "fp16= in a config), or load its weights alone by load_model(..., strict=False), which converts them"
)


def _kinds(state: Mapping[str, Any]) -> dict[str, _TensorKind]:
    """Return the shape of the whole and the dtype of each tensor of a state dict."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    shapes = whole_shapes(tensors)
    return {name: (shapes[name], tensor.dtype) for name, tensor in tensors.items()}


def _fit(
    kind: _TensorKind | None, stored: _TensorKind | None, *, any_dtype: bool, any_precision: bool
) -> bool:
    if kind is None or stored is None or kind[0] != stored[0]:
        return kind == stored
    if any_dtype or kind == stored:
        return True
    return any_precision and _differ_in_precision(stored, kind)


def _differ_in_precision(stored: _TensorKind, kind: _TensorKind) -> bool:
    return stored[1] != kind[1] and {stored[1], kind[1]} <= _PRECISIONS


def _note_of(source: str, pairs: Iterable[tuple[_TensorKind, _TensorKind]], *, is_part: bool) -> str:
    """Return a log line about converted buffers; empty if none is converted."""
    counts = Counter(
        f"from {stored[1]} to {kind[1]}" for stored, kind in pairs if _differ_in_precision(stored, kind)
    )
    converted = ", ".join(f"{count} {dtypes}" for dtypes, count in counts.items())
    whose = " of this rank" if is_part else ""
    told = f"{source}: buffers{whose} were converted to the dtypes of the model: {converted}"
    return told if counts else ""


def _shape(kind: _TensorKind | None) -> tuple[int, ...] | None:
    return None if kind is None else kind[0]


def _shown(kind: _TensorKind | None) -> str:
    return "no tensor" if kind is None else f"{kind[0]} {kind[1]}"


def _torn(groups: Mapping[str, list[str]], stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tensors that are one in the model and several, with different values, in the checkpoint."""
    for names in groups.values():
        first, *others = [name for name in names if name in stored] or [""]
        for name in others:
            if not _is_same(stored[first], stored[name]):
                yield f"{first} and {name}: two different tensors in the checkpoint, one in the model"


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, StoredTensor) and isinstance(second, StoredTensor):
        return first.is_same_as(second)
    return first is second


def _own(stored: Any, here: Any) -> Any:
    if isinstance(stored, StoredTensor) and isinstance(here, torch.Tensor):
        return new_like(stored, here)
    return with_own_memory(stored)


def _refuse_meta(state: Mapping[str, Any]) -> None:
    empty = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if empty:
        what = f"{len(empty)} tensors of the model are on the device 'meta', without memory: {listed(empty)}"
        raise ValueError(f"{what}. Give it memory first, with module.to_empty(device=...)")


@called_by_all_ranks("save", "a model")
@as_memory()
def save_model(
    module: nn.Module,
    checkpoint: str | Path,
    *,
    shard: bool = False,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_safetensors: bool = False,
    variant: str | None = None,
    buffer_size: float = DEFAULT_BUFFER_MB,
    gather_dtensor: bool = True,
) -> None:
    """Save the weights of a model; collective: every rank calls it, global rank 0 writes.

    The checkpoint is replaced as a whole or not at all, and is on disk when the call returns. In safetensors
    a tensor that has several names (tied weights) is stored under the first one.

    Args:
        module: The model; its parameters may be slices (tensor parallelism), DTensors (`fully_shard` makes
            them), or both.
        checkpoint: A file; with `shard` a folder, whose other files stay as they are. A file name that ends
            with ".safetensors" chooses that format.
        shard: Write a folder of shards with an index, which `from_pretrained` of transformers opens. For a
            model of transformers its config.json is written too.
        prefix: Text to put in front of every name.
        size_per_shard: The most a shard holds, in MB (1024 * 1024 bytes). A larger tensor is a shard by
            itself.
        use_safetensors: Write that format rather than torch's.
        variant: A word for the file names in a folder ("fp16"), as transformers has it: weights of several
            variants lie side by side.
        buffer_size: The most memory, in MB (1024 * 1024 bytes), that saving takes on a rank in addition to
            the model.
        gather_dtensor: False: every rank writes its shards to a folder that all of them see; of the other
            options only `prefix` counts then.

    Raises:
        ValueError: `checkpoint` is a file where a folder is meant or the reverse, the format cannot hold a
            value, or parameters are both slices and DTensors.
        OSError: The checkpoint cannot be written; on all ranks. An earlier checkpoint is kept.
    """
    state = model_state(module, prefix=prefix or "")
    if not gather_dtensor:
        save_sharded(checkpoint, state, MODEL)
        return
    layout = FileLayout(
        shard=shard,
        size_per_shard=size_per_shard,
        use_safetensors=use_safetensors,
        variant=variant,
        buffer_size=buffer_size,
    )
    save_whole(checkpoint, state, MODEL, layout, texts=_config_files(module))


@called_by_all_ranks("load", "a model")
def load_model(
    module: nn.Module,
    checkpoint: str | Path,
    *,
    strict: bool = True,
    prefix: str | None = None,
    variant: str | None = None,
    allow_pickle: bool = False,
) -> LoadReport:
    """Load the weights of a model; collective: every rank calls it and copies its own slices.

    The format is seen from the content: a torch or safetensors file, an index, or a folder of shards. If all
    names in it carry one and the same prefix that the model's lack, it is left out.

    Args:
        module: The model to overwrite; its sharding can differ from the saved one.
        checkpoint: The file or folder.
        strict: Raise if anything does not match; otherwise load the matching values and warn. Values of
            another dtype are converted; buffers of another floating-point dtype in any case.
        prefix: Text in front of the names in the checkpoint that is to be left out; names without it are
            unexpected.
        variant: The word in the file names of a folder, if it holds weights of several variants.
        allow_pickle: Run the code that a torch file can contain, if it cannot be restored without: only for a
            file from a trusted source. Otherwise such a file is refused.

    Returns:
        The names that did not match.

    Raises:
        ValueError: The checkpoint is damaged, or its names or shapes are not the model's: all misfits are
            named, and nothing was overwritten.
        OSError: The checkpoint cannot be read.
    """
    opened = open_model(checkpoint, variant=variant, allow_pickle=allow_pickle)
    return fill_model(module, opened, strict=strict, prefix=prefix)


Renaming = Callable[[dict[str, Any], Set[str]], dict[str, Any]]
"""Maps stored tensors by their names to tensors by the names of a model on all ranks."""


@dataclass(frozen=True)
class OpenedModel:
    """The weights of a checkpoint that was opened: names and shapes are known, values are still in the files.

    Attributes:
        source: Its name in messages.
        state: Its content.
    """

    source: str
    state: StoredStateDict

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by their names in the checkpoint; of each any box can be read."""
        values = stored_values(self.state)
        return {name: value for name, value in values.items() if isinstance(value, StoredTensor)}


def opened_tensors(tensors: Mapping[str, torch.Tensor], *, source: str) -> OpenedModel:
    """Return tensors in memory as the weights of a checkpoint; they are not copied.

    Args:
        tensors: The tensors by name.
        source: Their name in messages.
    """
    return OpenedModel(source, FlatStateDict(stored_views(tensors), None))


def open_model(
    checkpoint: str | Path,
    *,
    variant: str | None = None,
    allow_pickle: bool = False,
    content: Callable[[object], object] | None = None,
) -> OpenedModel:
    """Open the weights of a model; collective: an error on one rank is raised on all.

    Args:
        checkpoint: The file or folder; its format is seen from the content.
        variant: The word in the file names of a folder, if it holds weights of several variants.
        allow_pickle: Run the code that a torch file may hold, if it cannot be restored without.
        content: Returns the weights by name from the content of a single torch file; default: all of it.

    Raises:
        ValueError: The checkpoint is damaged, incomplete, or holds no weights.
        OSError: The checkpoint cannot be read.
    """
    kind = MODEL if content is None else replace(MODEL, split=partial(_split_inner, content))
    state = load_state(checkpoint, kind, variant=variant, allow_pickle=allow_pickle)
    return OpenedModel(str(checkpoint), state)


def _split_inner(inner: Callable[[object], object], content: object) -> FlatStateDict[torch.Tensor]:
    return _split(inner(content))


@as_memory()
def fill_model(
    module: nn.Module,
    opened: OpenedModel,
    *,
    strict: bool = True,
    prefix: str | None = None,
    rename: Renaming | None = None,
    any_dtype: bool = False,
    same_shapes: bool = False,
    apply: Callable[[ModelLoadPlan], None] | None = None,
) -> LoadReport:
    """Fill a model with the values of an opened checkpoint; collective: each rank copies its own slices.

    Args:
        module: The model to overwrite; its sharding can differ from the saved one.
        opened: The checkpoint.
        strict: Raise if anything does not match; otherwise load the matching values and warn.
        prefix: Text in front of the names in the checkpoint that is to be left out.
        rename: Maps stored tensors to the names of the model, if they differ.
        any_dtype: Whether values of another dtype fit; they are converted.
        same_shapes: Whether another shape is an error also where `strict` is not set.
        apply: Fills the model, which can be lazy; default: `ModelLoadPlan.apply`.

    Returns:
        The names that did not match.

    Raises:
        ValueError: The checkpoint has names or shapes that are not the model's: all misfits are named, and
            nothing was overwritten.
        OSError: The checkpoint cannot be read.
    """
    model = NamedModel.of(module)
    (elsewhere,) = names_elsewhere(lambda: [model.values])
    plan = on_every_rank(
        lambda: plan_model_loading(
            model,
            stored_values(opened.state),
            source=opened.source,
            strict=strict,
            elsewhere=elsewhere,
            saved_prefix=prefix,
            rename=rename,
            any_dtype=any_dtype,
            same_shapes=same_shapes,
            is_lazy=apply is not None,
        )
    )
    with plan.noted():
        on_every_rank(plan.apply if apply is None else partial(apply, plan))
    return plan.report


@runtime_checkable
class _HasJson(Protocol):
    """A config of transformers."""

    def to_json_string(self) -> str: ...


def _config_files(module: nn.Module) -> dict[str, str]:
    """Return the config.json that `from_pretrained` needs with the weights, for a model of transformers.

    There is none for a model with adapters of peft, whose names `from_pretrained` would not find.
    """
    if getattr(module, "peft_config", None):
        return {}
    config = getattr(module, "config", None)
    return {"config.json": config.to_json_string()} if isinstance(config, _HasJson) else {}
