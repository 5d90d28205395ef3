"""ColoTensor: a tensor sharded over tensor-parallel ranks that functions of torch accept.

[Note: arguments of a function]
Every function of torch with a ColoTensor argument is dispatched to its class (`__torch_function__`). A
function with a rule (`_products.py`, `_elementwise.py`, `_views.py`) computes with slices. A function without
one is called with full arguments, and this is logged once. So every function returns the results of one
process; rules make it fast. A full result is a plain tensor. Functions that read no values (shape, dtype,
`.grad`, `.data`) refer to the slice.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, cast

import torch
from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.tensor._attributes import SHARDING_SPEC
from colossalai.tensor._full_precision import FullPrecisionTensor
from colossalai.tensor._torch_function import ASKING_NO_VALUES, OF_AUTOGRAD, with_gradient_edges
from colossalai.tensor.colo import _elementwise, _products, _views
from colossalai.tensor.colo._cut import (
    COMPUTE_SPEC,
    CUT,
    Sliced,
    TensorCut,
    are_memory,
    as_memory,
    cut_of,
    sliced,
    tensors_in,
    whole,
)
from colossalai.tensor.colo._process_group import ProcessGroup
from colossalai.tensor.colo._specs import (
    ColoTensorSpec,
    ComputeSpec,
    DistSpec,
    ReplicaSpec,
    ShardSpec,
    sharding_spec,
)

RULES: Mapping[Any, _elementwise.Rule] = dict((*_elementwise.rules(), *_views.rules(), *_products.rules()))
"""The rule of each function that computes with slices."""

_GROUP = "_process_group"


class ColoTensor(torch.Tensor):
    """A tensor that is sharded over tensor-parallel ranks; `shape` is the shape of this rank's slice.

    Args:
        data: This rank's slice.
        spec: Distribution of the tensor. Default: replicated.
    """

    @staticmethod
    def __new__(cls: type[Self], data: torch.Tensor, spec: ColoTensorSpec | None = None) -> Self:
        return cls.from_torch_tensor(data, spec)

    def __init__(self, data: torch.Tensor, spec: ColoTensorSpec | None = None) -> None:
        """Nothing is left to do."""

    @classmethod
    def from_torch_tensor(
        cls, tensor: torch.Tensor, spec: ColoTensorSpec | None = None, *, requires_grad: bool | None = None
    ) -> Self:
        """Return a tensor on the memory of a plain one, which is this rank's slice.

        Args:
            tensor: The slice.
            spec: Distribution of the full tensor.
            requires_grad: Whether the result requires a gradient; False detaches it from the graph of
                `tensor`. Default: as `tensor`, but True for a `ColoParameter` from a tensor that is not a
                parameter.

        Raises:
            ValueError: `spec` does not fit `tensor`.
        """
        cut = None if spec is None else _cut_by(spec.dist_attr, tensor.dim(), spec.pg)
        with torch._C.DisableTorchFunctionSubclass():
            made = cls._on(tensor.detach() if requires_grad is False else tensor)
            if requires_grad is None:
                requires_grad = made.requires_grad or cls._is_trained(tensor)
            if requires_grad != made.requires_grad:
                made.requires_grad_(requires_grad)
        if spec is not None:
            vars(made)[_GROUP] = spec.pg
            vars(made)[COMPUTE_SPEC] = spec.compute_attr
        made._set_cut(cut)
        return made

    @classmethod
    def _on(cls, tensor: torch.Tensor) -> Self:
        """Return a ColoTensor with the memory and the graph of a plain tensor."""
        return tensor.as_subclass(cls)

    @classmethod
    def _is_trained(cls, tensor: torch.Tensor) -> bool:
        """Return whether a ColoTensor from a tensor that does not require a gradient requires one."""
        return False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with a ColoTensor argument; see [Note: arguments of a function]."""
        kwargs = kwargs or {}
        if any(issubclass(each, FullPrecisionTensor) for each in types):
            return NotImplemented  # the other class calls again, with plain tensors in its place
        if func in _OF_THE_SLICE or are_memory():
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                return _extents_of(args[0], result, *args[1:], **kwargs) if func in _EXTENTS else result
        if func in OF_AUTOGRAD:  # See [Note: calls of autograd].
            args, kwargs = with_gradient_edges(func, args, kwargs)
            return func(*args, **kwargs)
        if not any(cut_of(tensor) for tensor in tensors_in(args, kwargs.values())):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            with torch._C.DisableTorchFunctionSubclass():
                result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return _wrapped(result)
        return _with_whole_arguments(func, args, kwargs)

    @property
    def process_group(self) -> ProcessGroup:
        """Process group of the tensor. Default: all ranks of the job, each with the full tensor."""
        group = vars(self).get(_GROUP)
        return ProcessGroup(tp_degree=1) if group is None else group

    @property
    def dist_spec(self) -> DistSpec:
        """Distribution over the tensor-parallel ranks."""
        cut = cut_of(self)
        return ReplicaSpec() if cut is None else ShardSpec([cut.dim], [cut.axis.size])

    @property
    def compute_spec(self) -> ComputeSpec | None:
        """Compute spec, or None."""
        return vars(self).get(COMPUTE_SPEC)

    def get_process_group(self) -> ProcessGroup:
        """Return the process group."""
        return self.process_group

    def get_tp_world_size(self) -> int:
        """Return the number of ranks that share the tensor."""
        return self.process_group.tp_world_size()

    def get_dp_world_size(self) -> int:
        """Return the number of ranks that hold the same slice."""
        return self.process_group.dp_world_size()

    def is_replicate(self) -> bool:
        """Return whether the tensor is replicated."""
        return cut_of(self) is None

    def is_sharded(self) -> bool:
        """Return whether the tensor is sharded."""
        return cut_of(self) is not None

    def is_shard_1drow(self) -> bool:
        """Return whether the first dimension is sharded."""
        cut = cut_of(self)
        return cut is not None and cut.dim == 0

    def is_shard_1dcol(self) -> bool:
        """Return whether the last dimension is sharded."""
        cut = cut_of(self)
        return cut is not None and cut.dim == self.dim() - 1

    def size_local(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape of this rank's slice, or one extent of it."""
        return self.shape if dim is None else self.shape[dim]

    def size_global(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape of the full tensor, or one extent of it."""
        shape = torch.Size(_whole_shape(self.shape, cut_of(self)))
        return shape if dim is None else shape[dim]

    def numel_global(self) -> int:
        """Return the number of elements of the full tensor."""
        return torch.Size(_whole_shape(self.shape, cut_of(self))).numel()

    def set_process_group(self, pg: ProcessGroup) -> None:
        """Set the process group, before the tensor is sharded; setting the same group again has no effect.

        Raises:
            ValueError: The tensor is sharded over a group that is not `pg`.
        """
        cut = cut_of(self)
        if cut is not None and cut.group != pg:
            raise ValueError(
                f"a tensor of shape {tuple(self.shape)} is cut over {cut.group}, and is to have {pg}: "
                "set_dist_spec(ReplicaSpec()) makes it whole first"
            )
        vars(self)[_GROUP] = pg

    def set_dist_spec(self, dist_spec: DistSpec) -> None:
        """Redistribute the tensor in place; autograd records it. Collective over the ranks.

        Raises:
            ValueError: `dist_spec` does not fit the tensor.
        """
        cut = _cut_by(dist_spec, self.dim(), self.process_group)
        if cut == cut_of(self):
            return
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is None:
                with torch.no_grad():
                    self.data = _converted(self, cut).clone(memory_format=torch.contiguous_format)
                self.grad = None
                self._set_cut(cut)
                return
            made = self._on(_converted(self, cut))
            vars(made).update(vars(self))
            torch.utils.swap_tensors(self, made)
        self._set_cut(cut)

    def set_tensor_spec(self, dist_spec: DistSpec, compute_spec: ComputeSpec | None = None) -> None:
        """Redistribute the tensor as in `set_dist_spec`, and set its compute spec.

        Raises:
            ValueError: `dist_spec` does not fit the tensor.
        """
        self.set_dist_spec(dist_spec)
        if compute_spec is not None:
            vars(self)[COMPUTE_SPEC] = compute_spec

    def redistribute(self, dist_spec: DistSpec, pg: ProcessGroup | None = None) -> "ColoTensor":
        """Return the tensor with another distribution; autograd records it. Collective over the ranks.

        Raises:
            ValueError: `dist_spec` does not fit the tensor, or `pg` is not the group of its shards.
        """
        group = self.process_group if pg is None else pg
        own = cut_of(self)
        if own is not None and own.group != group:
            raise ValueError(f"it is cut over {own.group}, and is to have {group}: to_replicate() first")
        cut = _cut_by(dist_spec, self.dim(), group)
        with torch._C.DisableTorchFunctionSubclass():
            made = _converted(self, cut).as_subclass(ColoTensor)
        vars(made).update({_GROUP: group, **_own_compute_spec(self)})
        made._set_cut(cut)
        return made

    def to_replicate(self) -> "ColoTensor":
        """Return the full tensor on every rank; autograd records it. Collective over the ranks."""
        return self.redistribute(ReplicaSpec())

    def to_replicate_(self) -> None:
        """Gather the full tensor on every rank, in place; autograd records it. Collective over the ranks."""
        self.set_dist_spec(ReplicaSpec())

    def _set_cut(self, cut: TensorCut | None) -> None:
        own = vars(self)
        for name in (CUT, SHARDING_SPEC):
            own.pop(name, None)
        if cut is not None:
            own[CUT] = cut
            own[SHARDING_SPEC] = sharding_spec(_whole_shape(self.shape, cut), cut.dim, cut.group)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            values = repr(self.detach())
        return f"{type(self).__name__}({values}, {self.dist_spec})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            known: Self = memo[id(self)]
            return known
        if not self.is_leaf:
            raise RuntimeError(
                "a ColoTensor that was computed, and has a gradient, cannot be copied by copy.deepcopy, as "
                "none of torch can: detach() or clone() it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            copied = self._on(self.detach().clone()).requires_grad_(self.requires_grad)
            if self.grad is not None and not isinstance(self, nn.Parameter):  # as of torch's
                copied.grad = self.grad.clone()
        vars(copied).update(vars(self))
        vars(copied).update(_own_compute_spec(self, memo))
        memo[id(self)] = copied
        return cast(Self, copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach().clone()
        return _rebuilt, (type(self), plain, self.requires_grad, dict(vars(self)))


class ColoParameter(ColoTensor, nn.Parameter):
    """A `torch.nn.Parameter` that is sharded over tensor-parallel ranks, with this rank's slice.

    Args:
        data: This rank's slice.
        requires_grad: Whether the parameter requires a gradient.
        spec: Distribution of the full parameter. Default: replicated.
    """

    @staticmethod
    def __new__(
        cls: type[Self],
        data: torch.Tensor | None = None,
        requires_grad: bool = True,
        spec: ColoTensorSpec | None = None,
    ) -> Self:
        tensor = torch.empty(0) if data is None else data
        return cls.from_torch_tensor(tensor, spec, requires_grad=requires_grad)

    def __init__(
        self,
        data: torch.Tensor | None = None,
        requires_grad: bool = True,
        spec: ColoTensorSpec | None = None,
    ) -> None:
        """Nothing is left to do."""

    @classmethod
    def _on(cls, tensor: torch.Tensor) -> Self:
        """See the base class; the result is a leaf."""
        made: Self = torch.Tensor._make_subclass(cls, tensor.detach(), tensor.requires_grad)
        return made

    @classmethod
    def _is_trained(cls, tensor: torch.Tensor) -> bool:
        """See the base class; as `torch.nn.Parameter`, but for parameters that were frozen."""
        return not isinstance(tensor, nn.Parameter)


class DistSpecManager:
    """Conversions of plain tensors from one dist spec to another."""

    @staticmethod
    def handle_trans_spec(
        tensor: torch.Tensor, old_dist_spec: DistSpec, dist_spec: DistSpec, pg: ProcessGroup
    ) -> torch.Tensor:
        """Return this rank's part of a tensor under another spec; collective over the ranks of `pg`.

        Args:
            tensor: This rank's part.
            old_dist_spec: Current distribution.
            dist_spec: New distribution.
            pg: Process group.

        Raises:
            ValueError: A spec does not fit `tensor`.
        """
        own, cut = (_cut_by(spec, tensor.dim(), pg) for spec in (old_dist_spec, dist_spec))
        return whole(tensor, own) if cut is None else sliced(tensor, cut, own)

    @staticmethod
    def no_grad() -> AbstractContextManager[None]:
        """Return a context in which autograd does not record conversions."""
        return torch.no_grad()


def as_colo_parameter(param: nn.Parameter, group: ProcessGroup | None = None) -> ColoParameter:
    """Convert a parameter to a ColoParameter in place, by a change of its class."""
    # In place, since optimizers, tied modules and lists of modules hold references to it.
    if type(param) is nn.Parameter:
        param.__class__ = ColoParameter
    assert isinstance(param, ColoParameter), f"a {type(param).__name__} cannot become a ColoParameter"
    if group is not None:
        vars(param).setdefault(_GROUP, group)
    return param


def as_plain_parameter(param: nn.Parameter) -> None:
    """Convert a replicated ColoParameter to a plain parameter in place, without the dispatch overhead."""
    if type(param) is ColoParameter and cut_of(param) is None:
        cast(Any, param).__class__ = nn.Parameter


def memory_scope(tensors: Iterable[torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """Return `as_memory` if one of the tensors is a ColoTensor, otherwise a null context."""
    are_colo = any(isinstance(tensor, ColoTensor) or cut_of(tensor) is not None for tensor in tensors)
    return as_memory if are_colo else nullcontext


def process_group_of(model: nn.Module) -> ProcessGroup | None:
    """Return the process group of a model's sharded ColoParameters; None if it has none.

    Raises:
        ValueError: Parameters of `model` are sharded over different groups.
    """
    groups = {
        cut.group: name for name, param in model.named_parameters() if (cut := cut_of(param)) is not None
    }
    if len(groups) > 1:
        said = ", ".join(f"{name} over {group}" for group, name in groups.items())
        raise ValueError(f"parameters of one model are cut over different groups: {said}; give all the same")
    return next(iter(groups), None)


def follow_cut(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of `value` that replaces a parameter, with the sharding of the parameter."""
    if cut_of(param) is None:
        return value
    made = value.as_subclass(ColoTensor)
    vars(made).update({name: vars(param).get(name) for name in (_GROUP, COMPUTE_SPEC, CUT)})
    return made


def _rebuilt(
    kind: type[ColoTensor], plain: torch.Tensor, requires_grad: bool, attributes: Mapping[str, Any]
) -> ColoTensor:
    made = kind._on(plain).requires_grad_(requires_grad)
    vars(made).update(attributes)
    return cast(ColoTensor, made)


def _own_compute_spec(tensor: ColoTensor, memo: dict[int, Any] | None = None) -> dict[str, ComputeSpec]:
    """Return the compute-spec field for a copy of a tensor: an independent copy of the spec."""
    spec = tensor.compute_spec
    return {} if spec is None else {COMPUTE_SPEC: copy.deepcopy(spec, memo)}


def _extents_of(tensor: ColoTensor, extents: Any, dim: int | None = None) -> Any:
    """Return the shape of a tensor, or one extent of it; see [Note: views with two meanings]."""
    cut = cut_of(tensor)
    if cut is None or are_memory():
        return extents
    return _views.marked_extents(extents, cut, None if dim is None else dim % tensor.dim())


def _cut_by(dist_spec: DistSpec, num_dims: int, group: ProcessGroup) -> TensorCut | None:
    if not isinstance(dist_spec, DistSpec):
        raise ValueError(f"the dist spec is {dist_spec!r}; it must be a ShardSpec or a ReplicaSpec")
    dim = dist_spec.cut_dim(num_dims, group)
    return None if dim is None else TensorCut(dim, group)


def _converted(tensor: ColoTensor, cut: TensorCut | None) -> torch.Tensor:
    return whole(tensor) if cut is None else sliced(tensor, cut)


def _whole_shape(shape: torch.Size, cut: TensorCut | None) -> list[int]:
    return [
        size * (cut.axis.size if cut is not None and dim == cut.dim else 1) for dim, size in enumerate(shape)
    ]


def _wrapped(result: Any) -> Any:
    """Return the result of a rule, with slices as ColoTensors."""
    if isinstance(result, Sliced):
        made = result.value.as_subclass(ColoTensor)
        vars(made).update({_GROUP: result.cut.group, CUT: result.cut})
        return made
    if isinstance(result, list | tuple):
        return type(result)(map(_wrapped, result))
    return result


def _with_whole_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function without a rule for these arguments with full arguments.

    Raises:
        ValueError: `func` would write into a slice.
    """
    name = getattr(func, "__name__", None) or str(func)
    written = [kwargs.get("out")]
    if name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        written.append(args[0])
    if kwargs.get("inplace"):
        written.append(args[0])
    if any(cut_of(tensor) for tensor in tensors_in(written)):
        raise ValueError(
            f"{name} writes into a tensor of which this rank has a slice, and there is no rule for "
            "the writes of each rank: write into the whole (t.to_replicate()), and set_dist_spec it again"
        )
    get_dist_logger().log_once(
        f"{name} has no rule for tensors that are cut so, and gets whole ones: they are gathered", ranks=[0]
    )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*map(_all_whole, args), **{key: _all_whole(value) for key, value in kwargs.items()})


def _all_whole(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_all_whole, value))
    return value if cut_of(value) is None else whole(value).contiguous()  # as most tensors of one process


_OF_THE_SLICE = ASKING_NO_VALUES | {torch.Tensor.data.__get__, torch.Tensor.data.__set__}  # type: ignore[attr-defined]
"""Functions that refer to the slice: they read no values, or the memory itself."""

_EXTENTS = frozenset([torch.Tensor.shape.__get__, torch.Tensor.size])  # type: ignore[attr-defined]
"""Functions that return extents."""
