"""Gradient accumulation for loops of the user's own: an optimizer that is stepped in every microbatch.

[Note: a window under the loop]
The loop says backward, clip, step, zero_grad for each microbatch, as if there were no window. The optimizer
lets them take effect when it is time: losses are divided by the length of the window, clip, step and
zero_grad do nothing but in its last microbatch. The arithmetic is that of `TrainingStep`, which the Engine
uses, too. It asks the same optimizer for the real backward and the real step, so while it works the optimizer
answers for itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from colossalai.amp import OptimizerWrapper
from colossalai.runtime._step import TrainingStep
from colossalai.runtime._wrapper import ModelWrapper


class AccumulatingOptimizer(OptimizerWrapper):
    """An optimizer whose step takes effect in the last microbatch of a window.

    See [Note: a window under the loop]. The arguments are those of `OptimizerWrapper`; `open_window` follows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._window: TrainingStep | None = None
        self._has_unstepped = False  # whether a backward waits for the step of its microbatch
        self._is_at_work = False
        super().__init__(*args, **kwargs)  # last: see [Note: where an attribute is set]

    @property
    def window(self) -> TrainingStep:
        """What counts the microbatches."""
        assert self._window is not None, "open_window comes first"
        return self._window

    @property
    def has_unstepped(self) -> bool:
        """Whether there was a backward since the last call of `step`."""
        return self._has_unstepped

    def open_window(self, model: ModelWrapper, accumulation_steps: int) -> None:
        """Say what the optimizer belongs to, and how many microbatches make a step."""
        self._window = TrainingStep(model, self, accumulation_steps=accumulation_steps)
        model.optimizers = (*model.optimizers, self)

    def restart_window(self) -> None:
        """Forget the microbatches of the present window, and their gradients."""
        self.window.restart_window()
        self._has_unstepped = False
        super().zero_grad()

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a microbatch, as its part of the mean over the window."""
        if self._is_at_work:
            super().backward(loss, *args, **kwargs)
            return
        self._has_unstepped = True
        with self._at_work():
            self.window.backward(loss, *args, **kwargs)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """End a microbatch; at the end of the window update the parameters. `stepped` says whether it did.

        Raises:
            ValueError: A closure is given, which would compute the gradients of one microbatch anew, or
                no backward or `zero_grad` came since the end of the window before.
        """
        if self._is_at_work:
            return super().step(closure)
        if closure is not None:
            raise ValueError("a closure computes its own gradients: with accumulation leave it out")
        self._has_unstepped = False
        with self._at_work():
            self.stepped = self.window.step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, unless a window is under way."""
        if self._is_at_work or not (self.window.is_in_window or self._has_unstepped):
            super().zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip at the end of the window; see the base class.

        Returns:
            The norm before clipping; infinity before the end of the window, and after an overflow.
        """
        if self._is_at_work:
            return super().clip_grad_by_norm(max_norm, norm_type)
        if not self.window.closes_window:
            return torch.tensor(float("inf"))
        with self._as_in_step():
            return super().clip_grad_by_norm(max_norm, norm_type)

    def gathered_grads(self) -> dict[str, torch.Tensor]:
        """Return the gradients of a window; see the base class.

        Raises:
            ValueError: The present microbatch is not the last one of its window.
        """
        if self._is_at_work:
            return super().gathered_grads()
        if not self.window.closes_window:
            raise ValueError(
                "the gradients of a window are complete in its last microbatch: call gathered_grads between "
                "its backward and its step, where the next step() updates the parameters"
            )
        with self._as_in_step():
            return super().gathered_grads()

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip at the end of the window; see the base class."""
        if self._is_at_work:
            super().clip_grad_by_value(clip_value)
        elif self.window.closes_window:
            with self._as_in_step():
                super().clip_grad_by_value(clip_value)

    @contextmanager
    def _as_in_step(self) -> Iterator[None]:
        """Within the block, the gradients of a short window are as large as the step will make them."""
        factor = self.window.short_window_factor
        if factor != 1.0:
            self.scale_grads(factor)
        yield
        if factor != 1.0:
            self.scale_grads(1.0 / factor)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Within the block, methods do what their names say, at once."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False
