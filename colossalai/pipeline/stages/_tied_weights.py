"""Weights that several stages share, such as the embedding and the head of a language model.

Each stage holds its own copy of the parameter. The copies are made equal once; each step sums their gradients
(`sync_shared_grads`) and their optimizers update them alike, so they stay equal, bit for bit.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import TensorWeakRef

from colossalai.communication import all_reduce_in_place
from colossalai.context import Axis, ParallelMode, global_context
from colossalai.tensor import PIPELINE_SHARE

_numbers = itertools.count()


@dataclass
class Share:
    """Record of a shared parameter, stored on it.

    Attributes:
        axis: The ranks that share it; the first one is its owner.
        number: Position among the shared parameters of this process; the ranks that share several register
            them in the same order.
        summed: The gradient that was last summed (a weak reference), and its version then; None before the
            first time. An embedding's gradient can be the largest tensor of a rank.
    """

    axis: Axis
    number: int
    summed: tuple[TensorWeakRef, int] | None = None


class PipelineSharedModuleWrapper:
    """Shares parameters among pipeline ranks: equal at first, gradients summed in every step.

    Every rank of the pipeline may build it; only the named ranks take part, and all of them register the same
    number of parameters of the same shapes in the same order. Use one wrapper for each set of ranks.
    Parameters shared within one rank need none: use the same module or parameter there.

    Args:
        pipeline_ranks: The ranks along the pipeline axis; duplicates count once.

    Raises:
        ValueError: `pipeline_ranks` is empty, or a rank is not one of the pipeline.
    """

    def __init__(self, pipeline_ranks: int | Sequence[int]) -> None:
        ranks = [pipeline_ranks] if isinstance(pipeline_ranks, int) else list(pipeline_ranks)
        self._axis = shared_axis(global_context.axis(ParallelMode.PIPELINE), ranks)

    def register_module(self, module: nn.Module) -> None:
        """Share all parameters of a module; collective over the named ranks."""
        for param in module.parameters():
            self.register_parameter(param)

    def register_parameter(self, param: nn.Parameter) -> None:
        """Share a parameter, with the value of the first rank; collective over the named ranks.

        Raises:
            ValueError: The parameter has no memory yet, or is shared already.
        """
        if self._axis is not None:
            share_parameter(param, self._axis)


def shared_axis(pipeline: Axis, ranks: Iterable[int]) -> Axis | None:
    """Return the axis of some ranks of a pipeline; None on other ranks, and for a single rank.

    Args:
        pipeline: The axis of the pipeline.
        ranks: Positions along it.

    Raises:
        ValueError: `ranks` is empty, or a position is not one of `pipeline`.
    """
    places = sorted(set(ranks))
    if not places or not 0 <= places[0] <= places[-1] < pipeline.size:
        raise ValueError(
            f"pipeline ranks {places} of a pipeline of {pipeline.size} ranks: name ranks from 0 to "
            f"{pipeline.size - 1}"
        )
    if len(places) == 1 or pipeline.rank not in places:
        return None
    return Axis("pipeline_share", tuple(pipeline.ranks[place] for place in places), pipeline.mesh)


def share_parameter(param: nn.Parameter, axis: Axis) -> None:
    """Share a parameter over an axis, with the value of its first rank; collective over it.

    Bytes: one broadcast of the parameter.

    Raises:
        ValueError: The parameter has no memory yet, or is shared already.
    """
    if param.is_meta:
        raise ValueError("a parameter on the device 'meta' cannot be shared yet: materialize the model first")
    if share_of(param) is not None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is shared already: share it once")
    with torch.no_grad():
        value = param.detach().contiguous()
        # All stages that share it start from the values of the first.
        dist.broadcast(value, src=axis.ranks[0], group=axis.group)
        param.copy_(value)
    setattr(param, PIPELINE_SHARE, Share(axis, next(_numbers)))


def share_of(param: torch.Tensor) -> Share | None:
    """Return the record of a shared parameter; None for others."""
    return getattr(param, PIPELINE_SHARE, None)


def is_shared_copy(param: torch.Tensor) -> bool:
    """Return whether another rank of the pipeline owns the parameter, and counts it in norms and numbers."""
    share: Share | None = getattr(param, PIPELINE_SHARE, None)
    return share is not None and share.axis.rank > 0


def is_counted(param: torch.Tensor) -> bool:
    """Return whether this rank counts a parameter in norms; the owner of a shared one does."""
    share: Share | None = getattr(param, PIPELINE_SHARE, None)
    return share is None or share.axis.rank == 0


def sync_shared_grads(params: Iterable[torch.Tensor]) -> None:
    """Sum the gradients of shared parameters over the ranks that share them, in place.

    Collective; one all-reduce for each shared parameter. A missing gradient counts as zero.

    A second call before gradients have changed does nothing, so it is safe to repeat. Between two calls
    either all of the ranks have a new backward or `zero_grad`, or none.

    Args:
        params: All parameters of this rank, in any order.
    """
    found = [(param, getattr(param, PIPELINE_SHARE, None)) for param in params]
    shared = {id(param): (share, param) for param, share in found if share is not None}
    for share, param in sorted(shared.values(), key=lambda item: (item[0].axis.ranks, item[0].number)):
        if not param.requires_grad or _is_summed(share, param.grad):
            continue
        grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
        # Sum over the stages that share it, which visit shared parameters in the order of their numbers.
        param.grad = all_reduce_in_place(grad, share.axis)
        share.summed = (TensorWeakRef(param.grad), param.grad._version)


def _is_summed(share: Share, grad: torch.Tensor | None) -> bool:
    if grad is None or share.summed is None:
        return False
    summed, version = share.summed
    return summed() is grad and grad._version == version
