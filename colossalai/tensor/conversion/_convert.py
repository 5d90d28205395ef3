"""Conversion of a tensor from a layout to another one, recorded by autograd.

[Note: gradients of layouts]
A tensor on many ranks has one gradient, the gradient of one loss. In the backward

- for a slice, every rank has the gradient of its slice;
- for a replica, every rank has the same full gradient, since all ranks use a replica alike;
- for a term of a sum, every rank has the gradient of the sum, the same on all ranks: d(a + b) / da is 1.

So the gradient of a layout has the layout's spec and no sums. The gradient of a conversion is the gradient of
its target, converted to the spec of its source: the backward of an all-gather splits, the backward of a
reduce-scatter gathers, the backward of an all-reduce does nothing, and an exchange is reversed. These are the
conjugates `..._split_backward` and `..._copy_backward` of `communication`. Ranks can use a replica
differently, each for a part of the same loss (such as the input of a column-parallel linear layer). Then
their gradients are terms of a sum: `partial_grads` has its axes, and the backward reduces over them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from colossalai.communication import outside_graphs
from colossalai.tensor._spec import ShardingSpec
from colossalai.tensor.conversion._layout import ShardingLayout, as_layout
from colossalai.tensor.conversion._plan import ConversionPlanner, check_pair


def convert(
    tensor: torch.Tensor,
    source: ShardingLayout | ShardingSpec,
    target: ShardingLayout | ShardingSpec,
    *,
    partial_grads: Sequence[str] = (),
    planner: ConversionPlanner | None = None,
) -> torch.Tensor:
    """Return this rank's slice of the same tensor in another layout; collective over the mesh.

    It runs the plan with the lowest cost: a sequence of collectives, or a direct exchange. For gradients see
    [Note: gradients of layouts].

    Args:
        tensor: This rank's slice.
        source: Layout of `tensor`; a spec is a layout without sums.
        target: Layout of the result. Its sums must be sums of the source; they are not reduced.
        partial_grads: Axes along which the gradients of the result are terms of a sum, because the ranks use
            it differently; none of them shards the target.
        planner: Planner with the cached plans. Default: the planner of the mesh, which counts bytes.

    Returns:
        The slice, contiguous; the tensor itself if both layouts are the same.

    Raises:
        ValueError: `tensor` does not have the shape of the source's slice, `target` is of another tensor or
            mesh or has a sum that the source lacks, or `partial_grads` has an axis that shards the target.
    """
    before, after = as_layout(source), as_layout(target)
    gradient = ShardingLayout(after.spec, tuple(partial_grads))
    if tuple(tensor.shape) != before.spec.local_shape:
        raise ValueError(
            f"a slice of shape {tuple(tensor.shape)} where the layout has {before.spec.local_shape}, of the "
            f"whole {before.spec.shape}"
        )
    check_pair(before, after)
    if before == after and not gradient.partial:
        return tensor
    finder = before.spec.mesh.derived(ConversionPlanner) if planner is None else planner
    converted: torch.Tensor = outside_graphs(_Conversion.apply)(tensor, before, after, gradient, finder)
    return converted


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        before: ShardingLayout,
        after: ShardingLayout,
        gradient: ShardingLayout,
        finder: ConversionPlanner,
    ) -> torch.Tensor:
        ctx.back = gradient, ShardingLayout(before.spec), finder
        result = finder.plan(before, after, tensor.element_size()).run(tensor)
        return tensor.view_as(tensor) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        gradient, of_source, finder = ctx.back
        # The backward is a conversion too, so that autograd records it for double backward.
        return convert(grad, gradient, of_source, planner=finder), None, None, None, None
