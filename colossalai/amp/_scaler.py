"""Loss scaling: multiply the loss so that small gradients do not vanish in float16, divide before the step.

[Note: one overflow decision]
An inf or nan may stand in the gradients of one rank only (each rank of a sharded model sees its own slices).
If that rank alone skipped its step, the replicas would drift apart. So the ranks take the maximum of their
findings, once per step, and all skip or none does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from colossalai.logging import get_dist_logger


class LossScaler:
    """The scaler of precisions that need none: the loss stays as it is and no step is skipped."""

    scale: float = 1.0

    def prepare(self, grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> bool:
        """Bring the gradients to their true size, in place, and say whether the step may be made.

        Args:
            grads: This rank's gradients (slices, where they are sharded).
            group: The ranks that decide together.

        Returns:
            False if any rank found an inf or nan: then no rank may step.
        """
        return True

    def update(self, *, stepped: bool) -> None:
        """Adapt the scale after a step that was made, or skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned."""


class DynamicLossScaler(LossScaler):
    """A scale that grows while all is well and shrinks at an overflow (Micikevicius et al., 1710.03740).

    Args:
        init_scale: The first scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks; the steps are skipped
            all the same.
        min_scale: The scale does not shrink below it.
        max_scale: The scale does not grow above it.
        verbose: Log every skipped step and every change of the scale.
    """

    def __init__(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float = float("inf"),
        verbose: bool = False,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"init_scale {init_scale}, growth_factor {growth_factor}, backoff_factor {backoff_factor}, "
                f"growth_interval {growth_interval}: the scale must be above 0, the growth factor above 1, "
                "the backoff factor between 0 and 1, the interval at least 1"
            )
        if hysteresis < 1 or not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"hysteresis {hysteresis}, min_scale {min_scale}, max_scale {max_scale}, first scale "
                f"{init_scale}: hysteresis must be at least 1, the first scale between the other two"
            )
        self.scale = float(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.verbose = verbose
        self._overflows = 0  # since the last growth

    def prepare(self, grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> bool:
        """See the base class. One all-reduce of one float32 over `group`."""
        overflow = _has_overflow(grads)
        if group is not None:  # see [Note: one overflow decision]
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        if overflow.item():
            return False
        if grads:
            torch._foreach_mul_(list(grads), 1.0 / self.scale)
        return True

    def update(self, *, stepped: bool) -> None:
        """Shrink the scale after enough skipped steps, grow it after enough good ones."""
        before = self.scale
        if stepped:
            self._count_good_step()
        else:
            self._count_overflow()
        if self.verbose and (not stepped or self.scale != before):
            what = "a step was made" if stepped else "overflow: the step was skipped"
            get_dist_logger().info(f"{what}; loss scale {before:g}, now {self.scale:g}", ranks=[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counts of good steps and overflows."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows": self._overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self._overflows = int(state.get("overflows", 0))  # older checkpoints have none

    def _count_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(self.scale * self.growth_factor, self.max_scale)
            self.good_steps = 0
            self._overflows = 0

    def _count_overflow(self) -> None:
        self.good_steps = 0
        self._overflows += 1
        if self._overflows >= self.hysteresis:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)


def _has_overflow(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1.0 if any element is inf or nan, else 0.0, as a float32 scalar on the gradients' device."""
    if not grads:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.zeros((), device=device)
    largest = torch._foreach_norm(list(grads), float("inf"))
    finite = torch.stack([norm.isfinite() for norm in largest]).all()
    return 1.0 - finite.float()
