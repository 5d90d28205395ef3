"""Low-rank adapters (LoRA, 2106.09685) of peft: switched off, merged into the weights, saved on their own.

A model with its adapters off is the model at the start of training, so the reference of a KL penalty takes
no memory: every rank computes with the same parameters as before, without the factors A and B.
"""

import copy
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.checkpoint_io import (
    called_by_all_ranks,
    fill_model,
    on_every_rank,
    on_writer,
    open_model,
    save_model,
)
from colossalai.cluster import gather_values
from colossalai.pipeline import ModelStage
from colossalai.runtime import ModelWrapper
from colossalai.tensor import CHECKPOINT_TIED_NAMES, CHUNK_PLACE, set_spec, spec_of

FILE = "adapter_model.safetensors"
"""File name of an adapter's tensors, as in peft."""

_TORCH_FILE, _CONFIG_FILE = "adapter_model.bin", "adapter_config.json"
_SCALING = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
_KINDS = ("LORA", "ADALORA", "OFT")  # kinds of adapters whose files are written and read here
_FACTORS = ("lora_A", "lora_B")
_PREFIX = "base_model.model."  # of all names in a peft model


def raw_of(model: nn.Module) -> Any:
    """Return the model that was given to `boost`, or this rank's stage of it."""
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model is a peft model, boosted or not; the same on all stages of a pipeline."""
    return bool(getattr(raw_of(model), "peft_config", None))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which a model computes without its adapters, as before their training.

    Modules that are trained with the adapters (`modules_to_save`) are off, too. Parameters are not moved and
    keep their `requires_grad`, on which the data-parallel methods rely. Every rank enters and leaves it.

    Args:
        model: The model, boosted or not; a model without adapters is not changed.
        model: The model, boosted or not; one without adapters is not changed.
    """
    parts: list[Any] = [
        part for part in raw_of(model).modules() if _is_adapter(part) or _is_trained_with_adapters(part)
    ]
    before = [part.disable_adapters for part in parts]
    for part in parts:
        part._disable_adapters = True  # peft's own switch would also change `requires_grad`
    try:
        yield
    finally:
        for part, was_off in zip(parts, before, strict=True):
            part._disable_adapters = was_off


@torch.no_grad()
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's tensors of a model with its adapters merged into the weights, one after the other.

    A weight with an adapter is a new tensor, W + scaling B A; any other tensor is the parameter itself. It is
    cut as the parameter is: under tensor parallelism this rank's slice, with its spec, made without
    communication; under FSDP a DTensor, which all ranks make together; in a pipeline the tensors of this
    rank's stage. Collective: all ranks iterate in step. Under Gemini, which holds parameters in chunks, each
    tensor is whole, and must be used before the next one is taken.

    Args:
        model: The model, boosted or not; under Gemini, the model that boost returned.
        model: The model, boosted or not; as boost returned it under Gemini.

    Yields:
        The name in the model without adapters, and the tensor; a tied one under each of its names.

    Raises:
        ValueError: `model` has adapters of another kind than plain LoRA of linear layers, or one on a weight
            that two layers share.
    """
    raw = raw_of(model)
    layers = _adapters_of(raw)
    beside = {
        name: part.active_adapters[0] for name, part in raw.named_modules() if _is_trained_with_adapters(part)
    }
    values = raw.state_dict(keep_vars=True)
    if reason := _reason_against_merging(layers, values):
        raise ValueError(reason)
    for name, value in values.items():
        plain = _plain_name(name, beside)
        if plain is None or not isinstance(value, Tensor):
            continue
        place, _, kind = name.partition(".base_layer.")
        layer = layers.get(place)
        with _gathered(model, [value] if layer is None else [value, *layer.parameters()]):
            yield plain, value if layer is None else _merged(layer, value, kind)


def _gathered(model: nn.Module, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which tensors in chunks can be read; collective over all ranks."""
    in_chunks = [each for each in tensors if isinstance(each, nn.Parameter) and CHUNK_PLACE in vars(each)]
    if not isinstance(model, ModelWrapper) or not in_chunks:
        return nullcontext()
    return model.gathered(*in_chunks)


