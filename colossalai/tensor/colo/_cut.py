"""The cut of a value while functions compute with it, and the way from one cut to another.

[Note: gradients of cut values]
The tensor-parallel ranks compute the same: a whole value is the same on all of them, and so is its gradient.
Of a cut value each rank has a slice, and the same slice of its gradient. So what turns one into the other
is a conjugate pair: slices are gathered, and the backward keeps this rank's slice of the gradient; a whole is
cut, and the backward gathers. A whole value that every rank uses with its own slice of another one gets a
term of its gradient on each: the backward sums (`used_apart`). A sum of which each rank has a term is
reduced, and its gradient is that of every term.
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
    """Along which dimension the tensor-parallel ranks of a group share a tensor.

    Attributes:
        dim: The dimension, counted from the front.
        group: The ranks.
    """

    dim: int
    group: ProcessGroup

    @property
    def axis(self) -> Axis:
        """The ranks, to communicate along."""
        return self.group.tp_axis


@dataclass(frozen=True)
class Sliced:
    """What a rule returns for a result of which each rank has a slice.

    Attributes:
        value: This rank's slice, a plain tensor.
        cut: How it is cut.
    """

    value: torch.Tensor
    cut: TensorCut


_is_memory: ContextVar[bool] = ContextVar("_is_memory", default=False)


@contextmanager
def as_memory(is_memory: bool = True) -> Iterator[None]:
    """Let ColoTensors be this rank's memory within the block: no rules, and nothing is gathered.

    For the package itself, which asks parameters for their specs; functions of a user that it calls in the
    block (a closure) run with `as_memory(False)`.
    """
    token = _is_memory.set(is_memory)
    try:
        yield
    finally:
        _is_memory.reset(token)


def are_memory() -> bool:
    """Return whether this is in a block of `as_memory`."""
    return _is_memory.get()


def cut_of(value: Any) -> TensorCut | None:
    """Return how a value is cut; None for a whole one, and for what is no tensor."""
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
    """Return a value with all slices; collective if it is cut.

    Args:
        value: Any argument of a function; what is no tensor stays.
        own: How it is cut, if it does not say so itself.
    """
    cut = own or cut_of(value)
    return value if cut is None else gather_forward_split_backward(value, cut.axis, cut.dim)


def sliced(value: torch.Tensor, cut: TensorCut, own: TensorCut | None = None) -> torch.Tensor:
    """Return this rank's slice of a value, whole or cut, along the dimension of a cut; collective then.

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
        return all_to_all_forward_all_to_all_backward(value, cut.axis, split_dim=cut.dim, gather_dim=own.dim)
    return split_forward_gather_backward(whole(value, own), cut.axis, cut.dim)


def used_apart(value: Any, cut: TensorCut, own: TensorCut | None = None) -> Any:
    """Return a whole value that ranks use with slices of another; the backward sums its gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    return copy_forward_reduce_backward(whole(value, own), cut.axis)
