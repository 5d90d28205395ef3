"""What layers with experts leave for the loss of a forward, and how experts are spread: `moe_env`.

A layer cannot return its auxiliary loss: models of any kind stand between it and the criterion. So it adds it
here, and `MoeLoss` takes the sum. Each forward through a door starts from zero.
"""

from typing import NamedTuple

import torch

from colossalai.context._mesh import Axis
from colossalai.context._parallel_context import global_context
from colossalai.context._process import process
from colossalai.context._random import moe_set_seed


class MoeInfo(NamedTuple):
    """How experts are spread.

    Attributes:
        ep_size: The ranks that share the experts of a layer.
        dp_size: The ranks that hold the same experts.
        ep_axis: The former.
        dp_axis: The latter.
    """

    ep_size: int
    dp_size: int
    ep_axis: Axis
    dp_axis: Axis


class MoeEnvironment:
    """The experts of the launched job, and the auxiliary loss of the forward that ran last.

    It keeps nothing itself: the losses are the process's.
    """

    __slots__ = ()

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that hold the same experts; 1 before launch."""
        return global_context.mesh.axis_size("edp") if global_context.is_launched else 1

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that share the experts of a layer; 1 before launch."""
        return global_context.mesh.axis_size("ep") if global_context.is_launched else 1

    @property
    def aux_loss(self) -> torch.Tensor | float:
        """What `get_loss` returns."""
        return self.get_loss()

    def is_initialized(self) -> bool:
        """Return whether a job has been launched, so that the sizes are those of its config."""
        return global_context.is_launched

    def setup(self, seed: int) -> None:
        """Seed the experts of the layers that are built from here on: `moe_set_seed`."""
        moe_set_seed(seed)

    def get_info(self, num_experts: int) -> tuple[int, MoeInfo]:
        """Return how many of so many experts a rank along `ep` holds, and how they are spread.

        Raises:
            ValueError: The ranks do not divide `num_experts`.
        """
        mesh = global_context.mesh
        ep_axis, dp_axis = mesh.axis("ep"), mesh.axis("edp")
        if num_experts % ep_axis.size:
            raise ValueError(f"{num_experts} experts, which {ep_axis.size} ranks do not divide")
        info = MoeInfo(ep_axis.size, dp_axis.size, ep_axis, dp_axis)
        return num_experts // ep_axis.size, info

    def reset_loss(self) -> None:
        """Forget the losses that were added; each forward through a door begins so."""
        process.expert_losses = []

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a layer; nothing happens while a forward is repeated for its backward."""
        if not is_in_backward():
            process.expert_losses.append(loss)

    @property
    def has_losses(self) -> bool:
        """Whether a layer has added something, and be it zero, since the last reset."""
        return bool(process.expert_losses)

    def get_loss(self) -> torch.Tensor | float:
        """Return the sum of the losses that were added since the last reset; 0.0 for none."""
        if not process.expert_losses:
            return 0.0
        total = process.expert_losses[0]
        for loss in process.expert_losses[1:]:
            total = total + loss.to(total.device)
        return total


MOE_CONTEXT = MoeEnvironment()
"""The one of this process; also `colossalai.global_variables.moe_env`."""


def is_in_backward() -> bool:
    """Return whether the call is made by a backward, as one of a forward that is repeated for it is."""
    return bool(torch._C._current_graph_task_id() != -1)