def merge(model: nn.Module, *, in_place: bool = False) -> Any:
    """Return the model without adapters, with these merged into its weights.

    Args:
        model: A peft model, boosted or not, that is whole on this rank: under DDP, ZeRO 1 or 2, or alone.
            Under any other plan, `save_pretrained(..., merges=True)` writes the merged model.
        in_place: Whether to change and return the model that was given to `get_peft_model`, not a copy.

    Raises:
        ValueError: `model` has no adapters or adapters that cannot be merged, is not whole on this rank, or
            has been boosted and `in_place` is set.
    """
    raw = raw_of(model)
    if not has_adapters(raw):
        raise ValueError(f"{type(raw).__name__} has no adapters to merge: give a model of get_peft_model")
    plain = all(type(param) is nn.Parameter and spec_of(param) is None for param in raw.parameters())
    if isinstance(raw, ModelStage) or not plain:
        raise ValueError(
            "this rank holds the model in parts, which are not a model by themselves: write it with "
            "save_pretrained(..., merges=True), and open that folder"
        )
    if in_place and raw is not model:
        raise ValueError("this model has been boosted, and its plan relies on its layers: leave in_place out")
    next(merged_tensors(raw))  # raises if a part cannot be merged, before anything is changed
    return (raw if in_place else copy.deepcopy(raw)).merge_and_unload().requires_grad_(True)


def with_config(raw: nn.Module) -> Any:
    """Return the part of a model with a transformers config; None without one.

    Args:
        raw: The model, or a stage of it.
    """
    parts = (part.model if isinstance(part, ModelStage) else part for part in raw.modules())
    return next((part for part in parts if "config" in vars(part)), None)


