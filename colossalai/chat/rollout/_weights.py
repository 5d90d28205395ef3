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

from colossalai.checkpoint_io import gathered_weights
from colossalai.cluster import gather_values
from colossalai.context import get_current_device
from colossalai.core import global_context as gpc
from colossalai.pipeline import ModelStage

_ADAPTED = ".base_layer"
_FACTORS = (".lora_A.", ".lora_B.")


class EngineWeights(ABC):
    """Abstract: where an engine has its values from."""

    @abstractmethod
    def refresh(self) -> None:
        """Take over the values that the model in training has now; every rank calls it."""


class SharedWeights(EngineWeights):
    """The parameters in training themselves: there is nothing to take over."""

    def refresh(self) -> None:
        """See the base class."""


class CopiedWeights(EngineWeights):
    """A model that takes over the values of another one, which ranks may hold in parts, or with adapters.

    Args:
        source: What this rank has of the model in training.

    Attributes:
        model: The model, whole on this rank.

    Raises:
        ValueError: `source` has parameters that are none of its family's.
    """

    def __init__(self, source: nn.Module) -> None:
        from transformers import AutoModelForCausalLM

        # Made on the host, as what it draws there, to be overwritten, can be undone: on a device it would
        # move the random state of the job.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            dtype = next(source.parameters()).dtype
            made = AutoModelForCausalLM.from_config(config_of(source), dtype=dtype)
        self.model: Any = made.requires_grad_(False).eval().to(get_current_device())
        self._values = WeightStream(source)
        self._named = dict(self.model.state_dict(keep_vars=True))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """See the base class."""
        for name, tensor in self._values.of(names_of_tensors(self._named), into=self._named):
            own = self._named[name]
            if tensor.data_ptr() != own.data_ptr():
                own.copy_(tensor)


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


def is_whole(model: nn.Module) -> bool:
    """Return whether this rank holds all parameters of a model, as they are and without adapters."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config_of(model))
    wanted = {name: tuple(param.shape) for name, param in whole.named_parameters()}
    found = {name: tuple(param.shape) for name, param in model.named_parameters()}
    is_plain = all(type(param) is nn.Parameter for param in model.parameters())  # not so under Gemini
    return found == wanted and is_plain
