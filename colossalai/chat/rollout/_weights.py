"""Weights of a rollout engine: the parameters in training, or whole tensors put together from parts.

[Note: one pass over names]
Values are handed over in one pass over the names of the model in training, of which one tensor at a time is
whole in memory. Of a layer with an adapter of low rank (LoRA, 2106.09685) come, in this order and next to
each other, its own weight W and the factors A and B: handed over is W + scaling B A, computed anew from W
each time, so that no rounding adds up over syncs.
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
    """Abstract: where an engine has its values from.

    Attributes:
        num_bytes: What parameters of its own take on this rank; 0 where it has none there.
    """

    num_bytes: int = 0

    @abstractmethod
    def refresh(self) -> None:
        """Take over the values that the model in training has now; every rank calls it."""


class SharedWeights(EngineWeights):
    """The parameters in training themselves: there is nothing to take over."""

    def refresh(self) -> None:
        """See the base class."""


class CopiedWeights(EngineWeights):
    """A model, or this rank's part of one, that takes over the values of a model in training.

    Args:
        source: What this rank has of the model in training, in parts and with adapters or not.
        mesh: Ranks that share the copy, along the axes `pp` and `tp`; None for a whole copy on this rank.

    Attributes:
        part: What this rank has of the copy.

    Raises:
        ValueError: `source` has parameters that are none of its family's, or a layer that the ranks of `mesh`
            cannot share.
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
            # What was put together in the engine's own memory is there.
            if own is not None and tensor.data_ptr() != own.data_ptr():
                (stored,) = opened_tensors({name: tensor}, source="the model in training").tensors.values()
                fill([(own, stored)])  # the slice of this rank, if the layer is shared


