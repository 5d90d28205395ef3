"""Weights of a rollout engine: the parameters in training, or full tensors gathered from their shards.

[Note: one pass over names]
Values are transferred in one pass over the names of the model in training, with one full tensor in memory at
a time. A layer with a low-rank adapter (LoRA, 2106.09685) yields consecutively its own weight W and the
factors A and B: the transferred value is W + scaling B A, recomputed from W each time, so that rounding
errors do not accumulate over syncs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from colossalai.booster import has_adapters
from colossalai.checkpoint_io import fill, gathered_weights, module_names, opened_tensors
from colossalai.cluster import gather_values
from colossalai.context import Mesh, get_current_device
from colossalai.core import global_context as gpc
from colossalai.inference import empty_part
from colossalai.pipeline import ModelStage
from colossalai.tensor import spec_of

_ADAPTED = ".base_layer"
_FACTORS = (".lora_A.", ".lora_B.")


class EngineWeights(ABC):
    """Abstract: source of an engine's values.

    Attributes:
        num_bytes: Size of the engine's own parameters on this rank; 0 without any.
    """

    num_bytes: int = 0

    @abstractmethod
    def refresh(self) -> None:
        """Copy the current values of the model in training; collective."""


class SharedWeights(EngineWeights):
    """The parameters in training themselves, which need no copy."""

    def refresh(self) -> None:
        """See the base class."""


class CopiedWeights(EngineWeights):
    """A model, or this rank's part of one, with values copied from a model in training.

    Args:
        source: This rank's part of the model in training, with or without adapters.
        mesh: Ranks that share the copy, along the axes `pp` and `tp`; None for a full copy on this rank.

    Attributes:
        part: This rank's part of the copy.

    Raises:
        ValueError: `source` has parameters that its family lacks, or a layer that the ranks of `mesh` cannot
            share.
    """

    def __init__(self, source: nn.Module, mesh: Mesh | None = None) -> None:
        config, dtype = config_of(source), next(source.parameters()).dtype
        self.part = empty_part(config, dtype, mesh)
        self._values = WeightStream(source)
        held = self.part.state_dict(keep_vars=True).values()
        self._held: dict[str, Tensor] = dict(zip(module_names(self.part), held, strict=True))
        self._wanted = names_of_tensors(shapes_of(config))
        self.num_bytes = sum(param.nbytes for param in self.part.parameters())
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """See the base class."""
        for name, tensor in self._values.of(self._wanted, into=self._held):
            own = self._held.get(name)
            # Skip a tensor that was gathered directly into the engine's memory.
            if own is not None and tensor.data_ptr() != own.data_ptr():
                (stored,) = opened_tensors({name: tensor}, source="the model in training").tensors.values()
                fill([(own, stored)])  # the slice of this rank, if the layer is shared


class WeightStream:
    """Full weights of a model in training, one after another, by the names of its family.

    Args:
        source: This rank's part of the model; every rank of the job creates a stream.

    Raises:
        ValueError: A layer of `source` has several active adapters.
    """

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._adapters = _all_adapters(source)

    @torch.no_grad()
    def of(
        self, wanted: Sequence[Sequence[str]], *, into: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name; collective: all ranks iterate over all tensors together.

        See [Note: one pass over names].

        Args:
            wanted: The names of each tensor of a model of the family.
            into: Destination memory of gathered tensors, by name.

        Raises:
            ValueError: The model has other tensors (raised after the last one, on all ranks), or an adapter
                changes a weight that is shared with another layer (raised before the first one).
        """
        self._refuse_shared(wanted)
        known = {name for names in wanted for name in names}
        seen: set[str] = set()
        unknown: list[str] = []
        for name, tensor in self._plain(into):
            if name not in known:
                unknown.append(name)
            elif name not in seen:
                seen.add(name)
                yield name, tensor
        missing = [names[0] for names in wanted if seen.isdisjoint(names)]  # tied tensors have one name
        if unknown or missing:
            raise ValueError(
                "the engine cannot serve this model: compared with its family it has in addition "
                f"{', '.join(unknown[:3]) or 'nothing'}, and lacks "
                f"{', '.join(missing[:3]) or 'nothing'} (of adapters it takes LoRA without biases)"
            )

    def _refuse_shared(self, wanted: Sequence[Sequence[str]]) -> None:
        # The delta of one layer would also change the other one; as separate weights the model is another
        # family.
        for names in wanted:
            if len(names) > 1 and any(name.removesuffix(".weight") in self._adapters for name in names):
                raise ValueError(
                    f"{' and '.join(names)} are one weight, and one of these layers has an adapter: adapt "
                    "other layers, or build the model with tie_word_embeddings=False"
                )

    def _plain(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by their names without adapters, deltas added; other tensors keep their names."""
        arriving = gathered_weights(
            self._source,
            gpc.mesh,
            device=get_current_device(),
            into=lambda name: into.get(plain_name(name)),
        )
        weight = factor = torch.empty(0)
        for names, tensor in arriving:
            for name in map(plain_name, names):
                layer, kind, of_adapter = _split_factor_name(name)
                adapter = self._adapters.get(layer)
                owner, _, what = of_adapter.rpartition(".")
                if kind and (adapter is None or owner != adapter.name):
                    continue  # an inactive adapter
                if kind == ".lora_A." and what == "weight":
                    factor = tensor
                elif kind == ".lora_B." and what == "weight":
                    yield f"{layer}.weight", self._apply_adapter(weight, layer, factor, tensor)
                elif name.removesuffix(".weight") in self._adapters and name.endswith(".weight"):
                    weight = tensor  # yielded once its factors have arrived
                else:
                    yield name, tensor

    def _apply_adapter(self, weight: Tensor, layer: str, a: Tensor, b: Tensor) -> Tensor:
        adapter = self._adapters[layer]
        wide = torch.promote_types(b.dtype, torch.float32)
        delta = b.to(weight.device, wide) @ a.to(weight.device, wide)
        return weight + (delta.T if adapter.is_transposed else delta) * adapter.scaling


def names_of_tensors(named: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of tensors, grouped by tensor."""
    groups: dict[int, list[str]] = {}
    for name, value in named.items():
        groups.setdefault(id(value), []).append(name)
    return list(groups.values())


class _Adapter(NamedTuple):
    """Settings of an adapter; `is_transposed` marks a layer with a weight of shape (in, out)."""

    name: str
    scaling: float
    is_transposed: bool


def _all_adapters(model: nn.Module) -> dict[str, _Adapter]:
    """Return the active adapters of all ranks by the plain names of their layers; collective.

    Raises:
        ValueError: A layer of `model` has several; raised on all ranks, including those of other stages.
    """
    own: dict[str, list[tuple[str, float, bool]]] = {}
    for name, layer in model.named_modules():
        scaling = getattr(layer, "scaling", None)
        if isinstance(scaling, dict) and hasattr(layer, "lora_A") and not layer.disable_adapters:
            # Merged adapters are part of the weight already.
            active = [
                each
                for each in layer.active_adapters
                if each in scaling and each not in layer.merged_adapters
            ]
            own[plain_name(name)] = [
                (each, float(scaling[each]), bool(layer.fan_in_fan_out)) for each in active
            ]
    found: dict[str, list[tuple[str, float, bool]]] = {}
    for part in gather_values(own):  # all ranks: a stage has the adapters of its own layers only
        found |= part
    for name, adapters in found.items():
        if len(adapters) > 1:
            raise ValueError(f"{name} has {len(adapters)} adapters at work: merge all but one of them")
    return {name: _Adapter(*adapters[0]) for name, adapters in found.items() if adapters}


def _split_factor_name(name: str) -> tuple[str, str, str]:
    """Split an adapter's name into the layer, the factor and the rest; for other tensors (name, "", "")."""
    for kind in _FACTORS:
        layer, found, rest = name.partition(kind)
        if found:
            return layer, found, rest
    return name, "", ""


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model without adapters."""
    return name.replace("base_model.model.", "", 1).replace(_ADAPTED, "")


def config_of(model: nn.Module) -> Any:
    """Return the config of a model of transformers, or of one inside.

    Raises:
        ValueError: `model` has none.
    """
    parts = (part.model if isinstance(part, ModelStage) else part for part in model.modules())
    found = next((part.config for part in parts if "config" in vars(part)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is not a causal language model of transformers: it has no config"
        )
    return found


def is_cut_alike(model: nn.Module, mesh: Mesh) -> bool:
    """Return whether this rank's part of a model equals its part of an engine; the same on all ranks.

    Args:
        model: This rank's part of the model in training.
        mesh: The ranks that share an engine, along the axes `pp` and `tp`.
    """
    job = gpc.mesh
    if any(size > 1 and axis != "tp" for axes in (mesh, job) for axis, size in _model_axes(axes).items()):
        return False  # stages of both may begin at different blocks
    if _model_axes(job).get("tp", 1) != mesh.axis_size("tp"):
        return False
    part = empty_part(config_of(model), next(model.parameters()).dtype, mesh, is_lazy=True)
    return _is_plain(model) and _shardings_of(_without_adapters(model)) == _shardings_of(
        _without_adapters(part)
    )


def _model_axes(mesh: Mesh) -> dict[str, int]:
    return {axis: mesh.axes[axis] for axis in mesh.replica_axes}


def _shardings_of(params: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return the shape and sharding of each parameter."""
    found = {}
    for name, param in params.items():
        spec = spec_of(param)
        cut = None if spec is None else (spec.shape, spec.dims, spec.stored_as, spec.parts)
        found[name] = (tuple(param.shape), cut)
    return found


def shapes_of(config: Any) -> dict[str, Tensor]:
    """Return the state dict of a model of transformers on the meta device, with tied tensors shared."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config).state_dict(keep_vars=True))


def served_module(model: nn.Module) -> nn.Module:
    """Return the module that an engine can run: the base model of a model with adapters.

    Its layers contain the adapters and apply them. Trained prompts are not part of it, so a model with prompt
    learning is returned unchanged.
    """
    wrapper: Any = model
    if has_adapters(model) and not wrapper.active_peft_config.is_prompt_learning:
        inner: nn.Module = wrapper.get_base_model()
        return inner
    return model


def is_whole(model: nn.Module) -> bool:
    """Return whether this rank has all parameters of a model unsharded, with adapters or without."""
    wanted = {
        name: tuple(each.shape)
        for name, each in shapes_of(config_of(model)).items()
        if isinstance(each, nn.Parameter)
    }
    found = {name: tuple(param.shape) for name, param in _without_adapters(model).items()}
    return found == wanted and _is_plain(model)


def _is_plain(model: nn.Module) -> bool:
    """Return whether a forward reads the parameters directly, without a method that gathers them."""
    return all(type(param) is nn.Parameter for param in model.parameters())


def _without_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model without those of adapters, by their plain names."""
    inner = served_module(model)
    of_adapters = {
        f"{layer}.{name}"
        for layer, part in inner.named_modules()
        if hasattr(part, "base_layer")
        for name in part.state_dict(keep_vars=True)
        if not name.startswith("base_layer.")
    }
    held = inner.state_dict(keep_vars=True).items()
    return {
        plain_name(name): value
        for name, value in held
        if isinstance(value, nn.Parameter) and name not in of_adapters
    }
