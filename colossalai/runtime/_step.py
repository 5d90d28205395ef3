"""Training step: one optimizer step for a window of microbatches.

The loss of each microbatch is divided by the window's length once, here, unless losses have weights; only the
last microbatch of a window communicates; then gradient handlers run, gradients are clipped, and the
parameters are updated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from colossalai.amp import GivenLoss, LossTerm, OptimizerWrapper, Weight, check_loss, read_loss
from colossalai.logging import get_dist_logger
from colossalai.monitor import section
from colossalai.pipeline import PipelineOptions
from colossalai.runtime._epoch import EpochWatch
from colossalai.runtime._pipeline import BatchResult, Criterion
from colossalai.runtime._wrapper import ModelWrapper

# Names of the parts of a step in reports of the watchdog.
_FORWARD, _BACKWARD = section("the forward"), section("the backward")
_PIPELINE, _UPDATE = section("the pipeline"), section("the optimizer step")

_AGAIN = (
    "step() was called again without a backward: the gradients that are still there are applied once more, "
    "as by an optimizer of torch. Run a backward before each step(), or call zero_grad() after it"
)
_AGAIN_IN_WINDOW = (
    "step() was called again without a backward, and each step() ends a microbatch of a window: "
    "run a backward before each step(), or call zero_grad() at the end of a window"
)


class TrainingStep:
    """Forward, backward and step of one model, with accumulation and clipping.

    Args:
        model: The assembled model.
        optimizer: Its assembled optimizer; None for a model that is only run.
        accumulation_steps: Length N of a window.
        sync_grads: Functions that synchronize gradients over the ranks after the backward, in order.

    Attributes:
        loss_weight: The weight of the loss of the last batch, a scalar; None if it has none.
        num_samples: The number of samples of the last batch, None if it did not run through a pipeline.
    """

    def __init__(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper | None,
        *,
        accumulation_steps: int = 1,
        sync_grads: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.model = model
        self.accumulation_steps = accumulation_steps
        self.sync_grads = tuple(sync_grads)
        self.watch: EpochWatch | None = None
        self.loss_weight: torch.Tensor | None = None
        self.num_samples: int | None = None
        self._optimizer = optimizer
        self._done = 0  # microbatches of the present window that are complete

    @property
    def optimizer(self) -> OptimizerWrapper:
        """The optimizer.

        Raises:
            ValueError: The step was made without an optimizer.
        """
        if self._optimizer is None:
            raise ValueError("there is no optimizer: pass one to colossalai.initialize to train")
        return self._optimizer

    @property
    def optimizer_or_none(self) -> OptimizerWrapper | None:
        """The optimizer, or None."""
        return self._optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a microbatch; a pipeline runs in `run_pipeline`."""
        if self.accumulation_steps > 1 and torch.is_grad_enabled() and self.model.training:
            self.model.set_sync(self._closes_window())
        with _FORWARD:
            return self.model(*args, **kwargs)

    def backward(self, loss: GivenLoss, weight: Weight | None = None) -> None:
        """Add the gradients of a microbatch's loss, as its part of the mean over the window.

        Args:
            loss: The mean, or a pair (sum, count).
            weight: Number of labels of the mean, the weight of the loss in the window and over all ranks.

        Raises:
            ValueError: `loss` is not a valid loss, `weight` is negative or not one number, or only some of
                the losses of a window have a weight.
        """
        given = read_loss(loss, weight)
        check_loss(given.value)
        self.loss_weight = given.weight
        model = self.model
        if not model.syncs and not model.is_in_no_sync and self._closes_window():
            model.set_sync(True)  # there was no forward in training mode that set it
        if given.weight is None and self.accumulation_steps > 1:
            given = LossTerm(given.value / self.accumulation_steps)
        with _BACKWARD:
            self.optimizer.backward_of(given)

    def run_pipeline(
        self,
        data: Any,
        label: Any,
        criterion: Criterion | None,
        *,
        options: PipelineOptions | None = None,
        forward_only: bool = False,
        return_loss: bool = True,
        return_output: bool = False,
    ) -> BatchResult:
        """Run a batch through the pipeline; see `Pipeline.run`. It counts as one microbatch of the window.

        Raises:
            ValueError: The model has no pipeline.
        """
        if self.model.pipeline is None:
            raise ValueError(
                "a pipeline schedule needs a pipeline: launch with parallel=dict(pipeline=...) and more than "
                "one stage, or leave the schedule out"
            )
        with _PIPELINE:
            result = self.model.pipeline.run(
                data,
                label,
                criterion,
                optimizer=None if forward_only else self.optimizer,
                num_parts=self.accumulation_steps,
                options=options,
                return_loss=return_loss,
                return_output=return_output,
                sync=self._closes_window(),
            )
        self.loss_weight, self.num_samples = result.weight, result.num_samples
        return result

    def step(self) -> bool:
        """End a microbatch; at the end of the window update the parameters.

        Returns:
            Whether the parameters were updated: False within a window, after an overflow, and without
            gradients.

        Raises:
            ValueError: With accumulation, there was no backward or `zero_grad` since the last step.
        """
        if self.optimizer.is_stepped_again:  # alike on all ranks
            if self.accumulation_steps > 1:
                raise ValueError(_AGAIN_IN_WINDOW)
            get_dist_logger().log_once(_AGAIN, ranks=[0])
        closes, factor = self._closes_window(), self.short_window_factor
        self._done += 1
        if not closes:
            return False
        self._done = 0
        with _UPDATE:
            for sync in self.sync_grads:
                sync()
            if factor != 1.0:
                self.optimizer.scale_grads(factor)
            self.optimizer.step()
        return self.optimizer.stepped

    @property
    def is_in_window(self) -> bool:
        """Whether some microbatches of a window are complete, and not all."""
        return self._done > 0

    @property
    def closes_window(self) -> bool:
        """Whether the present microbatch is the last one of its window."""
        return self._closes_window()

    @property
    def short_window_factor(self) -> float:
        """Factor of the gradients if the present microbatch closes its window early, else 1.

        At the end of an epoch the losses were divided by a too large number, unless they have weights.
        """
        is_divided = not self.optimizer.gradients.weights.are_used
        return self.accumulation_steps / (self._done + 1) if is_divided and self._closes_window() else 1.0

    def restart_window(self) -> None:
        """Drop the microbatches of the present window; the caller has cleared their gradients."""
        self._done = 0

    def zero_grad(self) -> None:
        """Clear the gradients, unless a window is open."""
        if self._done == 0:
            self.optimizer.zero_grad()

    def _closes_window(self) -> bool:
        at_end = self.watch is not None and self.watch.at_last_batch
        return at_end or self._done + 1 == self.accumulation_steps