class WeightStream:
    """The weights of a model in training, whole and one after the other, under the names of its family.

    Args:
        source: What this rank has of it; every rank of the job makes one.

    Raises:
        ValueError: A layer of `source` has several adapters at work.
    """

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._adapters = _all_adapters(source)

    @torch.no_grad()
    def of(
        self, wanted: Sequence[Sequence[str]], *, into: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by their names; collective: every rank takes all of them, at the same time.

        See [Note: one pass over names].

        Args:
            wanted: The names of each tensor of a model of the family.
            into: Memory for tensors by name, which is used where one is put together.

        Raises:
            ValueError: The model has others; after the last tensor, and on all ranks. Or an adapter changes a
                weight that another layer shares; before the first.
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
        missing = [names[0] for names in wanted if seen.isdisjoint(names)]  # tied ones have one of them
        if unknown or missing:
            raise ValueError(
                "the engine cannot answer with this model: it has "
                f"{', '.join(unknown[:3]) or 'nothing'} beside what its family has, and lacks "
                f"{', '.join(missing[:3]) or 'nothing'} (of adapters it takes LoRA without biases)"
            )

    def _refuse_shared(self, wanted: Sequence[Sequence[str]]) -> None:
        # The other layer would get what is added for the first: as two weights they are another family.
        for names in wanted:
            if len(names) > 1 and any(name.removesuffix(".weight") in self._adapters for name in names):
                raise ValueError(
                    f"{' and '.join(names)} are one weight, and one of these layers has an adapter: adapt "
                    "other layers, or build the model with tie_word_embeddings=False"
                )

    def _plain(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under names without adapters, these added; what is no weight keeps its name."""
        arriving = gathered_weights(
            self._source,
            gpc.mesh,
            device=get_current_device(),
            into=lambda name: into.get(plain_name(name)),
        )
        weight = factor = torch.empty(0)
        for names, tensor in arriving:
            for name in map(plain_name, names):
                layer, kind, of_adapter = _parted(name)
                adapter = self._adapters.get(layer)
                owner, _, what = of_adapter.rpartition(".")
                if kind and (adapter is None or owner != adapter.name):
                    continue  # it is not at work
                if kind == ".lora_A." and what == "weight":
                    factor = tensor
                elif kind == ".lora_B." and what == "weight":
                    yield f"{layer}.weight", self._adapted(weight, layer, factor, tensor)
                elif name.removesuffix(".weight") in self._adapters and name.endswith(".weight"):
                    weight = tensor  # which is yielded when its factors have come
                else:
                    yield name, tensor

    def _adapted(self, weight: Tensor, layer: str, a: Tensor, b: Tensor) -> Tensor:
        adapter = self._adapters[layer]
        wide = torch.promote_types(b.dtype, torch.float32)
        delta = b.to(weight.device, wide) @ a.to(weight.device, wide)
        return weight + (delta.T if adapter.is_transposed else delta) * adapter.scaling


def names_of_tensors(named: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of tensors, those of one next to each other."""
    groups: dict[int, list[str]] = {}
    for name, value in named.items():
        groups.setdefault(id(value), []).append(name)
    return list(groups.values())


class _Adapter(NamedTuple):
    """What is to be known of an adapter beside its factors; whether its layer is (in, out) is one."""

    name: str
    scaling: float
    is_transposed: bool


def _all_adapters(model: nn.Module) -> dict[str, _Adapter]:
    """Return the adapters at work by the plain names of their layers, on whatever ranks; collective.

    Raises:
        ValueError: A layer of `model` has several; on all ranks, also on those of other stages.
    """
    own: dict[str, list[tuple[str, float, bool]]] = {}
    for name, layer in model.named_modules():
        scaling = getattr(layer, "scaling", None)
        if isinstance(scaling, dict) and hasattr(layer, "lora_A") and not layer.disable_adapters:
            # What is merged is in the weight already.
            active = [
                each
                for each in layer.active_adapters
                if each in scaling and each not in layer.merged_adapters
            ]
            own[plain_name(name)] = [
                (each, float(scaling[each]), bool(layer.fan_in_fan_out)) for each in active
            ]
    found: dict[str, list[tuple[str, float, bool]]] = {}
    for part in gather_values(own):
        found |= part
    for name, adapters in found.items():
        if len(adapters) > 1:
            raise ValueError(f"{name} has {len(adapters)} adapters at work: merge all but one of them")
    return {name: _Adapter(*adapters[0]) for name, adapters in found.items() if adapters}


def _parted(name: str) -> tuple[str, str, str]:
    """Return the layer of an adapter's factor, which one it is, and the rest; of other tensors the name."""
    for kind in _FACTORS:
        layer, found, rest = name.partition(kind)
        if found:
            return layer, found, rest
    return name, "", ""


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace("base_model.model.", "", 1).replace(_ADAPTED, "")


def config_of(model: nn.Module) -> Any:
    """Return the config of a model of transformers, or of one within.

    Raises:
        ValueError: `model` has none.
    """
    parts = (part.model if isinstance(part, ModelStage) else part for part in model.modules())
    found = next((part.config for part in parts if "config" in vars(part)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is no causal language model of transformers: it has no config"
        )
    return found


def is_cut_alike(model: nn.Module, mesh: Mesh) -> bool:
    """Return whether what this rank holds of a model is its part of an engine; the same on all ranks.

    Args:
        model: What this rank holds of the model in training.
        mesh: The ranks that share an engine, along the axes `pp` and `tp`.
    """
    job = gpc.mesh
    if any(size > 1 and axis != "tp" for axes in (mesh, job) for axis, size in _model_axes(axes).items()):
        return False  # stages of both may begin at other blocks
    if _model_axes(job).get("tp", 1) != mesh.axis_size("tp"):
        return False
    part = empty_part(config_of(model), next(model.parameters()).dtype, mesh, is_lazy=True)
    return _is_plain(model) and _cuts_of(_without_adapters(model)) == _cuts_of(_without_adapters(part))


def _model_axes(mesh: Mesh) -> dict[str, int]:
    return {axis: mesh.axes[axis] for axis in mesh.replica_axes}


def _cuts_of(params: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return how each parameter is cut."""
    found = {}
    for name, param in params.items():
        spec = spec_of(param)
        cut = None if spec is None else (spec.shape, spec.dims, spec.stored_as, spec.parts)
        found[name] = (tuple(param.shape), cut)
    return found


def shapes_of(config: Any) -> dict[str, Tensor]:
    """Return the state dict of a model of transformers on the meta device; tied tensors are one."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config).state_dict(keep_vars=True))


def served_module(model: nn.Module) -> nn.Module:
    """Return the model of transformers that an engine can run: of a model with adapters the one within.

    Its layers have the adapters, and compute with them. Prompts that are trained are not in it, hence a model
    with these is returned as it is.
    """
    wrapper: Any = model
    if has_adapters(model) and not wrapper.active_peft_config.is_prompt_learning:
        inner: nn.Module = wrapper.get_base_model()
        return inner
    return model


def is_whole(model: nn.Module) -> bool:
    """Return whether this rank holds all parameters of a model as they are, with adapters or without."""
    wanted = {
        name: tuple(each.shape)
        for name, each in shapes_of(config_of(model)).items()
        if isinstance(each, nn.Parameter)
    }
    found = {name: tuple(param.shape) for name, param in _without_adapters(model).items()}
    return found == wanted and _is_plain(model)


def _is_plain(model: nn.Module) -> bool:
    """Return whether parameters are what a forward reads: not so where a method gathers them for each use."""
    return all(type(param) is nn.Parameter for param in model.parameters())


def _without_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model but those of its adapters' layers, by their plain names."""
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
