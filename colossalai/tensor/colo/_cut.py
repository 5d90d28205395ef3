"""Sharding of a value within a function call, and conversion between shardings.

[Note: gradients of cut values]
The tensor-parallel ranks run the same computation: a full value is equal on all ranks, as is its gradient.
Each rank has a slice of a sharded value, and the same slice of its gradient. So conversions are conjugate
pairs: slices are gathered, and the backward keeps this rank's slice of the gradient; a full value is sliced,
and the backward gathers. If every rank uses a full value with its slice of another value, each rank has a
term of the gradient, and the backward sums them (`used_apart`). Terms of a sum are reduced, and the gradient
of the sum is the gradient of every term.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from colossalai.communication import (
    all_to_all_forward_all_to_all_backward,
    copy_forward_reduce_backward,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from colossalai.context import Axis
from colossalai.tensor.colo._process_group import ProcessGroup

CUT, COMPUTE_SPEC = "_cut", "_compute_spec"  # fields of a ColoTensor, which plain masters of it carry along


@dataclass(frozen=True)
class TensorCut:
    """Sharding of a tensor over the tensor-parallel ranks of a group.

    Attributes:
        dim: Sharded dimension, not negative.
        group: Process group of the ranks.
    """

    dim: int
    group: ProcessGroup

    @property
    def axis(self) -> Axis:
        """Axis of the ranks, for communication."""
        return self.group.tp_axis


@dataclass(frozen=True)
class Sliced:
    """Result of a rule that is sharded over the ranks.

    Attributes:
        value: This rank's slice, a plain tensor.
        cut: Sharding of the result.
    """

    value: torch.Tensor
    cut: TensorCut


_is_memory: ContextVar[bool] = ContextVar("_is_memory", default=False)


@contextmanager
def as_memory(is_memory: bool = True) -> Iterator[None]:
    """Treat ColoTensors as this rank's memory within the block, without rules and gathers.

    For the package itself, which reads the specs of parameters. User functions that it calls in the block
    (a closure) run with `as_memory(False)`.
    """
    token = _is_memory.set(is_memory)
    try:
        yield
    finally:
        _is_memory.reset(token)


def are_memory() -> bool:
    """Return whether a block of `as_memory` is active."""
    return _is_memory.get()


def cut_of(value: Any) -> TensorCut | None:
    """Return the sharding of a value; None for a replicated tensor or another value."""
    return value.__dict__.get(CUT) if isinstance(value, torch.Tensor) else None


def tensors_in(*nests: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a function, those in lists, tuples and dicts included."""
    for nest in nests:
        for value in nest:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from tensors_in(value)
            elif isinstance(value, dict):
                yield from tensors_in(value.values())


def whole(value: Any, own: TensorCut | None = None) -> Any:
    """Return the full value; collective if it is sharded.

    Args:
        value: Any argument of a function; values that are not tensors are returned unchanged.
        own: Sharding of a value without an attribute for it.
    """
    cut = own or cut_of(value)
    return value if cut is None else gather_forward_split_backward(value, cut.axis, cut.dim)


def sliced(value: torch.Tensor, cut: TensorCut, own: TensorCut | None = None) -> torch.Tensor:
    """Return this rank's slice of a value along the dimension of `cut`; collective if the value is sharded.

    Raises:
        ValueError: The ranks do not divide the dimension.
    """
    own = own or cut_of(value)
    if own == cut:
        return value
    if value.shape[cut.dim] % cut.axis.size:
        raise ValueError(
            f"dimension {cut.dim} of a tensor of shape {tuple(value.shape)} cannot be cut over "
            f"{cut.axis.size} tensor-parallel ranks, which do not divide it: colossalai.tensor.pad_to pads it"
        )
    if own is not None and own.group == cut.group:
        # Same ranks, another dimension: one all-to-all instead of an all-gather and a split.
        return all_to_all_forward_all_to_all_backward(value, cut.axis, split_dim=cut.dim, gather_dim=own.dim)
    return split_forward_gather_backward(whole(value, own), cut.axis, cut.dim)


def used_apart(value: Any, cut: TensorCut, own: TensorCut | None = None) -> Any:
    """Return a full value that ranks use with slices of another value; the backward sums its gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    return copy_forward_reduce_backward(whole(value, own), cut.axis)
