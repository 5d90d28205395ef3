"""Kinds of checkpoints and their files, and the names of tensors in models and checkpoints.

A model or an optimizer is saved as a flat state dict: tensors, which can be sharded, and a JSON tree (see
`resharding/_tree`). A `Kind` has the names of its files and the form of the two parts in a single torch file,
where users expect that of `torch.save` of a state dict. A `FileLayout` selects the files.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from colossalai.checkpoint_io._collective import gather, results
from colossalai.checkpoint_io._hugging_face_index import Stems
from colossalai.checkpoint_io.resharding import FlatStateDict, TensorMetadata
from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, listed
from colossalai.tensor import CHECKPOINT_PREFIX, CHECKPOINT_TIED_NAMES

T = TypeVar("T")
TREE_KEY = "colossalai"  # key of the tree in a safetensors header and in an index file


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint.

    Attributes:
        part: The name of the folder of a training state that is of this kind.
        stems: The file names in a folder.
        join: Makes the content of a single torch file out of a flat state dict.
        split: The inverse of `join`; raises a ValueError with the actual kind of other content. Tensors are
            not copied.
        needs_tree: Whether it always has values other than tensors.
    """

    part: str
    stems: Stems
    join: Callable[[FlatStateDict[TensorMetadata]], Mapping[str, object]]
    split: Callable[[object], FlatStateDict[torch.Tensor]]
    needs_tree: bool = False


@dataclass(frozen=True)
class FileLayout:
    """Layout of a checkpoint in files.

    Attributes:
        shard: A folder of shards rather than one file.
        size_per_shard: The most that a shard holds, in MB of 1024 * 1024 bytes.
        use_safetensors: In that format rather than torch's.
        variant: A word in the file names of a folder, by which transformers distinguishes several weights.
        buffer_size: The most memory that writing takes on a rank, in MB.
    """

    shard: bool = False
    size_per_shard: float = 1024
    use_safetensors: bool = False
    variant: str | None = None
    buffer_size: float = DEFAULT_BUFFER_MB


@dataclass(frozen=True)
class LoadReport:
    """Names that did not match when a checkpoint was loaded.

    Attributes:
        missing: Names that the model has and the checkpoint lacks; they keep their values.
        unexpected: Names that the checkpoint has and the model lacks; they are left out.
        mismatched: Names, each with the reason (shapes, dtypes), that do not fit. Those of another shape keep
            their values, those of another dtype are converted.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self) -> str:
        """Return one line per kind of misfit."""
        kinds = {
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "of another shape or dtype": self.mismatched,
        }
        return "\n".join(
            f"{len(names)} {kind}: {listed(names, shown=50)}" for kind, names in kinds.items() if names
        )


def common_prefix(stored: Collection[str], wanted: Collection[str]) -> str:
    """Return the prefix that all stored names have and the wanted ones lack, "" if they differ otherwise.

    Checkpoints are saved with a `prefix`, or out of a wrapper that adds one ("module.", "_orig_mod."). The
    names are only read with it removed if that makes the two sets the same, so nothing is guessed.
    """
    if not stored or set(stored) == set(wanted) or len(stored) != len(wanted):
        return ""
    # All n names are longer by the same text.
    extra, rest = divmod(sum(map(len, stored)) - sum(map(len, wanted)), len(stored))
    prefix = next(iter(stored))[: max(extra, 0)]
    return prefix if not rest and {prefix + name for name in wanted} == set(stored) else ""


def without_prefix(stored: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the stored values by their names without a prefix; a name that lacks it fits nothing."""
    for name, value in stored.items():
        has_prefix = name.startswith(prefix)
        yield name.removeprefix(prefix) if has_prefix else f"{name} (without {prefix!r} before it)", value


def without_common_prefix(
    stored: dict[str, Any], wanted: Set[str], groups: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return the stored values by the model's names, a prefix that all of them carry left out."""
    further_names = {name for names in groups.values() for name in names[1:]}
    prefix = common_prefix(stored, wanted) or common_prefix(stored, wanted - further_names)
    return {name.removeprefix(prefix): value for name, value in stored.items()}


def names_elsewhere(own_names: Callable[[], Sequence[Collection[str]]]) -> list[frozenset[str]]:
    """Return of each list the names that other ranks hold and this one does not; collective.

    Digests first, as most often they are equal; see [Note: one short exchange] in `_save_plan.py`.

    Args:
        own_names: Gives the lists of this rank, as many on all.

    Raises:
        ValueError: `own_names` raises it on some rank; on all ranks.
    """
    lists: list[list[str]] = []

    def digest() -> str:
        lists.extend(list(names) for names in own_names())
        return hashlib.sha256(json.dumps(lists).encode()).hexdigest()

    if len(set(results(digest))) == 1:
        return [frozenset() for _ in lists]
    everywhere = gather(lists)
    return [
        frozenset(name for lists_of_rank in everywhere for name in lists_of_rank[number]) - set(names)
        for number, names in enumerate(lists)
    ]


def set_prefix(module: nn.Module, prefix: str) -> None:
    """Set the prefix of a module's names in checkpoints, where other ranks use the same names for others."""
    setattr(module, CHECKPOINT_PREFIX, prefix)


def set_tied_names(param: nn.Parameter, names: Sequence[str]) -> None:
    """Set the names of a parameter in the whole model, those on other ranks included; the first counts."""
    setattr(param, CHECKPOINT_TIED_NAMES, tuple(names))


def tied_names(tensor: object) -> tuple[str, ...]:
    """Return the names that `set_tied_names` has set."""
    return getattr(tensor, CHECKPOINT_TIED_NAMES, ())


@dataclass(frozen=True)
class NamedModel:
    """A model with the values of its state dict by their names in a checkpoint; read once per save or load.

    Attributes:
        module: The model.
        prefix: Prefix of its names.
        values: The values. A parameter is itself one, by whose identity tied names are found.
    """

    module: nn.Module
    prefix: str
    values: dict[str, Any]

    @staticmethod
    def of(module: nn.Module, *, prefix: str = "") -> "NamedModel":
        """Return a model with the values of its state dict, their names with a further prefix."""
        prefix += getattr(module, CHECKPOINT_PREFIX, "")
        values = {prefix + name: value for name, value in module.state_dict(keep_vars=True).items()}
        return NamedModel(module, prefix, values)

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return the names of the parameters; see the function `parameter_names`."""
        # Not named_parameters() alone: under FSDP it may show gathered parameters, which the optimizer does
        # not know, where state_dict() first puts the slices back.
        names: dict[nn.Parameter, str] = {}
        for name, value in self.values.items():
            if isinstance(value, nn.Parameter):
                names.setdefault(value, name)
        for name, parameter in self.module.named_parameters():
            names.setdefault(parameter, self.prefix + name)
        return {param: next(iter(tied_names(param)), name) for param, name in names.items()}


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of a module's parameters, by the parameter: those that its state dict uses.

    A tied parameter has the first of its names, also where the other names are on other pipeline stages.
    """
    return NamedModel.of(module).parameter_names()


def module_names(module: nn.Module) -> list[str]:
    """Return the names in a checkpoint of a module."""
    return list(NamedModel.of(module).values)


def merge_by_name(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return the entries of all parts; of several with one name the first."""
    merged: dict[str, T] = {}
    for part in parts:
        for name, value in part.items():
            merged.setdefault(name, value)
    return merged
