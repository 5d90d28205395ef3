"""What the actions of a schedule take, as the simulator is told."""

from collections.abc import Sequence
from dataclasses import dataclass

from colossalai.pipeline._schedule import Action, Op


@dataclass(frozen=True)
class Costs:
    """What actions and messages take, in any unit of time; one number for all stages, or one for each.

    Attributes:
        forward: The forward of a microbatch on a stage.
        backward: The whole backward of a microbatch on a stage.
        p2p: A message from one rank to another.
        weight_grad: The part of `backward` that computes the weight gradients; None: a half of it.
    """

    forward: float | Sequence[float]
    backward: float | Sequence[float]
    p2p: float = 0.0
    weight_grad: float | Sequence[float] | None = None

    def of(self, action: Action) -> float:
        """Return the cost of an action."""
        if action.op is Op.FORWARD:
            return _at(self.forward, action.stage)
        backward = _at(self.backward, action.stage)
        if action.op is Op.BACKWARD:
            return backward
        weight_grad = backward / 2 if self.weight_grad is None else _at(self.weight_grad, action.stage)
        return weight_grad if action.op is Op.WEIGHT_GRAD else backward - weight_grad

    def check(self, num_stages: int) -> None:
        """Check that the costs fit a number of stages.

        Raises:
            ValueError: A list has another length, or a cost is negative.
        """
        for name in ("forward", "backward", "weight_grad"):
            cost = getattr(self, name)
            if isinstance(cost, Sequence) and len(cost) != num_stages:
                raise ValueError(
                    f"{name} has {len(cost)} costs, but there are {num_stages} stages: give one for each"
                )
        if self.p2p < 0:
            raise ValueError(f"p2p is {self.p2p}; a message cannot take less than no time")
        for stage in range(num_stages):
            for op in Op:
                if (cost := self.of(Action(op, stage, 0))) < 0:
                    raise ValueError(
                        f"{op.name.lower()} takes {cost} on stage {stage}: costs cannot be negative, and "
                        "weight_grad is a part of backward"
                    )


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost
