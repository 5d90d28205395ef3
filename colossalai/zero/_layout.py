"""Layout of parameters in flat buckets, and the sections of a bucket by rank.

A bucket holds parameters of one kind, one after the other, and is cut into one section for each rank that
holds them. The part of a parameter in the section of a rank is that rank's fragment of it. For elementwise
optimizers the sections are equally long and cut parameters anywhere. For others a section holds whole
parameters, distributed so that each rank gets about as many elements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from colossalai.communication import shares_memory
from colossalai.context import Axis
from colossalai.tensor import GradientSync, gradient_sync

Kind = tuple[torch.dtype, torch.dtype, torch.device, GradientSync]


@dataclass(frozen=True, eq=False)
class FlatBucket:
    """The layout of some parameters in one flat piece of memory.

    Attributes:
        params: The parameters, in the order of their offsets.
        starts: Offset of each parameter.
        bounds: Begin and end of the section of each rank; sections follow one another.
        grad_dtype: The dtype of the gradients.
        cuts_params: Whether a parameter can be in several sections.
        sync: The ranks over which gradients are summed, and the divisor.
    """

    params: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    grad_dtype: torch.dtype
    cuts_params: bool
    sync: GradientSync

    @cached_property
    def axis(self) -> Axis:
        """The ranks that hold the parameters, of which each has a section."""
        return self.sync.axis

    @cached_property
    def numel(self) -> int:
        """Number of elements, with the padding that makes equal sections."""
        return self.bounds[-1][1]

    @cached_property
    def section_sizes(self) -> list[int]:
        """Number of elements in the section of each rank."""
        return [end - begin for begin, end in self.bounds]

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shape of each parameter (cached: a parameter in a chunk computes it in Python)."""
        return tuple(param.shape for param in self.params)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Strides of each parameter, contiguous."""
        return tuple(tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))) for shape in self.shapes)

    @cached_property
    def goes_through_memory(self) -> bool:
        """Whether the ranks exchange exact sections through shared memory, which takes equal ones."""
        return len(set(self.section_sizes)) == 1 and shares_memory(self.axis)

    @cached_property
    def num_used(self) -> int:
        """Number of elements without the padding at the end."""
        return self.starts[-1] + self.numels[-1]

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return the view of `flat` for a parameter, in its shape."""
        return torch.as_strided(flat, self.shapes[index], self.strides[index], self.starts[index])

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of `flat` for all parameters, in their shapes."""
        parts = flat[: self.num_used].split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def section(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the section of a rank."""
        begin, end = self.bounds[rank]
        return flat[begin:end]

    def overlap(self, index: int, rank: int) -> tuple[int, int]:
        """Return begin and end, counted from the start of a parameter, of a rank's fragment of it."""
        begin, end = self.bounds[rank]
        start = self.starts[index]
        first = max(begin, start) - start
        return first, max(first, min(end, start + self.numels[index]) - start)

    def place(self, index: int, rank: int) -> tuple[int, int]:
        """Return begin and end, counted from the start of a rank's section, of its fragment."""
        begin, end = self.overlap(index, rank)
        offset = self.starts[index] + begin - self.bounds[rank][0]
        return offset, offset + end - begin


def lay_out(
    params: Sequence[nn.Parameter], replicas: Axis, *, cap_bytes: int, owners: Mapping[nn.Parameter, int]
) -> list[FlatBucket]:
    """Lay parameters out in buckets, in the order in which those become full.

    Args:
        params: The parameters in the order in which their gradients come; each once.
        replicas: The ranks that see different parts of the batch.
        cap_bytes: A bucket of gradients is closed before it grows beyond; a larger parameter has its own.
        owners: Which of the ranks that hold it gets a parameter as a whole, for those that must not be cut.
    """
    groups: list[list[nn.Parameter]] = []
    is_open: dict[tuple[Kind, bool], list[nn.Parameter]] = {}
    for param in params:
        key = (_kind_of(param, replicas), param in owners)
        group = is_open.get(key)
        size = sum(member.numel() for member in group or ()) + param.numel()
        if group is None or size * _grad_dtype(param).itemsize > cap_bytes:
            group = is_open[key] = []
            groups.append(group)
        group.append(param)
    position = {param: number for number, param in enumerate(params)}
    groups.sort(key=lambda group: position[group[-1]])
    return [_make_bucket(group, replicas, owners) for group in groups]


def deal_out(params: Sequence[nn.Parameter], replicas: Axis) -> dict[nn.Parameter, int]:
    """Return an owner for each parameter: the largest first, each to the rank with the fewest elements.

    An owner is a position among the ranks that hold the parameter.
    """
    loads_along: dict[Axis, list[int]] = {}
    owners = {}
    for param in sorted(params, key=lambda param: -param.numel()):
        axis = gradient_sync(param, replicas).axis
        loads = loads_along.setdefault(axis, [0] * axis.size)
        rank = loads.index(min(loads))
        owners[param] = rank
        loads[rank] += param.numel()
    return owners


def _make_bucket(
    params: Sequence[nn.Parameter], replicas: Axis, owners: Mapping[nn.Parameter, int]
) -> FlatBucket:
    sync = gradient_sync(params[0], replicas)
    if params[0] in owners:
        return lay_out_by_owner(params, owners, grad_dtype=_grad_dtype(params[0]), sync=sync)
    starts, total = _in_a_row(params)
    size = -(-total // sync.axis.size)
    bounds = tuple((size * rank, size * (rank + 1)) for rank in range(sync.axis.size))
    return FlatBucket(tuple(params), starts, bounds, _grad_dtype(params[0]), True, sync)


def lay_out_by_owner(
    params: Sequence[nn.Parameter],
    owners: Mapping[nn.Parameter, int],
    *,
    grad_dtype: torch.dtype,
    sync: GradientSync,
) -> FlatBucket:
    """Return a bucket of whole parameters, in the order of their owners; some ranks may have none."""
    params = sorted(params, key=lambda param: owners[param])
    starts, _ = _in_a_row(params)
    ends = [sum(p.numel() for p in params if owners[p] <= rank) for rank in range(sync.axis.size)]
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return FlatBucket(tuple(params), starts, bounds, grad_dtype, False, sync)


def _in_a_row(params: Sequence[nn.Parameter]) -> tuple[tuple[int, ...], int]:
    """Return where each parameter begins, and the end of the last."""
    starts, total = [], 0
    for param in params:
        starts.append(total)
        total += param.numel()
    return tuple(starts), total


def _kind_of(param: nn.Parameter, replicas: Axis) -> Kind:
    return param.dtype, _grad_dtype(param), param.device, gradient_sync(param, replicas)


def _grad_dtype(param: nn.Parameter) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype
