"""Hooks that watch one metric: stop when it gets no better, keep the best model."""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colossalai.checkpoint_io import save_model, wait_for_saves
from colossalai.communication import broadcast
from colossalai.context import names_arguments
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook
from colossalai.trainer.hooks._states import save_state

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer

_MODES = {"Loss": "min", "Accuracy": "max", "Throughput": "max", "TFLOPS": "max"}


class MetricWatchHook(BaseHook, ABC):
    """Compares a metric after every epoch, or every test, with the best one so far.

    The next action of the ranks depends on the figure, so all of them compare the one of rank 0: a figure
    that differs between ranks, by rounding or by a mistake, cannot make them diverge.

    Args:
        metric: Name of the metric, as a hook measures it: "Loss", "Accuracy".
        phase: "test" for the figures of tests, "train" for those of training epochs.
        mode: Whether less ("min") or more ("max") is better; known of the metrics of this package's hooks.
        min_delta: By how much a figure must be better than the best one to count.
        priority: Hooks with a lower value run earlier.

    Attributes:
        best_value: The best figure so far, None if there is none.
        best_epoch: The number of complete epochs that it belongs to.

    Raises:
        ValueError: `mode` is not given and not known of `metric`, `mode` or `phase` is unknown, or
            `min_delta` is negative.
    """

    @names_arguments
    def __init__(
        self,
        metric: str,
        phase: str = "test",
        mode: str | None = None,
        min_delta: float = 0.0,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        mode = _MODES.get(metric) if mode is None else mode
        if mode not in ("min", "max"):
            raise ValueError(
                f"mode of the metric {metric!r} is {mode!r}; it must be 'min' if less is better, else 'max'"
            )
        if phase not in ("train", "test"):
            raise ValueError(f"phase is {phase!r}; it must be 'train' or 'test'")
        if not min_delta >= 0:
            raise ValueError(f"min_delta is {min_delta!r}; it must be 0 or greater")
        self.metric = metric
        self.phase = phase
        self.mode = mode
        self.min_delta = min_delta
        self.best_value: float | None = None
        self.best_epoch: int | None = None
        self._is_in_training = False

    @abstractmethod
    def after_judgment(self, trainer: "Trainer", value: float, *, is_better: bool) -> None:
        """Run on every rank, with the same arguments, when a figure has been compared."""

    def before_train(self, trainer: "Trainer") -> None:
        """Check that the metric will be measured.

        Raises:
            ValueError: No hook measures the metric, or there are no tests.
        """
        name = type(self).__name__
        known = trainer.metrics[self.phase].names
        if self.metric not in known:
            raise ValueError(
                f"{name} watches {self.metric!r}, which no hook measures (measured are: {known}): add a "
                "hook that does, such as LossHook(), to the hooks"
            )
        if self.phase == "test" and trainer.test_dataloader is None:
            raise ValueError(
                f"{name} watches {self.metric!r} of tests, and there are none: give fit a test_dataloader, "
                "or the hook phase='train'"
            )
        self._is_in_training = True

    def after_train(self, trainer: "Trainer") -> None:
        """Stop watching: a test outside of a training does not count."""
        self._is_in_training = False

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Judge a training epoch."""
        if self.phase == "train":
            self._judge(trainer)

    def after_test_epoch(self, trainer: "Trainer") -> None:
        """Judge a test."""
        if self.phase == "test" and self._is_in_training:
            self._judge(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the best figure, for a training state."""
        return {"best_value": self.best_value, "best_epoch": self.best_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best_value, self.best_epoch = state["best_value"], state["best_epoch"]

    def _judge(self, trainer: "Trainer") -> None:
        value = self._value_of_rank_0(trainer)
        is_better = not math.isnan(value) and (self.best_value is None or self._gain(value) > self.min_delta)
        if is_better:
            self.best_value, self.best_epoch = value, trainer.cur_epoch
        self.after_judgment(trainer, value, is_better=is_better)

    def _gain(self, value: float) -> float:
        assert self.best_value is not None
        return self.best_value - value if self.mode == "min" else value - self.best_value

    def _value_of_rank_0(self, trainer: "Trainer") -> float:
        """Return the figure of rank 0 on every rank; nan if it has none. One broadcast of one number."""
        mesh = trainer.engine.mesh
        value = trainer.metrics[self.phase].epoch_values.get(self.metric, math.nan)
        if mesh.world_size == 1:
            return value
        dtype = torch.float32 if trainer.engine.device.type == "mps" else torch.float64
        # All ranks of the job join; rank 0 sends its figure, those of the others are overwritten.
        held = torch.tensor(value, dtype=dtype, device=trainer.engine.device)
        return float(broadcast(held, 0, mesh.axis(tuple(mesh.axes))))


@HOOKS.register_module
class EarlyStoppingHook(MetricWatchHook):
    """Ends a training when a metric has got no better for some time, on all ranks after the same epoch.

    A figure of nan never counts as an improvement.

    Args:
        metric: Name of the metric: "Loss", "Accuracy".
        patience: Number of consecutive figures without improvement; the next one ends the training.
        phase: "test" for the figures of tests, "train" for those of training epochs.
        mode: Whether less ("min") or more ("max") is better; known of the metrics of this package's hooks.
        min_delta: By how much a figure must be better than the best one to count.
        priority: Hooks with a lower value run earlier.

    Raises:
        ValueError: `mode` is not given and not known of `metric`, `mode` or `phase` is unknown, or
            `min_delta` or `patience` is negative.
    """

    @names_arguments
    def __init__(
        self,
        metric: str = "Loss",
        patience: int = 3,
        phase: str = "test",
        mode: str | None = None,
        min_delta: float = 0.0,
        priority: int = 10,
    ) -> None:
        super().__init__(metric, phase, mode, min_delta, priority)
        if type(patience) is not int or patience < 0:
            raise ValueError(f"patience={patience!r} is out of range; give an integer that is 0 or greater")
        self.patience = patience
        self._num_worse = 0

    def after_judgment(self, trainer: "Trainer", value: float, *, is_better: bool) -> None:
        """Count figures without improvement, and request the end."""
        self._num_worse = 0 if is_better else self._num_worse + 1
        if self._num_worse > self.patience:
            best = "none" if self.best_value is None else f"{self.best_value:.5g} of epoch {self.best_epoch}"
            trainer.request_stop(
                f"{self.phase} {self.metric} is {value:.5g} and was no better than the best one ({best}) "
                f"{self._num_worse} times in a row"
            )

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return {**super().state_dict(), "num_worse": self._num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class."""
        super().load_state_dict(state)
        self._num_worse = state["num_worse"]


@HOOKS.register_module
class SaveBestHook(MetricWatchHook):
    """Keeps the model of the epoch with the best figure of a metric.

    Args:
        metric: Name of the metric: "Loss", "Accuracy".
        path: A name with a suffix is a file of the weights, "best.safetensors" or in torch's format, which
            every better model replaces. A name without one is a folder with a training state, to resume by
            `trainer.fit(resume=...)` and `Engine.load`; it must differ from the folder of a
            `SaveCheckpointHook`, so that other states are not lost.
        phase: "test" for the figures of tests, "train" for those of training epochs.
        mode: Whether less ("min") or more ("max") is better; known of the metrics of this package's hooks.
        min_delta: By how much a figure must be better than the best one to count.
        save_async: Write training states in the background.
        priority: Hooks with a lower value run earlier, which the `LRSchedulerHook` has to.

    Raises:
        ValueError: `mode` is not given and not known of `metric`, `mode` or `phase` is unknown, `min_delta`
            is negative, or `save_async` is set and `path` is a file.
    """

    @names_arguments
    def __init__(
        self,
        metric: str = "Loss",
        path: str | Path = "best",
        phase: str = "test",
        mode: str | None = None,
        min_delta: float = 0.0,
        save_async: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(metric, phase, mode, min_delta, priority)
        self.path = Path(path)
        self.save_async = save_async
        if save_async and self.path.suffix:
            raise ValueError(
                f"save_async=True is for training states: give a folder in place of {str(path)!r}"
            )

    def after_judgment(self, trainer: "Trainer", value: float, *, is_better: bool) -> None:
        """Save a better one."""
        if not is_better:
            return
        if self.path.suffix:
            model = trainer.engine.model.unwrap()
            save_model(model, self.path, use_safetensors=self.path.suffix == ".safetensors")
            return
        save_state(trainer, self.path, keep_last=1, save_async=self.save_async)

    def after_train(self, trainer: "Trainer") -> None:
        """Wait for saves in the background."""
        super().after_train(trainer)
        wait_for_saves()
