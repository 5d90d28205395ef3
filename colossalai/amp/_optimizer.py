"""An optimizer that scales the loss, unscales gradients once, clips, and steps only when all ranks may."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp._scaler import DynamicLossScaler, LossScaler
from colossalai.tensor import global_grad_norm, local_grads, scale_grads


class OptimizerWrapper(Optimizer):
    """What a door returns for an optimizer. It has the optimizer's attributes, so that schedulers work on it.

    Args:
        optim: The optimizer underneath.
        scaler: The loss scaler of the precision.
        group: The ranks that decide together whether a step is made; None for this process alone.
        param_names: Name of each of the optimizer's parameters in the model.
    """

    def __init__(
        self,
        optim: Optimizer,
        *,
        scaler: LossScaler | None = None,
        group: dist.ProcessGroup | None = None,
        param_names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        # The base class is for isinstance() only: everything it would set up is the optimizer's own.
        self.optim = optim
        self.scaler = scaler or LossScaler()
        self.group = group
        self.param_names = dict(param_names or {})
        self.stepped = False
        self._may_step: bool | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: pickle and copy ask before __init__ has run
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def unwrap(self) -> Optimizer:
        """Return the optimizer underneath."""
        return self.optim

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of the scaled loss; `kwargs` go to `Tensor.backward`."""
        self._may_step = None
        (loss if self.scaler.scale == 1.0 else loss * self.scaler.scale).backward(**kwargs)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients down so that their norm over all ranks is at most `max_norm`.

        Args:
            max_norm: The bound, above 0.
            norm_type: The p of the p-norm; infinity for the largest absolute value.

        Returns:
            The norm before clipping; infinity where the step will be skipped for overflow.

        Raises:
            ValueError: `max_norm` is not above 0.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be above 0")
        if not self._prepare():
            return torch.tensor(float("inf"))
        norm = global_grad_norm(self._params(), norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        scale_grads(self._params(), factor)
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Limit every element of the gradients to `[-clip_value, clip_value]`.

        Raises:
            ValueError: `clip_value` is not above 0.
        """
        if not clip_value > 0:
            raise ValueError(f"clip_value is {clip_value}; it must be above 0")
        if self._prepare():
            for grad in local_grads(self._params()):
                grad.clamp_(-clip_value, clip_value)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters, unless a rank found an overflow; `stepped` says which.

        Raises:
            ValueError: A closure is given, but the precision scales the loss.
        """
        if closure is not None and isinstance(self.scaler, DynamicLossScaler):
            raise ValueError(
                "a closure computes gradients that are not scaled: with float16 call backward and step"
            )
        self.stepped = self._prepare()
        result = self.optim.step(closure) if self.stepped else None
        self.scaler.update(stepped=self.stepped)
        self._may_step = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._may_step = None
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer underneath."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer underneath."""
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer underneath."""
        self.optim.add_param_group(param_group)

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.optim.param_groups for param in group["params"]]

    def _prepare(self) -> bool:
        """Unscale the gradients, once between a backward and the step; say whether the step may be made."""
        if self._may_step is None:
            self._may_step = self.scaler.prepare(local_grads(self._params()), self.group)
        return self._may_step
