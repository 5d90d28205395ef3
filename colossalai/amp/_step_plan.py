"""Step plan: the parameters that an optimizer updates, lowered into flat lists over which steps loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from colossalai.amp._sharded_params import StandIns
from colossalai.tensor import NormGroup, norm_groups

UNKNOWN_PLACE = 2**39
"""The place of a parameter that the model does not have."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What a step knows of the parameters of an optimizer, read off them once.

    A plan is made for the parameters in the groups of an optimizer, and made again when these are others.

    Attributes:
        params: The tensors that the optimizer updates, in the order of its groups.
        model_params: For each of them the parameter of the model: itself, without a stand-in.
        places: For each of them the place of its parameter in the model.
        norm_groups: The tensors of which norms are taken.
    """

    params: tuple[nn.Parameter, ...]
    model_params: tuple[torch.Tensor, ...]
    places: tuple[int, ...]
    norm_groups: tuple[NormGroup, ...]

    @staticmethod
    def lower(
        params: Sequence[nn.Parameter],
        stand_ins: StandIns,
        places: Mapping[nn.Parameter, int],
        counts: Callable[[torch.Tensor], bool] | None,
    ) -> "StepPlan":
        """Return the plan of some parameters.

        Args:
            params: The tensors that an optimizer updates.
            stand_ins: Those among them that stand in for parameters of the model.
            places: Place of each parameter in the model.
            counts: See `OptimizerWrapper`.
        """
        model_params = tuple(stand_ins.param_of(param) for param in params)
        measured = stand_ins.measured(params)
        if counts is not None:
            measured = [param for param in measured if counts(stand_ins.param_of(param))]
        return StepPlan(
            params=tuple(params),
            model_params=model_params,
            places=tuple(places.get(param, UNKNOWN_PLACE) for param in model_params),  # type: ignore[call-overload]
            norm_groups=norm_groups(measured),
        )
