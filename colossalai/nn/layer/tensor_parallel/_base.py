"""Base class of parallel layers: a mesh, and parameters that are slices of whole ones."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from colossalai.communication import copy_forward_reduce_backward
from colossalai.context import Mesh
from colossalai.nn.layer.tensor_parallel._launched import launched_job
from colossalai.nn.layer.tensor_parallel._record import Passage
from colossalai.nn.layer.tensor_parallel._scheme import Cut
from colossalai.tensor import PaddedSpec, SpecKeeper, cut_dims, pad_to, set_built_for, set_spec

Initializer = Callable[[torch.Tensor, int, int], object]
"""Fills a whole tensor in place, given fan-in and fan-out."""


class ParallelModule(SpecKeeper):
    """A layer whose parameters are cut over a mesh.

    Every rank draws the whole parameter from the same random state and keeps its slice, so that a model
    starts from the same global values under every layout.

    Args:
        mesh: The ranks; default: those of the launched job, or this process alone.
    """

    passage: Passage | None = None
    """Cuts of the activation before and behind the layer, if it is one of a mode."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        job = launched_job()
        super().__init__(mesh or job.mesh)
        if mesh is None:
            set_built_for(self, mode=job.mode)

    @property
    def input_cut(self) -> Cut:
        """Cut of the input, for a layer that takes the same one."""
        return self._known_passage().entry.cut

    @property
    def output_cut(self) -> Cut:
        """Cut of the output."""
        return self._known_passage().output_cut

    def _known_passage(self) -> Passage:
        if self.passage is None:
            raise AttributeError(f"{type(self).__name__} was built without a tensor mode")
        return self.passage

    def cut_parameter(
        self,
        name: str,
        whole: torch.Tensor,
        dims: tuple[tuple[str, ...], ...],
        *,
        stored_as: tuple[int, ...] | None = None,
        padded_shape: tuple[int, ...] | None = None,
    ) -> nn.Parameter:
        """Return this rank's slice of a parameter, with its spec.

        Args:
            name: For messages.
            whole: The whole parameter, its dimensions in the order that is stored.
            dims: For each dimension, the axes that cut it.
            stored_as: That order where it is not torch's; see `ShardingSpec`. Checkpoints hold torch's.
            padded_shape: The shape that it is padded to before it is cut; default: its own. See `PaddedSpec`.

        Raises:
            ValueError: The axes do not divide `whole`; the message names the layer, the dimension, the axes
                and the sizes.
        """
        try:
            spec = cut_dims(padded_shape or whole.shape, dims, self.mesh, stored_as=stored_as)
        except ValueError as error:
            raise ValueError(f"the {name} of {type(self).__name__}: {error}") from error
        if spec.shape != whole.shape:
            spec = PaddedSpec(spec.shape, spec.dims, spec.mesh, stored_as, unpadded=tuple(whole.shape))
        param = nn.Parameter(spec.cut(pad_to(whole, spec.shape)))
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
            ValueError: The last dimension of `x` is not this rank's share of `whole_size`.
        """
        num_ranks = self.mesh.axis_size(axes) if axes else 1
        if x.shape[-1] * num_ranks != whole_size:
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)}: its last dimension must be "
                f"{whole_size // num_ranks}, the {whole_size} {what} over {num_ranks} ranks along "
                f"{axes or 'no axis'}{'' if self.passage is None else self.passage.hint()}"
            )


def empty_parameter(*shape: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return memory for a whole parameter on the device of this rank; none under `torch.device("meta")`."""
    default = torch.get_default_device()
    return torch.empty(
        shape, dtype=dtype, device=default if default.type == "meta" else launched_job().device
    )
