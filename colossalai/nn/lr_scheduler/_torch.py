"""torch's own schedules where they hold more than a formula: the user's functions, the momentum of one cycle.

The addition is an end: a scheduler that is stepped after its last step keeps the rate.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch.optim.lr_scheduler as torch_schedulers
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.nn.lr_scheduler._curve import check_fraction, check_total_steps
from colossalai.registry import LR_SCHEDULERS


class _Ending(LRScheduler):
    """Mixed in before a schedule of torch: keep the rate after step `last_step`."""

    last_step: int

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of every parameter group at the current step."""
        if self.last_epoch > self.last_step:
            return [group["lr"] for group in self.optimizer.param_groups]
        return super().get_lr()


@LR_SCHEDULERS.register_module
class LambdaLR(_Ending, torch_schedulers.LambdaLR):
    """Multiply the base rate by a function of the step.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule; afterwards the rate stays.
        lr_lambda: From the step to the factor; or a list with one function for each parameter group.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = self.last_step = check_total_steps(total_steps)
        super().__init__(optimizer, _one_or_list(lr_lambda), last_epoch)


@LR_SCHEDULERS.register_module
class MultiplicativeLR(_Ending, torch_schedulers.MultiplicativeLR):
    """Multiply the rate of the step before by a function of the step.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule; afterwards the rate stays.
        lr_lambda: From the step to the factor; or a list with one function for each parameter group.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = self.last_step = check_total_steps(total_steps)
        super().__init__(optimizer, _one_or_list(lr_lambda), last_epoch)


@LR_SCHEDULERS.register_module
class OneCycleLR(_Ending, torch_schedulers.OneCycleLR):
    """Rise to the base rate and fall far below it, with the momentum in the opposite direction.

    Smith and Topin 2017, arXiv 1708.07120. The optimizer's rate is the highest one.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the cycle; the last, with the lowest rate, is number total_steps - 1.
        pct_start: The part of the cycle, from 0 to 1, in which the rate rises.
        anneal_strategy: The form of both parts: "cos" or "linear".
        cycle_momentum: Whether the momentum (beta1 for an Adam-like optimizer) goes from `max_momentum` to
            `base_momentum` and back.
        base_momentum: The momentum at the highest rate.
        max_momentum: The momentum at the lowest rates.
        div_factor: The highest rate divided by the first.
        final_div_factor: The first rate divided by the last.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
    ) -> None:
        self.last_step = check_total_steps(total_steps) - 1
        _check_rise(check_fraction("pct_start", pct_start), total_steps)
        super().__init__(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=float(pct_start),
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
        )


def _check_rise(pct_start: float, total_steps: int) -> None:
    """Refuse a rise of exactly one step: its first step would be its last, at two rates."""
    if pct_start * total_steps == 1:
        raise ValueError(
            f"pct_start={pct_start} of total_steps={total_steps} is a rise of one step; "
            f"give 0 for none or at least {2 / total_steps:.3g}"
        )


def _one_or_list(
    functions: Callable[[int], float] | Sequence[Callable[[int], float]],
) -> Callable[[int], float] | list[Callable[[int], float]]:
    return functions if callable(functions) else list(functions)
