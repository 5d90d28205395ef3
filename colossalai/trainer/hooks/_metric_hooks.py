"""Hooks that measure. They add to the trainer's metrics; other hooks and the Trainer reduce and show them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossalai.context import names_arguments
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook
from colossalai.trainer._batch import tensors_in
from colossalai.trainer._metric import MetricTable
from colossalai.trainer._timer import Timer

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer

Results = tuple[Any, Any, Tensor | None]
Count = Tensor | int


class MetricHook(BaseHook, ABC):
    """Measures something in every iteration of training and testing."""

    names: tuple[str, ...]
    """The names of the metrics."""

    def after_hook_is_attached(self, trainer: "Trainer") -> None:
        """Declare the metrics, on every rank in the same order."""
        for table in trainer.metrics.values():
            for name in self.names:
                table.declare(name)

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Measure a training iteration."""
        self.measure(trainer, trainer.metrics["train"], (output, label, loss))

    def after_test_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Measure a test iteration."""
        self.measure(trainer, trainer.metrics["test"], (output, label, loss))

    @abstractmethod
    def measure(self, trainer: "Trainer", table: MetricTable, results: Results) -> None:
        """Add the results of an iteration (output, label, loss) to the table."""


@HOOKS.register_module
class LossHook(MetricHook):
    """Measures the loss, as "Loss": the mean over all samples of the epoch and over the data-parallel ranks.

    If the criterion returns pairs (sum, count), it is the mean over all counts.

    Args:
        priority: Hooks with a lower value run earlier.
    """

    names = ("Loss",)

    @names_arguments
    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)

    def measure(self, trainer: "Trainer", table: MetricTable, results: Results) -> None:
        """Add the loss of the batch with its weight; nothing on a rank that has no loss."""
        loss = results[2]
        if loss is not None:
            wide_enough = torch.promote_types(loss.dtype, torch.float32)
            table.add("Loss", loss.to(wide_enough) * trainer.loss_weight, trainer.loss_weight)


@HOOKS.register_module
class AccuracyHook(MetricHook):
    """Measures the accuracy, as "Accuracy": correct predictions over all predictions, from 0 to 1.

    Args:
        accuracy_func: From output and label to the number of correct predictions, e.g. `Accuracy()`; or to
            a pair of that and the number of predictions, which otherwise is the number of rows of the
            output: every dim but the last, the classes.
        priority: Hooks with a lower value run earlier.
    """

    names = ("Accuracy",)

    @names_arguments
    def __init__(
        self, accuracy_func: Callable[[Any, Any], Count | tuple[Count, Count]], priority: int = 0
    ) -> None:
        super().__init__(priority)
        self.accuracy_func = accuracy_func

    def before_train(self, trainer: "Trainer") -> None:
        """Refuse to measure a training that computes no logits.

        Raises:
            ValueError: The engine has `fused_loss=True`.
        """
        if trainer.engine.model.takes_labels:
            raise ValueError(
                "AccuracyHook reads logits, and with fused_loss=True there are none in training: give it to "
                "trainer.evaluate only, or leave fused_loss out"
            )

    def measure(self, trainer: "Trainer", table: MetricTable, results: Results) -> None:
        """Count the correct predictions of the batch.

        Raises:
            ValueError: The results have a loss, but no output to look at.
        """
        output, label, _ = results
        if not trainer.engine.sees_output:
            return
        if output is None:
            raise ValueError(
                "AccuracyHook needs the output: call fit or evaluate with return_output_label=True"
            )
        counted = self.accuracy_func(output, label)
        correct, total = counted if isinstance(counted, tuple) else (counted, _num_rows(output))
        table.add("Accuracy", correct, float(total))


@HOOKS.register_module
class ThroughputHook(MetricHook):
    """Measures "Throughput", samples per second of all data-parallel ranks together, and the work done.

    It times an iteration without loading the batch, and waits for the accelerator.

    Args:
        ignored_steps: Number of the first training steps that are left out: they warm up caches and
            compilers.
        tflop_per_step: Work of a training step on one rank in 10^12 operations; with it "TFLOPS" is the
            rate per rank.
        priority: Hooks with a lower value run earlier.
    """

    @names_arguments
    def __init__(
        self, ignored_steps: int = 0, tflop_per_step: float | None = None, priority: int = 0
    ) -> None:
        super().__init__(priority)
        if ignored_steps < 0:
            raise ValueError(
                f"ignored_steps={ignored_steps!r} is out of range; give an integer that is 0 or greater"
            )
        self.ignored_steps = ignored_steps
        self.tflop_per_step = tflop_per_step
        self.names = ("Throughput",) if tflop_per_step is None else ("Throughput", "TFLOPS")
        self._num_steps = 0
        self._timer = Timer()

    def before_train_iter(self, trainer: "Trainer") -> None:
        """Start the clock."""
        self._timer.start()

    def before_test_iter(self, trainer: "Trainer") -> None:
        """Start the clock."""
        self._timer.start()

    def measure(self, trainer: "Trainer", table: MetricTable, results: Results) -> None:
        """Add the samples and the time of the iteration.

        The sums run over the data-parallel ranks, which work at the same time: each adds its part of the
        time.
        """
        elapsed = self._timer.stop()
        is_training = table is trainer.metrics["train"]
        self._num_steps += is_training
        if is_training and self._num_steps <= self.ignored_steps:
            return
        elapsed_part = elapsed / trainer.engine.mesh.axis_size("dp")
        table.add("Throughput", trainer.batch_samples, elapsed_part)
        if self.tflop_per_step is not None and is_training:
            table.add("TFLOPS", self.tflop_per_step, elapsed)


def _num_rows(output: Any) -> int:
    logits = next(tensors_in(output))
    return logits.numel() // logits.size(-1)
