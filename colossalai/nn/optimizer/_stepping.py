"""Common parts of the optimizers here: checks of arguments, the step around an update, `zero_grad`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai.nn.optimizer._whole_tensor import tensors_with_grad


class SteppingOptimizer(Optimizer, ABC):
    """Abstract: an optimizer whose step is a closure, if there is one, and an update of all parameters."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            The result of `closure`, None without one.

        Raises:
            ValueError: A gradient is sparse, and the optimizer takes dense ones.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @abstractmethod
    def _update_all(self) -> None:
        """Update the parameters that have a gradient; called without grad mode."""

    def _lists(self) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
        """Yield the parameters that have a gradient, by device, dtype and mesh, with their group."""
        for group in self.param_groups:
            for params in tensors_with_grad(group["params"]):
                yield params, group


class SetGradNone(Optimizer):
    """Abstract: an optimizer with a default of `zero_grad`.

    Attributes:
        set_grad_none: Default of `set_to_none` in `zero_grad`.
    """

    set_grad_none: bool

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients.

        Args:
            set_to_none: Whether to drop them and not write zeros; `set_grad_none` if not given.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def check_not_negative(**values: float) -> None:
    """Refuse a negative value; each is given under its name.

    Raises:
        ValueError: A value is negative or not a number.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r} is out of range; give a number that is 0 or greater")


def check_decay_rates(**values: float) -> None:
    """Refuse a rate of a running average that is not in [0, 1); each is given under its name.

    Raises:
        ValueError: A rate is not in [0, 1).
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"{name}={value!r} is out of range; give a number from 0 up to, not including, 1"
            )
