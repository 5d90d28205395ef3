"""What all parallel layers share: a mesh, and parameters that are slices of whole ones."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from colossalai.communication import copy_forward_reduce_backward
from colossalai.context import Mesh, global_context
from colossalai.tensor import cut_dims, set_spec

Initializer = Callable[[torch.Tensor, int, int], object]
"""Fills a whole tensor in place, given fan-in and fan-out."""


class ParallelModule(nn.Module):
    """A layer whose parameters are cut over a mesh.

    Every rank draws the whole parameter from the same random state and keeps its slice, so that a model
    starts from the same global values under every layout.

    Args:
        mesh: The ranks; default: those of the launched job.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh or global_context.mesh

    def cut_parameter(
        self, name: str, whole: torch.Tensor, dims: tuple[tuple[str, ...], ...]
    ) -> nn.Parameter:
        """Return this rank's slice of a parameter, with its spec.

        Raises:
            ValueError: The axes do not divide it; the message names the layer, the dimension, the axes and
                the sizes.
        """
        try:
            spec = cut_dims(whole.shape, dims, self.mesh)
        except ValueError as error:
            raise ValueError(f"the {name} of {type(self).__name__}: {error}") from error
        param = nn.Parameter(spec.cut(whole))
        set_spec(param, spec)
        return param

    def shared_over(self, axes: Iterable[str], tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the ranks along `axes` use differently: its gradient is summed over them."""
        for name in axes:
            tensor = copy_forward_reduce_backward(tensor, self.mesh.axis(name))
        return tensor

    def check_share(self, x: torch.Tensor, whole_size: int, axes: tuple[str, ...], *, what: str) -> None:
        """Require that the last dimension of an input is this rank's share of the whole size.

        Raises:
            ValueError: It is not.
        """
        num_ranks = self.mesh.axis_size(axes) if axes else 1
        if x.shape[-1] * num_ranks != whole_size:
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)}: its last dimension must be "
                f"{whole_size // num_ranks}, the {whole_size} {what} over {num_ranks} ranks along "
                f"{axes or 'no axis'}"
            )


def empty_parameter(*shape: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return memory for a whole parameter on the device of this rank."""
    return torch.empty(shape, dtype=dtype, device=global_context.device)
