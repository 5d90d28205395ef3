"""Pipeline schedules: for every rank, the list of its computations in order, as a value without a process.

A stage is a part of the model; stage 0 sees the data, the last one the labels. A rank holds one stage or
several (chunks). Sends and receives are not in the list: they are derived from it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """The computation of a rank for a stage and a microbatch; the letters are those of torch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward: input gradient and weight gradients at once
    INPUT_GRAD = "I"  # only the gradient of the stage's input, for which the stage before waits
    WEIGHT_GRAD = "W"  # only the gradients of the stage's parameters, for which no rank waits

    __hash__ = str.__hash__  # Enum.__hash__ is written in Python: a search for plans looks up millions


class Action(NamedTuple):
    """One computation; written `2F0` for the forward of microbatch 0 on stage 2."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The computations of every rank, in order.

    Attributes:
        name: Name in tables and messages.
        num_microbatches: Number of microbatches of a batch.
        rank_of_stage: For each stage, the pipeline rank that holds it.
        actions: For each pipeline rank, its actions in the order in which it runs them.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, in ascending order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)
