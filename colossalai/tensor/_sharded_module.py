"""Base class of modules whose parameters keep their specs when torch replaces the parameters.

A spec is an attribute of its parameter, because optimizers, norms and checkpoints only receive parameters.
Torch replaces parameters in some calls, without our attribute. So the module stores the spec of each of its
parameters by name, and sets it on the current parameter of this name.

| call | hook that restores the specs |
| --- | --- |
| `layer.weight = ...`, `load_state_dict(assign=True)` | `register_parameter` |
| `.to(...)`, `.half()`, `to_empty(...)` | `_apply` |
| `copy.deepcopy(model)` | `__deepcopy__` |
| `fully_shard`, and other writes to `_parameters` | `_save_to_state_dict`, before it is saved |
"""

import copy
from collections.abc import Iterator
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from colossalai.context import Mesh
from colossalai.tensor._attributes import BUILT_FOR, KEEPS_DTYPE
from colossalai.tensor._spec import ShardingSpec, set_spec, spec_of


class SpecKeeper(nn.Module):
    """Base of the modules whose parameters carry specs.

    Args:
        mesh: The ranks. Copies of the module share it.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self._specs: dict[str, ShardingSpec] = {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See the base class. A parameter without a spec gets the spec of the replaced parameter.

        Raises:
            ValueError: `param` does not have the local shape of its spec.
        """
        spec = None if param is None else spec_of(param) or self._specs.get(name)
        if param is not None and spec is not None:
            set_spec(param, spec)
            self._specs[name] = spec
        super().register_parameter(name, param)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with parameters of its own, cut over the same mesh."""
        memo[id(self.mesh)] = self.mesh  # the mesh holds process groups, which cannot be copied
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        copied._give_specs()
        return copied

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)
        self._give_specs()
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._give_specs()
        super()._save_to_state_dict(*args, **kwargs)

    def _give_specs(self) -> None:
        for name, spec in self._specs.items():
            param = self._parameters.get(name)
            if param is not None and spec_of(param) is None:
                set_spec(param, spec)


class ParameterHolder(SpecKeeper):
    """Holds parameters for the module that it is a part of, which computes with them; it is never called."""


Layer = TypeVar("Layer", bound=nn.Module)


def set_built_for(layer: Layer, **extents: str | int | None) -> Layer:
    """Record on a layer the fields of the current layout that it depends on, and return the layer.

    A layer that was built without parallelism is a plain layer of torch. A plan that shards it is applied too
    late, and the function that applies the plan reports it from this record.

    Args:
        layer: The layer.
        extents: Fields of the layout: `mode` for a layer that tensor parallelism shards, `sequence` for a
            layer that sees full sequences without sequence parallelism.
    """
    setattr(layer, BUILT_FOR, extents)
    return layer


def built_for(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Yield the modules of a model with a recorded layout: name, module and fields."""
    for name, part in model.named_modules():
        if BUILT_FOR in part.__dict__:
            yield name, part, part.__dict__[BUILT_FOR]


def keep_dtype(buffer: Tensor) -> Tensor:
    """Exclude a buffer from casts of all precisions, and return it. Copies need another call."""
    setattr(buffer, KEEPS_DTYPE, True)
    return buffer


def keeps_dtype(tensor: Tensor) -> bool:
    """Return whether a tensor is excluded from casts."""
    return getattr(tensor, KEEPS_DTYPE, False)
