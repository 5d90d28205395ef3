"""Step plan: the parameters that an optimizer updates, lowered into flat lists over which steps loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp._sharded_params import OptimizerParams
from colossalai.tensor import NormGroup, memory_scope, norm_groups

UNKNOWN_PLACE = 2**39
"""The place of a parameter that the model does not have."""


def params_of(optim: Optimizer) -> list[nn.Parameter]:
    """Return the tensors that an optimizer updates, in the order of its groups."""
    return [param for group in optim.param_groups for param in group["params"]]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The parameters of an optimizer as a step uses them, computed once.

    A plan is made anew when the parameters in the groups of the optimizer change.

    Attributes:
        params: The tensors that the optimizer updates, in the order of its groups.
        ids: Their ids.
        model_params: For each of them the parameter of the model; itself, without an optimizer parameter.
        places: For each of them the place of its parameter in the model.
        measured: The tensors of which norms are taken, the same on all ranks of a pipeline stage.
        scope: The context in which ColoTensors among them are this rank's memory.
    """

    params: tuple[nn.Parameter, ...]
    ids: list[int]
    model_params: tuple[torch.Tensor, ...]
    places: tuple[int, ...]
    measured: tuple[torch.Tensor, ...]
    scope: Callable[[], AbstractContextManager[None]]

    @staticmethod
    def lower(
        params: Sequence[nn.Parameter],
        optimizer_params: OptimizerParams,
        places: Mapping[nn.Parameter, int],
        counts: Callable[[torch.Tensor], bool] | None,
    ) -> "StepPlan":
        """Return the plan of some parameters.

        Args:
            params: The tensors that an optimizer updates.
            optimizer_params: The optimizer parameters among them.
            places: Place of each parameter in the model.
            counts: See `OptimizerWrapper`.
        """
        model_params = tuple(optimizer_params.param_of(param) for param in params)
        measured = optimizer_params.measured(params)
        if counts is not None:
            measured = [param for param in measured if counts(optimizer_params.param_of(param))]
        return StepPlan(
            params=tuple(params),
            ids=[*map(id, params)],
            model_params=model_params,
            places=tuple(places.get(param, UNKNOWN_PLACE) for param in model_params),  # type: ignore[call-overload]
            measured=tuple(measured),
            scope=memory_scope((*params, *model_params)),
        )

    @cached_property
    def norm_groups(self) -> tuple[NormGroup, ...]:
        """The measured tensors by the ranks over which they are sharded; computed at the first norm."""
        return norm_groups(self.measured)
