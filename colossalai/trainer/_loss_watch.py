"""Check of the training loss for NaN and infinity, which only float16 training checks otherwise."""

import math
from typing import Any

import torch
import torch.distributed as dist

from colossalai.communication import all_reduce_in_place
from colossalai.engine import Engine

ACTIONS = ("warn", "stop", "ignore")


class NanLossError(RuntimeError):
    """The training loss is NaN or infinite, and training was to stop there."""


class LossWatch:
    """Checks the loss of every training iteration, and warns of the first that is not finite, or stops.

    For a warning, each rank checks its own loss; on an accelerator one iteration late, so that nothing waits
    for the current one. To stop, all ranks check together: an all-reduce of one number in each iteration.

    Args:
        action: "warn", "stop" or "ignore".
        engine: The engine.
        logger: Gets the warning.

    Raises:
        ValueError: `action` is unknown.
    """

    def __init__(self, action: str, engine: Engine, logger: Any) -> None:
        if action not in ACTIONS:
            raise ValueError(f"nan_loss is {action!r}; it must be one of {', '.join(map(repr, ACTIONS))}")
        self._action = action
        self._engine = engine
        self._logger = logger
        self._waiting: tuple[torch.Tensor, int] | None = None  # a loss that is not checked yet, and its step
        self._has_warned = False

    def see(self, loss: torch.Tensor | None, step: int) -> None:
        """Take the loss of an iteration; every rank has to call it.

        Args:
            loss: The loss, None on a rank that has none.
            step: The number of the iteration, from 1.

        Raises:
            NanLossError: The loss is NaN or infinite on some rank, and training is to stop; on all ranks.
        """
        if self._action == "stop":
            self._stop(loss, step)
        elif self._action == "warn" and loss is not None and not self._has_warned:
            self.look()
            self._waiting = (loss, step)
            if loss.device.type == "cpu":
                self.look()

    def look(self) -> None:
        """Check the pending loss, if there is one."""
        if self._waiting is None:
            return
        (loss, step), self._waiting = self._waiting, None
        value = loss.item()
        if math.isfinite(value) or self._has_warned:
            return
        self._has_warned = True
        engine = self._engine
        if engine.sees_output and 0 in engine.observers.ranks:  # others see the same
            self._logger.warning(_message(f"{value:g}", step, engine.mesh.rank))

    def _stop(self, loss: torch.Tensor | None, step: int) -> None:
        mesh, device = self._engine.mesh, self._engine.device
        rank = torch.full((), mesh.world_size, device=device)
        if loss is not None:
            rank = torch.where(loss.isfinite(), rank, mesh.rank)
        # All ranks of the job join, with their number if the loss is not finite; `item` waits for the result.
        first = int(all_reduce_in_place(rank, mesh.axis(tuple(mesh.axes)), dist.ReduceOp.MIN).item())
        if first < mesh.world_size:
            raise NanLossError(_message("NaN or infinite", step, first))


def _message(value: str, step: int, rank: int) -> str:
    return (
        f"the loss is {value} at step {step} on rank {rank}; from here on the weights are likely to be NaN, "
        "too. Look at the data of this step, and at the learning rate; a mean over no labels is NaN: let the "
        "criterion return (sum, count) then. Trainer(nan_loss='stop') ends the training there, 'ignore' "
        "says nothing"
    )
