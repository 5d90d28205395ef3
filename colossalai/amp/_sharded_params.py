"""Optimizer parameters (float32 masters, slices), updated instead of a model's: the interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer

STATE_KEY = "master"
"""The name of a master among the states of its parameter, in a checkpoint."""

MASTERS_KEY = "masters"
"""The key of all masters in the result of `state_dict`."""


class BackwardReducer(Protocol):
    """A reducer of gradients during backwards, with hooks at their begin and end."""

    def before_backward(self) -> None:
        """Prepare for a backward; collective."""

    def after_backward(self, *, has_failed: bool = False) -> None:
        """End a backward; collective.

        Args:
            has_failed: Whether the backward has raised; then the rank sends nothing.
        """


class OptimizerParams(ABC):
    """The tensors that an optimizer updates instead of a model's parameters.

    Attributes:
        reducers: Reducers of the gradients of the model's backwards.
    """

    reducers: Sequence[BackwardReducer] = ()

    @property
    @abstractmethod
    def is_paged(self) -> bool:
        """Whether `windows` yields several runs."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of parameters with an optimizer parameter."""

    @abstractmethod
    def param_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the model's parameter of an optimizer parameter; other tensors are returned unchanged."""

    @abstractmethod
    def with_masters(self, param_names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Return the names, with the names of parameters also for their optimizer parameters."""

    def measured(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the tensors that enter norms: the same parameters on all ranks that share them.

        Args:
            params: The optimizer's parameters.
        """
        return list(params)

    @abstractmethod
    def scale_grads(self, factor: float) -> None:
        """Multiply gradients from backwards, before `take_grads`."""

    @abstractmethod
    def put_back_grads(self, factor: float, *, untaken: float | torch.Tensor) -> None:
        """Move taken gradients, times `factor`, back to the place where backwards add to them.

        Args:
            factor: Factor of the taken gradients.
            untaken: Factor of the gradients whose copies the optimizer parameters have lost.
        """

    @abstractmethod
    def take_grads(self) -> None:
        """Give each optimizer parameter the gradient of its parameter."""

    def follow_users(self) -> None:  # noqa: B027 - some have no gradients of their own
        """Clear the gradients of parameters whose `.grad` users have cleared since `take_grads`."""

    @abstractmethod
    def has_grads(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether there are gradients of earlier backwards.

        Args:
            params: The optimizer's parameters.
        """

    def gathered_grads(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients of the model's parameters that have one, after `take_grads`.

        Collective if ranks have slices of them.

        Args:
            params: The optimizer's parameters.
        """
        grads = ((cast(nn.Parameter, self.param_of(param)), param.grad) for param in params)
        return {param: grad for param, grad in grads if grad is not None}

    @abstractmethod
    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the parameters."""

    def windows(self, params: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """Yield runs of the optimizer's parameters that fit into memory together.

        If `is_paged`, operations on all of them, or on their gradients, proceed run by run.

        Args:
            params: The optimizer's parameters, or a part of them.
        """
        yield params

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """Step the optimizer and copy its updates into the parameters; return the result of its step.

        Before that they are updated with values that users have written since the last step.
        """

    @abstractmethod
    def as_states(self, optimizer: Optimizer, *, loads: bool) -> AbstractContextManager[None]:
        """Context in which the optimizer holds the model's parameters, with their states and masters.

        So a checkpoint is saved and loaded under the names of the model. States of only a range of a
        parameter are marked on it (`range_of_states`).

        Args:
            optimizer: The optimizer.
            loads: Whether states can be replaced in the block.
        """

    @abstractmethod
    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, with torch's numbers, and the masters."""

    @abstractmethod
    def load_state_dict(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """Load a result of `state_dict`, with or without masters, into parameters with or without them."""
