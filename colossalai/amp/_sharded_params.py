"""What may stand in an optimizer for the parameters of a model: float32 masters, slices, or nothing else."""

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
"""The key of all masters in what `state_dict` returns."""


class BackwardReducer(Protocol):
    """What averages gradients during backwards, and has to know where each begins and ends."""

    def before_backward(self) -> None:
        """Prepare for a backward; collective."""

    def after_backward(self, *, has_failed: bool = False) -> None:
        """End a backward; collective.

        Args:
            has_failed: Whether the backward has raised; nothing is sent then.
        """


class StandIns(ABC):
    """The tensors that an optimizer updates in the place of a model's parameters.

    Attributes:
        reducers: What averages the gradients of backwards of the model.
    """

    reducers: Sequence[BackwardReducer] = ()

    @property
    @abstractmethod
    def is_paged(self) -> bool:
        """Whether `windows` yields several runs."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many parameters have a stand-in."""

    @abstractmethod
    def param_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the model's parameter of a stand-in, any other tensor itself."""

    @abstractmethod
    def with_masters(self, param_names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Return names in which the stand-ins have the names of their parameters."""

    def measured(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return what norms are taken of: the same parameters on all ranks that share them.

        Args:
            params: What the optimizer holds.
        """
        return list(params)

    @abstractmethod
    def scale_grads(self, factor: float) -> None:
        """Multiply what backwards have left for `take_grads`."""

    @abstractmethod
    def put_back_grads(self, factor: float, *, untaken: float | torch.Tensor) -> None:
        """Put taken gradients, times `factor`, back to where backwards add to them.

        Args:
            factor: What they are multiplied by.
            untaken: What those gradients are multiplied by of which stand-ins have no copies any more.
        """

    @abstractmethod
    def take_grads(self) -> None:
        """Give each stand-in the gradient of its parameter."""

    def follow_users(self) -> None:  # noqa: B027 - some have no gradients of their own
        """Forget the gradients of parameters whose `.grad` users have dropped since `take_grads`."""

    @abstractmethod
    def has_grads(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether gradients of earlier backwards are left.

        Args:
            params: What the optimizer holds.
        """

    def gathered_grads(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients of the model's parameters that have one, after `take_grads`.

        Collective where ranks have slices of them.

        Args:
            params: What the optimizer holds.
        """
        grads = ((cast(nn.Parameter, self.param_of(param)), param.grad) for param in params)
        return {param: grad for param, grad in grads if grad is not None}

    @abstractmethod
    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients of the parameters."""

    def windows(self, params: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """Yield runs of the optimizer's parameters that can be in memory together.

        Where `is_paged`, whatever is done with all of them, or their gradients, is done run by run.

        Args:
            params: What the optimizer holds, or a part of it.
        """
        yield params

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """Step the optimizer and copy what it has updated into the parameters; return what its closure does.

        Before that the stand-ins follow what users have written into parameters since the last step.
        """

    @abstractmethod
    def as_states(self, optimizer: Optimizer, *, loads: bool) -> AbstractContextManager[None]:
        """Within the block the optimizer holds the model's parameters, with their states, masters among them.

        So a checkpoint is written and read under the names of the model. Where the states are of a range of a
        parameter, the parameter says so (`range_of_states`).

        Args:
            optimizer: The optimizer.
            loads: Whether states may be replaced in the block.
        """

    @abstractmethod
    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, as torch numbers it, and with it the masters."""

    @abstractmethod
    def load_state_dict(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """Load what `state_dict` returned, with masters or without, into parameters with or without."""
