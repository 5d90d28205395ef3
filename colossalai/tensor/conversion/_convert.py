"""Conversion of a tensor from a layout to another one, recorded by autograd.

[Note: gradients of layouts]
A tensor that many ranks hold has one gradient, that of one loss. In the backward

- of a slice every rank has the gradient of that slice;
- of a replica every rank has the same gradient, the whole one: ranks use a replica alike;
- of a term of a sum every rank has the gradient of the sum, the same on all: d(a + b) / da is 1.

So the gradient of a layout has the layout's spec and no sums, and the gradient of a conversion is that of its
target converted to the spec of its source: the backward of an all-gather splits, that of a reduce-scatter
gathers, that of an all-reduce does nothing, an exchange goes back. These are the conjugates
`..._split_backward` and `..._copy_backward` of `communication`. Where ranks use a replica differently, each
for a part of the same loss (a linear layer cut by columns does so with its input), what they find are terms
of a sum: `partial_grads` names the axes along which that is so, and the backward adds the terms on the way.
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

    It takes the plan of least cost: collectives one after the other, or a direct exchange. For gradients see
    [Note: gradients of layouts].

    Args:
        tensor: This rank's slice.
        source: Its layout; a spec is one without sums.
        target: The layout that the result has. Sums of it are sums of the source, whose terms stay apart.
        partial_grads: The axes along which the gradients of the result are terms of a sum, because the ranks
            use it differently; none of them cuts the target.
        planner: What finds the plan and keeps it; default: that of the mesh, which counts bytes.

    Returns:
        The slice, contiguous; the tensor itself where both layouts are the same.

    Raises:
        ValueError: `tensor` has not the shape of the source's slice, `target` is of another tensor or mesh or
            has a sum that the source has not, or `partial_grads` names an axis that cuts the target.
    """
    before, after = as_layout(source), as_layout(target)
    gradient = ShardingLayout(after.spec, tuple(partial_grads))
    if tuple(tensor.shape) != before.spec.local_shape:
        raise ValueError(
            f"a slice of shape {tuple(tensor.shape)} where the layout says {before.spec.local_shape}, of the "
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
        # A conversion itself, so that it is recorded where gradients of gradients are asked for.
        return convert(grad, gradient, of_source, planner=finder), None, None, None, None
