"""Loading of adapters: checks peft's tensors against the layers of a model, and reads this rank's slices.

peft's names are `base_model.model.`, the name of the layer in the model, and `.lora_A.weight` or
`.lora_B.weight`. One error lists all mismatches of all adapters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.checkpoint_io import StoredTensor, fill, open_model
from colossalai.inference.adapters._config import AdapterConfig
from colossalai.inference.paging import Runner
from colossalai.inference.products import LinearDelta, ProductParts, QuantizedLinear, product_parts
from colossalai.pipeline import ModelStage
from colossalai.tensor import PaddedSpec, ShardingSpec, set_spec, spec_of

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# With an adapted head peft also saves the head itself, which the adapter has not changed.
_ENDS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".base_layer.weight": "base"}
_SAME_BASE = 0.01  # relative to the largest value: the dtype of the saved weight may differ
# Features of the unsupported tensors in such a file.
_REASONS = {
    ".lora_magnitude_vector": "DoRA",
    ".lora_embedding_": "LoRA of an embedding",
    ".lora_B.bias": "lora_bias",
    ".lora_A.bias": "lora_bias",
}


@dataclass(frozen=True)
class AdapterFile:
    """An opened adapter; its values are still in the file.

    Attributes:
        name: Name of the adapter in requests.
        config: Its config.
        pairs: Tensors "A" and "B", and sometimes "base" (the layer's own weight), by the name of the layer.
        others: Names of further tensors.
    """

    name: str
    config: AdapterConfig
    pairs: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @classmethod
    def open(cls, name: str, folder: str | Path) -> "AdapterFile":
        """Open a folder of peft; collective.

        Raises:
            ValueError: `folder` has no adapter, or one that is unsupported or requires code to be read.
        """
        if not name:
            raise ValueError(f"an adapter without a name, of {str(folder)!r}: requests select it by its name")
        found = [path for file in _FILES if (path := Path(folder) / file).is_file()]
        config = AdapterConfig.read(Path(folder))
        if not found:
            raise ValueError(f"{str(folder)!r} has none of {', '.join(_FILES)}")
        pairs: dict[str, dict[str, StoredTensor]] = {}
        others = []
        for key, tensor in open_model(found[0]).tensors.items():
            end = next((end for end in _ENDS if key.endswith(end)), None)
            if end is None or not key.startswith(_PREFIX):
                others.append(key)
            else:
                layer = key.removeprefix(_PREFIX).removesuffix(end)
                pairs.setdefault(layer, {})[_ENDS[end]] = tensor
        return cls(name, config, pairs, tuple(others))

    def misfits(self, layers: Mapping[str, nn.Module]) -> Iterator[str]:
        """Yield the mismatches with a model, as text.

        Args:
            layers: The modules of the whole model by name.
        """
        for key in self.others:
            reason = next((reason for part, reason in _REASONS.items() if part in key), None)
            yield f"{key}: {f'{reason} is not served' if reason else 'it is none of LoRA for a linear layer'}"
        for layer, pair in self.pairs.items():
            missing = [f"lora_{side}" for side in "AB" if side not in pair]
            if missing:
                yield f"{layer}: it has no {missing[0]}.weight"
            elif layer not in layers:
                yield f"{layer}: the model has no such layer"
            elif self.config.adapts(layer) is False:
                yield f"{layer}: the config does not name it, and peft would leave it out"
            else:
                yield from self._wrong_shapes(layer, product_parts(layers[layer]))
        for layer in layers:
            if layer not in self.pairs and self.config.adapts(layer):
                yield f"{layer}: the config names it, and it has no tensors"

    def _wrong_shapes(self, layer: str, parts: ProductParts | None) -> Iterator[str]:
        if parts is None:
            yield f"{layer}: only linear layers are adapted"
            return
        rank = self.config.rank_of(layer)
        size, out = _in_features(parts), parts.out_features
        wanted = {"A": (rank, size), "B": (out, rank), "base": (out, size)}
        for side, tensor in self.pairs[layer].items():
            found, shape = tuple(tensor.shape), wanted[side]
            if found != shape:
                key = next(end for end, each in _ENDS.items() if each == side)
                yield f"{layer}{key}: {found}, and the model and rank {rank} take {shape}"


def check_adapters(model: nn.Module, folders: Mapping[str, str]) -> None:
    """Check that adapters fit a model; collective if ranks load it.

    Args:
        model: The whole model, which may be without memory.
        folders: Folders of peft by the names of the adapters.

    Raises:
        ValueError: `folders` have unsupported adapters, or adapters with other names and shapes than the
            model (the message lists all).
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    problems = []
    for name, folder in folders.items():
        try:
            opened = AdapterFile.open(name, folder)
            problems += [f"adapter {name!r}: {each}" for each in opened.misfits(layers)]
        except (OSError, ValueError) as error:
            problems.append(f"adapter {name!r}: {error}")
    if problems:
        raise ValueError("\n".join(problems))


def load_adapters(
    runner: Runner, folders: Mapping[str, str], received: Any = None
) -> dict[nn.Module, LinearDelta]:
    """Load the deltas of the linear layers of a model, or of this rank's part of it.

    Ranks that share layers call it together.

    Args:
        runner: The model, or a stage of it, with known shapes and before its parts are replaced.
        folders: Folders of peft by the names of the adapters; the first one has number 1.
        received: For a later stage, an example of its input.

    Returns:
        The deltas by layer.

    Raises:
        ValueError: `folders` have adapters that do not fit, or adapt layers that are not called once for
            each token, so that their rows have no known request.
    """
    if not folders:
        return {}
    layers = dict(runner.model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, dict[int, tuple[Tensor, Tensor]]] = {}
    names: dict[nn.Module, str] = {}
    is_stage = isinstance(runner.model, ModelStage)
    for number, (name, folder) in enumerate(folders.items(), 1):
        opened = AdapterFile.open(name, folder)
        for path, pair in opened.pairs.items():
            layer = layers.get(path)
            parts = None if layer is None else product_parts(layer)
            if is_stage and (layer is None or not any(True for _ in layer.parameters())) and parts is None:
                continue  # the layer is on another stage
            if layer is None or parts is None:
                raise ValueError(f"adapter {name!r}: {path}: {type(layer).__name__} cannot be adapted")
            names[layer] = path
            if "base" in pair and not _is_same(layer, pair["base"]):
                raise ValueError(f"adapter {name!r}: {path}.base_layer.weight: the model has other values")
            found.setdefault(layer, {})[number] = _read_slices(
                layer, parts, pair, opened.config.scale_of(path)
            )
    rows = runner.find_rows(list(found), received)
    unknown = [path for layer, path in names.items() if rows.get(layer) not in ({"tokens"}, {"logits"})]
    if unknown:
        raise ValueError(
            f"{type(runner.model).__name__} does not call these layers for each token of a step, so they "
            f"cannot be adapted: {', '.join(unknown)}"
        )
    return {
        layer: LinearDelta(
            pairs, of_logits=rows[layer] == {"logits"}, is_batch_invariant=runner.is_batch_invariant
        )
        for layer, pairs in found.items()
    }


def _in_features(parts: ProductParts) -> int:
    weight = parts.weight
    return int(weight.shape[1]) if isinstance(weight, Tensor) else weight.in_features


def _is_same(layer: Any, base: StoredTensor) -> bool:
    """Return whether a layer has the values saved for it; not checked for a quantized one."""
    if isinstance(layer, QuantizedLinear):
        return True
    weight: Tensor = layer.weight
    values = torch.zeros(weight.shape, dtype=torch.float32)
    spec = spec_of(weight)
    if spec is not None:
        set_spec(values, spec)
    fill([(values, base)])
    found = weight.detach().to("cpu", torch.float32)
    return bool((values - found).abs().max() <= _SAME_BASE * found.abs().max())


def _read_slices(
    layer: Any, parts: ProductParts, pair: Mapping[str, StoredTensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Return this rank's slices of A and scale * B, in the dtype of the layer."""
    rank = pair["A"].shape[0]
    device = layer.codes.device if isinstance(layer, QuantizedLinear) else layer.weight.device
    made = []
    cuts = _factor_specs(layer, rank) or (None, None)
    shapes = ((rank, _in_features(parts)), (parts.out_features, rank))
    for side, shape, cut, factor in zip("AB", shapes, cuts, (1.0, scale), strict=True):
        exact = torch.float64 if pair[side].dtype == torch.float64 else torch.float32
        values = torch.zeros(shape, dtype=exact)
        if cut is not None:
            set_spec(values, cut)
        fill([(values, pair[side])])
        made.append((values * factor).to(device, parts.dtype))
    return made[0], made[1]


def _factor_specs(layer: Any, rank: int) -> tuple[ShardingSpec, ShardingSpec] | None:
    """Return the specs of A and B for a sharded layer: sharded like its inputs and its outputs."""
    is_quantized = isinstance(layer, QuantizedLinear)
    spec = spec_of(layer.codes if is_quantized else layer.weight)
    if spec is None:
        return None
    if is_quantized and layer.way.bits == 4:  # results of sharded layers differ from those of one process
        raise ValueError("adapters of layers in 4 bits are served by one tensor rank: leave tp or int4 out")
    is_out_first = is_quantized or bool(getattr(layer, "out_first", type(layer).__name__ != "Conv1D"))
    outputs, inputs = (0, 1) if is_out_first else (1, 0)

    def cut(dim: int, *, is_first: bool) -> ShardingSpec:
        def shape(sizes: tuple[int, ...]) -> tuple[int, int]:
            size = sizes[dim]
            return (size, rank) if is_first else (rank, size)

        dims = (spec.dims[dim], ()) if is_first else ((), spec.dims[dim])
        parts = spec.parts_of_dims[dim]
        said = (parts, 1) if is_first else (1, parts)
        if isinstance(spec, PaddedSpec):
            return PaddedSpec(shape(spec.shape), dims, spec.mesh, parts=said, unpadded=shape(spec.unpadded))
        return ShardingSpec(shape(spec.shape), dims, spec.mesh, parts=said)

    return cut(inputs, is_first=False), cut(outputs, is_first=True)
