"""Gradient accumulation for users' own loops: an optimizer that is stepped in every microbatch.

[Note: a window under the loop]
The loop calls backward, clip, step, zero_grad for each microbatch, as if there were no window. The optimizer
delays their effect: losses are divided by the length of the window, and clip, step and zero_grad have an
effect only in its last microbatch. The arithmetic is that of `TrainingStep`, which the Engine uses, too. It
calls the real backward and the real step of the same optimizer, so during these calls the methods of the
optimizer run at once.
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
        self._has_unstepped = False  # whether a backward has not been followed by the step of its microbatch
        self._is_immediate = False
        super().__init__(*args, **kwargs)  # last: see [Note: attributes of a wrapper]

    @property
    def window(self) -> TrainingStep:
        """The step that counts the microbatches."""
        assert self._window is not None, "open_window comes first"
        return self._window

    @property
    def has_unstepped(self) -> bool:
        """Whether there was a backward since the last call of `step`."""
        return self._has_unstepped

    def open_window(self, model: ModelWrapper, accumulation_steps: int) -> None:
        """Set the model of the optimizer, and the number of microbatches in a step."""
        self._window = TrainingStep(model, self, accumulation_steps=accumulation_steps)
        model.optimizers = (*model.optimizers, self)

    def restart_window(self) -> None:
        """Drop the microbatches of the present window, and their gradients."""
        self.window.restart_window()
        self._has_unstepped = False
        super().zero_grad()

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a microbatch, as its part of the mean over the window."""
        if self._is_immediate:
            super().backward(loss, *args, **kwargs)
            return
        self._has_unstepped = True
        with self._immediate_effect():
            self.window.backward(loss, *args, **kwargs)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """End a microbatch; at the end of the window update the parameters, and then set `stepped`.

        Raises:
            ValueError: `closure` is given, which would compute the gradients of one microbatch anew, or
                there was no backward or `zero_grad` since the end of the last window.
        """
        if self._is_immediate:
            return super().step(closure)
        if closure is not None:
            raise ValueError("a closure computes its own gradients: with accumulation leave it out")
        self._has_unstepped = False
        with self._immediate_effect():
            self.stepped = self.window.step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a window is open."""
        if self._is_immediate or not (self.window.is_in_window or self._has_unstepped):
            super().zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip at the end of the window; see the base class.

        Returns:
            The norm before clipping; infinity before the end of the window, and after an overflow.
        """
        if self._is_immediate:
            return super().clip_grad_by_norm(max_norm, norm_type)
        if not self.window.closes_window:
            return torch.tensor(float("inf"))
        with self._scaled_as_in_step():
            return super().clip_grad_by_norm(max_norm, norm_type)

    def gathered_grads(self) -> dict[str, torch.Tensor]:
        """Return the gradients of a window; see the base class.

        Raises:
            ValueError: The present microbatch is not the last one of its window.
        """
        if self._is_immediate:
            return super().gathered_grads()
        if not self.window.closes_window:
            raise ValueError(
                "the gradients of a window are complete in its last microbatch: call gathered_grads between "
                "its backward and its step, where the next step() updates the parameters"
            )
        with self._scaled_as_in_step():
            return super().gathered_grads()

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip at the end of the window; see the base class."""
        if self._is_immediate:
            super().clip_grad_by_value(clip_value)
        elif self.window.closes_window:
            with self._scaled_as_in_step():
                super().clip_grad_by_value(clip_value)

    @contextmanager
    def _scaled_as_in_step(self) -> Iterator[None]:
        """Context in which the gradients of a short window have the size that the step will give them."""
        factor = self.window.short_window_factor
        if factor != 1.0:
            self.scale_grads(factor)
        yield
        if factor != 1.0:
            self.scale_grads(1.0 / factor)

    @contextmanager
    def _immediate_effect(self) -> Iterator[None]:
        """Context in which methods have their effect at once."""
        self._is_immediate = True
        try:
            yield
        finally:
            self._is_immediate = False
