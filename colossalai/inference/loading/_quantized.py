"""Quantized models: quantized layer by layer while a checkpoint is read, saved, and loaded as saved.

A linear layer of a lazily built model is never materialized: its weight is read, quantized, and freed before
the next one is read. Codes and scales have specs like those of the weight, so they can be saved and loaded
under any sharding.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.checkpoint_io import (
    LoadReport,
    ModelLoadPlan,
    StoredTensor,
    atomic_file,
    fill,
    on_writer,
    save_model,
    set_tied_names,
)
from colossalai.inference.loading._metaseq import fill_from, load_values
from colossalai.inference.loading._skeleton import twin_of, without_memory
from colossalai.inference.products import (
    ProductParts,
    QuantizationWay,
    QuantizedLinear,
    QuantizedWeight,
    product_parts,
    quantize,
)
from colossalai.lazy import materialize
from colossalai.logging import get_dist_logger
from colossalai.tensor import PaddedSpec, ShardingSpec, set_spec, spec_of

_IN_CONFIG = "quantization"


def saved_way(config: Any) -> QuantizationWay | None:
    """Return the quantization of a saved model by its config; None for none."""
    saved = getattr(config, _IN_CONFIG, None)
    return None if saved is None else QuantizationWay.of(saved["way"])


def load_quantized(model: nn.Module, checkpoint: str | Path, way: QuantizationWay) -> LoadReport:
    """Load a checkpoint into a lazily built model and quantize its linear layers; collective.

    The peak memory is the result plus one weight.

    Args:
        model: A model of transformers or a stage of one, lazily built; it may be sharded over ranks.
        checkpoint: As for `load_values`, with unquantized values.
        way: Format of the quantized weights.

    Returns:
        A report without mismatches, which would have raised an error.

    Raises:
        ValueError: `checkpoint` does not fit, or no layer of `model` can have the format `way`.
        OSError: `checkpoint` cannot be read.
    """

    def apply(plan: ModelLoadPlan) -> None:
        stored = {id(tensor): found for tensor, found in plan.copies}
        kept: list[str] = []
        for layer in _layers(model, way, kept):
            layer.replace(_quantize_layer(layer, stored))
        _log_kept(kept, way)
        materialize(model)
        rest = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        fill([(tensor, found) for tensor, found in plan.copies if id(tensor) in rest])
        if plan.computed:
            model.load_state_dict(plan.computed, strict=False)

    return fill_from(model, checkpoint, apply=apply)


def quantize_stored(part: nn.Module, way: QuantizationWay, stored: Mapping[int, StoredTensor]) -> None:
    """Quantize the linear layers within a part of a model from stored values, one after another.

    Args:
        part: Parent of the layers, which may be without memory; unsupported layers stay unchanged.
        way: Format of the quantized weights.
        stored: Stored values by the ids of the layers' tensors.
    """
    for layer in _quantizable(part, way, []):
        layer.replace(_quantize_layer(layer, stored))


def load_saved(model: nn.Module, checkpoint: str | Path, way: QuantizationWay) -> LoadReport:
    """Load a folder of `save_quantized` into a lazily built model; collective.

    Args:
        model: As for `load_quantized`.
        checkpoint: The folder.
        way: Format of the quantized weights.

    Raises:
        ValueError: `checkpoint` does not fit.
        OSError: `checkpoint` cannot be read.
    """
    put_codes(model, way)
    return load_values(model, checkpoint)


def put_codes(model: nn.Module, way: QuantizationWay) -> None:
    """Replace the linear layers of a model by quantized ones without values; modifies the model in place.

    Args:
        model: A model without values, which may be sharded over ranks.
        way: Format of the quantized weights.

    Raises:
        ValueError: No layer of `model` can have the format `way`.
    """
    kept: list[str] = []
    for layer in _layers(model, way, kept):
        layer.replace(_empty(layer))


@torch.no_grad()
def quantize_model(model: nn.Module, way: QuantizationWay) -> nn.Module:
    """Quantize the linear layers of a model in memory, one after another; modifies the model in place.

    Args:
        model: The model, unsharded.
        way: Format of the quantized weights.

    Raises:
        ValueError: No layer of `model` can have the format `way`, or it is sharded over ranks.
    """
    kept: list[str] = []
    for layer in _layers(model, way, kept):
        if layer.spec is not None:
            raise ValueError("the model is cut over ranks: it is quantized when it is loaded from a folder")
        assert isinstance(layer.parts.weight, Tensor), "only these are listed"
        bias = layer.parts.bias
        found = quantize(layer.parts.weight, way)
        layer.replace(_linear(layer, found, None if bias is None else bias.detach().clone()))
    _log_kept(kept, way)
    return model


def save_quantized(model: nn.Module, folder: str | Path, *, source: str | Path | None = None) -> None:
    """Save a quantized model, to be loaded without another quantization; collective.

    The codes, scales and zero points of a layer `name` are stored as `name.codes`, `name.scales` and
    `name.zeros` in safetensors, and the format is the entry `quantization` of config.json.

    Args:
        model: Result of `load_model` with `quantize`, before an engine is built of it.
        folder: Destination.
        source: Folder that the model was loaded from, whose tokenizer and generation config are copied.

    Raises:
        ValueError: `model` is not quantized.
        OSError: `folder` cannot be written.
    """
    ways = {layer.way.name for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    if len(ways) != 1:
        raise ValueError(
            f"{type(model).__name__} is not quantized: load it with quantize='int8' or another way, and save "
            "it before an engine is built of it"
        )
    target = Path(folder)
    save_model(model, target, shard=True, use_safetensors=True)
    on_writer(partial(_finish_folder, target, ways.pop(), None if source is None else Path(source)))


def _finish_folder(target: Path, way: str, source: Path | None) -> None:
    """Add the quantization to the config, and copy the other files of the model's folder."""
    said = json.loads((target / "config.json").read_text(encoding="utf-8"))
    with atomic_file(target / "config.json") as draft:
        draft.write_text(json.dumps(said | {_IN_CONFIG: {"way": way}}, indent=2), encoding="utf-8")
    for path in [] if source is None else sorted(source.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copy(path, target / path.name)


@dataclass(frozen=True)
class _Layer:
    """A linear layer to be quantized: its parent, parts and sharding."""

    parent: nn.Module
    name: str
    layer: Any
    parts: ProductParts
    way: QuantizationWay
    spec: ShardingSpec | None
    is_out_first: bool
    names: tuple[str, ...]  # of the weight; several if it is tied

    def replace(self, layer: nn.Module) -> None:
        """Replace the layer by another one."""
        setattr(self.parent, self.name, layer)

    def spec_of(self, columns: int) -> ShardingSpec | None:
        """Return the spec of codes or scales of the weight: (out, columns), or (out,) for 0 columns."""
        spec = self.spec
        if spec is None:
            return None
        order = (0, 1) if self.is_out_first else (1, 0)
        kept = order[: 2 if columns else 1]
        dims = tuple(spec.dims[dim] for dim in kept)
        parts = tuple(spec.parts_of_dims[dim] for dim in kept)
        shape = (spec.shape[order[0]], columns)[: len(kept)]
        if isinstance(spec, PaddedSpec):
            unpadded = (spec.unpadded[order[0]], columns)[: len(kept)]
            return PaddedSpec(shape, dims, spec.mesh, parts=parts, unpadded=unpadded)
        return ShardingSpec(shape, dims, spec.mesh, parts=parts)

    @property
    def whole_inputs(self) -> int:
        """Number of inputs of the layer before sharding."""
        dim = 1 if self.is_out_first else 0
        size: int = self.spec.shape[dim] if self.spec is not None else self.layer.weight.shape[dim]
        return size

    @property
    def is_cut_by_inputs(self) -> bool:
        """Whether its inputs are sharded over ranks."""
        return self.spec is not None and bool(self.spec.dims[1 if self.is_out_first else 0])

    def columns(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of its unsharded quantized tensors, 0 for one without a second dimension."""
        way, inputs = self.way, self.whole_inputs
        if way.bits == 8:
            return {"codes": (inputs, torch.int8), "scales": (0, torch.float32)}
        groups = inputs // way.group
        pairs = dict.fromkeys(("scales", "zeros"), (groups, torch.bfloat16))
        return {"codes": (inputs // way.per_byte, torch.uint8)} | pairs


def _layers(model: nn.Module, way: QuantizationWay, kept: list[str]) -> Iterator[_Layer]:
    """Yield the linear layers that can be quantized, at least one; see `_quantizable`."""
    found = _quantizable(model, way, kept)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that can be stored as {way.name}"
            + (f": none has inputs that {way.group} divides on each rank" if way.group else "")
        )
    yield from found


def _quantizable(model: nn.Module, way: QuantizationWay, kept: list[str]) -> list[_Layer]:
    """Return the linear layers that can be quantized; append the names of the others to `kept`."""
    found = []
    names: dict[int, list[str]] = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(path)
    inner = [
        (f"{path}.{name}".lstrip("."), parent, name, layer)
        for path, parent in model.named_modules()
        for name, layer in parent.named_children()
    ]
    for path, parent, name, layer in inner:
        parts = product_parts(layer)
        if parts is None or isinstance(parts.weight, QuantizedWeight):
            continue
        weight: Any = layer.weight
        is_out_first = bool(getattr(layer, "out_first", type(layer).__name__ != "Conv1D"))
        each = _Layer(
            parent, name, layer, parts, way, spec_of(weight), is_out_first, tuple(names[id(weight)])
        )
        if _fits(each):
            found.append(each)
        else:
            kept.append(path)
    return found


def _fits(layer: _Layer) -> bool:
    if not layer.way.fits(layer.whole_inputs):
        return False
    try:
        for columns, _ in layer.columns().values():
            layer.spec_of(columns)
    except ValueError:  # a shard boundary would be inside a group
        return False
    return True


def _log_kept(kept: list[str], way: QuantizationWay) -> None:
    if kept:
        get_dist_logger().log_once(
            f"{len(kept)} linear layers are not stored as {way.name}, because its groups do not divide their "
            f"inputs: {', '.join(kept[:3])}",
            ranks=[0],
        )


def _quantize_layer(layer: _Layer, stored: Mapping[int, StoredTensor]) -> QuantizedLinear:
    """Return a quantized layer with the values of a checkpoint."""
    weight, bias = layer.layer.weight, layer.layer.bias
    spec = layer.spec
    # Scales are those of the whole weight, so a rank with a part of the inputs reads all of them.
    is_whole = spec is None or layer.is_cut_by_inputs
    shape = weight.shape if spec is None or not is_whole else spec.whole_shape
    values = torch.zeros(shape, dtype=weight.dtype)
    if spec is not None and not is_whole:
        set_spec(values, spec)
    fill([(values, stored[id(weight)])])
    found = quantize(values if layer.is_out_first else values.t(), layer.way)
    if spec is not None and is_whole:
        zeros = None if found.zeros is None else _shard(layer, "zeros", found.zeros)
        codes, scales = _shard(layer, "codes", found.codes), _shard(layer, "scales", found.scales)
        found = QuantizedWeight(layer.way, codes, scales, zeros)
    return _linear(layer, found, None if bias is None else _read_slice(bias, stored[id(bias)]))


def _shard(layer: _Layer, name: str, whole: Tensor) -> Tensor:
    spec = layer.spec_of(layer.columns()[name][0])
    assert spec is not None, "the layer is cut"
    return spec.slice_of(whole)


def _read_slice(like: Tensor, stored: StoredTensor) -> Tensor:
    """Return this rank's slice of a stored tensor, by the spec of a lazy one."""
    values = torch.zeros(like.shape, dtype=like.dtype)
    spec = spec_of(like)
    if spec is not None:
        set_spec(values, spec)
    fill([(values, stored)])
    return values


def _empty(layer: _Layer) -> QuantizedLinear:
    """Return a quantized layer without values."""
    made = {}
    for name, (columns, dtype) in layer.columns().items():
        out, inputs = layer.parts.weight.shape if isinstance(layer.parts.weight, Tensor) else (0, 0)
        shape = (out, columns * inputs // layer.whole_inputs) if columns else (out,)
        made[name] = torch.zeros(shape, dtype=dtype)
    weight = QuantizedWeight(layer.way, made["codes"], made["scales"], made.get("zeros"))
    bias = layer.layer.bias
    if bias is None:
        return _linear(layer, weight, None)
    values = torch.zeros(bias.shape, dtype=bias.dtype)
    spec = spec_of(bias)
    if spec is not None:
        set_spec(values, spec)
    return _linear(layer, weight, values)


def _linear(layer: _Layer, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
    for name, (columns, _) in layer.columns().items():
        spec = layer.spec_of(columns)
        if spec is not None:
            set_spec(getattr(weight, name), spec)
    parts = layer.parts
    source = twin_of(layer.layer, without_memory)
    if len(layer.names) > 1:  # the tied tensor is a separate parameter of the quantized model, or none
        set_tied_names(source.get_parameter("weight"), layer.names)
    return QuantizedLinear(
        weight,
        bias,
        dtype=parts.dtype,
        summed_over=parts.summed_over,
        gathered_over=parts.gathered_over,
        num_outputs=parts.num_outputs,
        source=source,
    )