def write_config(raw: Any, folder: str | Path, *, is_named: bool = False) -> None:
    """Write the transformers configs that belong to weights.

    Args:
        raw: A model with a config.
        folder: Target folder.
        is_named: Whether the config has the class name of `raw` already.
    """
    config = copy.deepcopy(raw.config)
    config.dtype = next(raw.parameters()).dtype
    if not is_named:
        config.architectures = [type(raw).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if getattr(raw, "generation_config", None) is not None:
        raw.generation_config.save_pretrained(folder)


@called_by_all_ranks("save", "a merged model")
def save_merged(model: nn.Module, folder: str | Path, *, size_per_shard: float = 1024) -> None:
    """Save a model with its adapters merged into the weights; every rank calls it, rank 0 writes.

    `from_pretrained` of transformers opens the folder.

    Args:
        model: The model, boosted or not.
        folder: Target folder.
        size_per_shard: Largest size of a file of weights, in MB.

    Raises:
        ValueError: `model` has no adapters, or adapters that cannot be merged.
        OSError: `folder` cannot be written.
    """
    raw = _with_adapters(model)
    refuse_unmergeable(raw)
    merged = TensorsByName(dict(merged_tensors(model)))
    save_model(merged, folder, shard=True, use_safetensors=True, size_per_shard=size_per_shard)
    configured = with_config(raw.get_base_model())
    if configured is not None:
        on_writer(partial(write_config, configured, folder))


@called_by_all_ranks("load", "adapters")
def load_adapters(model: nn.Module, folder: str | Path) -> None:
    """Load adapters into a model's adapters; every rank calls it and copies its own slices.

    Args:
        model: The model, boosted or not, with adapters of the same shape.
        folder: A folder of `save_adapters`, or of peft's `save_pretrained`.

    Raises:
        ValueError: `model` has no adapters or other ones, `folder` has none, or their scaling differs;
            nothing was overwritten.
        OSError: `folder` cannot be read.
    """
    raw = _with_adapters(model)
    folders = {name: _folder_of(name, folder) for name in raw.peft_config}
    on_every_rank(partial(_refuse_other_configs, raw.peft_config, folders))
    for name, source in folders.items():
        found = next((file for file in (source / FILE, source / _TORCH_FILE) if file.exists()), source / FILE)
        opened = open_model(found)
        # With adapters of an embedding, or a resized embedding, peft also writes the embedding itself.
        whole = {
            each: value for each, value in raw.state_dict(keep_vars=True).items() if each in opened.tensors
        }
        held = TensorsByName(whole | dict(adapter_tensors(raw, name)))
        fill_model(held, opened, prefix="", any_dtype=True)


def _with_adapters(model: nn.Module) -> Any:
    """Return the model that was given to `boost`.

    Raises:
        ValueError: `model` has no adapters, or adapters of a kind that cannot be written here.
    """
    raw = raw_of(model)
    if not has_adapters(raw):
        raise ValueError(
            f"{type(raw).__name__} has no adapters: give a model of peft's get_peft_model, or use save_model "
            "and load_model, which take all weights"
        )
    for name, config in raw.peft_config.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _KINDS:
            raise ValueError(
                f"the adapter {name} is of the kind {kind}, and those written here are {', '.join(_KINDS)}: "
                "use save_model and load_model, which take all weights"
            )
    return raw


def _folder_of(adapter: str, folder: str | Path) -> Path:
    return Path(folder) if adapter == "default" else Path(folder, adapter)


def _refuse_other_configs(configs: Mapping[str, Any], folders: Mapping[str, Path]) -> None:
    """Refuse adapters that would compute other values with the same tensors.

    Raises:
        ValueError: A folder has no adapter, or its config has another scaling.
    """
    for name, folder in folders.items():
        file = folder / _CONFIG_FILE
        if not file.is_file():
            raise ValueError(f"{folder} has no {_CONFIG_FILE}: give a folder of booster.save_lora or of peft")
        stored = json.loads(file.read_text())
        for option in _SCALING:
            here = getattr(configs[name], option, None)
            if option in stored and (stored[option] or None) != (here or None):
                raise ValueError(
                    f"{option} is {stored[option]!r} in {file} and {here!r} in the model, whose adapters "
                    "would compute something else: build the model with "
                    f"LoraConfig.from_pretrained({str(folder)!r})"
                )


@called_by_all_ranks("save", "adapters")
def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Save the adapters of a model in peft's format; every rank calls it, rank 0 writes.

    `PeftModel.from_pretrained` opens the folder, for a model trained under any plan.

    Args:
        model: The model, boosted or not.
        folder: Target folder; adapters with a name other than "default" go to subfolders of their names.

    Raises:
        ValueError: `model` has no adapters.
        OSError: `folder` cannot be written.
    """
    raw = _with_adapters(model)
    for name, config in raw.peft_config.items():
        target = _folder_of(name, folder)
        on_writer(partial(target.mkdir, parents=True, exist_ok=True))
        # Only names are chosen here; the writer gathers slices into whole tensors.
        chosen = TensorsByName(dict(adapter_tensors(raw, name)))
        save_model(chosen, target / FILE, use_safetensors=True)
        on_writer(partial(_write_config, raw, config, target))


def adapter_tensors(raw: Any, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors of this rank, by their names in peft's files.

    These leave out the adapter's own name, since it is chosen when the file is opened.

    Args:
        raw: The model, or a stage of it.
        adapter: The adapter.

    Raises:
        ValueError: `raw` has single tokens that are trained with the adapters.
    """
    config = raw.peft_config[adapter]
    if getattr(config, "trainable_token_indices", None) is not None:
        raise ValueError("trainable_token_indices are not written here: save them by peft, on one process")
    kinds: dict[str, tuple[str, ...]] = {
        name: part.adapter_layer_names
        for name, part in raw.named_modules()
        if _is_adapter(part) or _is_trained_with_adapters(part)
    }
    own = re.compile(rf"(?P<place>.+)\.(?P<kind>\w+)\.{re.escape(adapter)}(?P<rest>(\..+)?)")
    for name, tensor in raw.state_dict(keep_vars=True).items():
        found = own.fullmatch(name)
        if found is not None and found["kind"] in kinds.get(found["place"], ()):
            kind, rest = f".{found['kind']}", found["rest"]
            if kind == ".lora_magnitude_vector":
                rest = ""  # files of DoRA have the name of an earlier version
            yield found["place"] + ("" if kind == ".modules_to_save" else kind) + rest, tensor
        elif name.endswith({"none": " ", "all": ".bias", "lora_only": ".base_layer.bias"}[config.bias]):
            yield name, tensor


def refuse_unmergeable(raw: nn.Module) -> None:
    """Refuse adapters that cannot be merged, on all ranks if one has any; every rank calls it.

    Raises:
        ValueError: `raw` has such adapters, here or on another stage; see `merged_tensors`.
    """
    own = _reason_against_merging(_adapters_of(raw), raw.state_dict(keep_vars=True))
    # All ranks read the first reason of any, so all of them raise.
    if reason := next(filter(None, gather_values(own)), ""):
        raise ValueError(reason)


class TensorsByName(nn.Module):
    """Tensors under given names, with the part of a model's interface that a checkpoint uses.

    Args:
        tensors: The tensors of this rank.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors by name."""
        return dict(self._tensors)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the tensors by name; a load writes into them."""
        yield from self._tensors.items()


def _classes(*names: tuple[str, str]) -> tuple[type, ...]:
    """Return classes of peft; empty if it has not been imported, as then no module is an adapter."""
    modules = ((sys.modules.get(module), name) for module, name in names)
    return tuple(getattr(module, name) for module, name in modules if module is not None)


def _adapters_of(raw: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in raw.named_modules() if _is_adapter(part)}


def _is_adapter(module: nn.Module) -> bool:
    return isinstance(module, _classes(("peft.tuners.tuners_utils", "BaseTunerLayer")))


def _is_trained_with_adapters(module: nn.Module) -> bool:
    """Return whether a module is peft's wrapper of a module that is trained with the adapters."""
    return isinstance(module, _classes(("peft.utils.other", "AuxiliaryTrainingWrapper")))


def _reason_against_merging(layers: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return why adapters are not W + scaling B A of weights of their own; empty if they are."""
    linear: tuple[Any, ...] = _classes(("peft.tuners.lora.layer", "Linear"))
    times = Counter(id(value) for value in values.values())
    for name, layer in layers.items():
        if not isinstance(layer, linear) or layer.lora_variant:
            return (
                f"{name} has an adapter of {type(layer).__name__}, and only plain LoRA of linear layers is "
                "merged here: take peft's merge_and_unload on one process"
            )
        weight = values.get(f"{name}.base_layer.weight")
        if any(layer.lora_bias.values()) and f"{name}.base_layer.bias" not in values:
            return f"{name} has no bias to which that of its adapter could be added: leave lora_bias out"
        # Stages that share a weight have it under one name each.
        if weight is not None and max(times[id(weight)], len(getattr(weight, CHECKPOINT_TIED_NAMES, ()))) > 1:
            return (
                f"the weight of {name} is that of another layer, too, which its adapter leaves alone: they "
                "would be two, so build the model with tie_word_embeddings=False, or adapt other layers"
            )
    return ""


def _plain_name(name: str, beside: Mapping[str, str]) -> str | None:
    """Return the name of a tensor in the model without adapters; None if that has no such tensor.

    Args:
        name: Its name in the peft model.
        beside: Modules trained with the adapters: from the prefix of their names to the adapter's name.
    """
    for begin, adapter in beside.items():
        inner = name.removeprefix(f"{begin}.")
        if inner != name:
            inside = inner.removeprefix(f"modules_to_save.{adapter}.")
            return None if inside == inner else f"{begin}.{inside}".removeprefix(_PREFIX)
    if any(f".{factor}." in name for factor in _FACTORS):
        return None
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def _active(layer: Any) -> list[str]:
    """Return the active adapters of a layer that are not merged into its weight."""
    if layer.disable_adapters:
        return []
    return [
        each for each in layer.active_adapters if each in layer.lora_A and each not in layer.merged_adapters
    ]


def _merged(layer: Any, value: Tensor, kind: str) -> Tensor:
    """Return a copy of a layer's weight or bias with its adapters added."""
    total = value.detach()
    for name in _active(layer) if kind == "weight" else filter(layer.lora_bias.get, _active(layer)):
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        if kind == "weight":
            wide = torch.promote_types(b.dtype, torch.float32)
            delta = _replicate_factor(b).to(wide) @ _replicate_factor(a).to(wide) * layer.scaling[name]
            delta = delta.t() if layer.fan_in_fan_out else delta
        else:
            delta = layer.lora_B[name].bias * layer.scaling[name]
        total = total + _redistribute_like(delta, total).to(total.dtype)
    spec = spec_of(value)
    if spec is not None and spec_of(total) is None:
        set_spec(total, spec)
    return total


def _replicate_factor(factor: Tensor) -> Any:
    """Return a factor that FSDP has sharded as a replicated one (it is thin); others are not changed."""
    mesh = getattr(factor, "device_mesh", None)
    if mesh is None:
        return factor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(factor, DTensor), "nothing else has a mesh"
    return factor.redistribute(mesh, [Replicate()] * mesh.ndim)


def _redistribute_like(delta: Any, like: Any) -> Tensor:
    """Return an update with the placements of its DTensor weight; as it is for other weights."""
    mesh = getattr(like, "device_mesh", None)
    placed: Tensor = delta if mesh is None else delta.redistribute(mesh, like.placements)
    return placed


def _write_config(raw: Any, config: Any, folder: Path) -> None:
    """Write the config of an adapter for inference."""
    base = raw.get_base_model()
    written = copy.deepcopy(config)
    written.inference_mode = True
    if written.base_model_name_or_path is None:
        written.base_model_name_or_path = vars(base).get("name_or_path") or None
    kind = next(each for each in type(base).__mro__ if not each.__name__.startswith("FSDP"))
    found = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    written.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else found)
