"""Simulation of a schedule: start and end of each action, step time, bubble, memory, messages.

A rank starts an action when the one before has ended and everything that it needs has arrived; a message
takes `p2p` from the end of the action that makes it, and overlaps with computation. With equal stages
and p2p = 0, p ranks, m microbatches, v chunks, and the costs F, I, W of a rank's share of the model per
microbatch (B = I + W), the bubbles are those of the papers:

- GPipe (1811.06965) and 1F1B (2006.09503): (p-1) (F+B) of time, (p-1)/m of the ideal time;
- interleaved 1F1B (2104.04473), m a multiple of p: (p-1)/(v m) of the ideal time;
- ZB-H1 (2401.10241), m >= p and W no longer than F and I: (p-1) (F+I-W) of time;
- ZB-V (2405.15362), m >= p and F = I = W: (p-1) F/2 of time, and none of it inside a rank for m >= 2p-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from colossalai.pipeline.schedules._action import Action, Op, Schedule
from colossalai.pipeline.schedules._messages import messages_between
from colossalai.pipeline.schedules._validate import validate


@dataclass(frozen=True)
class Costs:
    """Costs of actions and messages, in any unit of time; one number for all stages, or one for each.

    Attributes:
        forward: The forward of a microbatch on a stage.
        backward: The whole backward of a microbatch on a stage.
        p2p: A message from one rank to another.
        weight_grad: The part of `backward` that computes the weight gradients; None: half of it.
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


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of an action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Attributes:
        schedule: The schedule.
        spans: For each rank, its actions in order with their times.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_time(self) -> float:
        """Time from the first start to the end of the last rank."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def busy_times(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over computing time, both summed over the ranks: the papers' (p-1)/m.

        With equal stages it is (step time - ideal time) / ideal time. It can exceed one.
        """
        busy = sum(self.busy_times)
        return (len(self.spans) * self.step_time - busy) / busy if busy else 0.0

    @property
    def idle_fraction(self) -> float:
        """Idle time over all time: bubble_fraction / (1 + bubble_fraction)."""
        return self.bubble_fraction / (1 + self.bubble_fraction)

    @property
    def stall_times(self) -> tuple[float, ...]:
        """Idle time of each rank between its own first start and last end.

        This part of the bubble remains if a rank begins its next step without waiting for the others, as in
        the zero-bubble paper.
        """
        return tuple(
            max(0.0, spans[-1].end - spans[0].start - busy)
            for spans, busy in zip(self.spans, self.busy_times, strict=True)
        )

    @property
    def peak_live_microbatches(self) -> tuple[float, ...]:
        """For each rank, the largest number of microbatches whose activations it keeps at once.

        See `peak_live_microbatches`.
        """
        return peak_live_microbatches(self.schedule)

    @property
    def num_messages(self) -> tuple[int, ...]:
        """For each rank, the number of messages that it sends."""
        counts = [0] * self.schedule.num_ranks
        for (source, _), messages in messages_between(self.schedule).items():
            counts[source] += len(messages)
        return tuple(counts)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a schedule in simulated time.

    Raises:
        ScheduleError: The schedule cannot be run.
        ValueError: `costs` are not one for each stage, or one is negative.
    """
    return Replay(schedule).run(costs)


class Replay:
    """A schedule that is simulated with many costs; the order of its actions is computed once.

    Args:
        schedule: The schedule.

    Raises:
        ScheduleError: `schedule` cannot be run.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self._steps = schedule, validate(schedule)

    def run(self, costs: Costs) -> Timeline:
        """Return the times of each action.

        Raises:
            ValueError: `costs` are not one for each stage, or one is negative.
        """
        spans: list[list[Span]] = [[] for _ in self.schedule.actions]
        for step, (start, end) in zip(self._steps, self._times(costs), strict=True):
            spans[step.rank].append(Span(step.action, start, end))
        return Timeline(self.schedule, tuple(tuple(own) for own in spans))

    def step_time(self, costs: Costs) -> float:
        """Return the end of the last action.

        Raises:
            ValueError: `costs` are not one for each stage, or one is negative.
        """
        return max(end for _, end in self._times(costs))

    def _times(self, costs: Costs) -> list[tuple[float, float]]:
        """Return start and end of each action."""
        costs.check(self.schedule.num_stages)
        cost_of = {
            (op, stage): costs.of(Action(op, stage, 0))
            for op in Op
            for stage in range(self.schedule.num_stages)
        }
        free_at = [0.0] * len(self.schedule.actions)
        times: list[tuple[float, float]] = []
        for rank, action, needs in self._steps:
            start = free_at[rank]
            for need in needs:
                there = times[need][1] + (0.0 if self._steps[need].rank == rank else costs.p2p)
                if there > start:
                    start = there
            free_at[rank] = start + cost_of[action.op, action.stage]
            times.append((start, free_at[rank]))
        return times


def peak_live_microbatches(schedule: Schedule) -> tuple[float, ...]:
    """Return for each rank the largest number of microbatches whose activations it keeps at once.

    A microbatch lives on a stage from its forward to the end of its backward; of a split backward, to the end
    of the weight gradient (an upper bound: the input gradient frees some activations). The unit is a
    microbatch on all stages of a rank: of v chunks, one counts 1/v. Without backwards, nothing is kept.
    """
    return tuple(
        _peak(actions, len(schedule.stages_of(rank))) for rank, actions in enumerate(schedule.actions)
    )


def _peak(actions: Sequence[Action], num_chunks: int) -> float:
    if all(action.op is Op.FORWARD for action in actions):
        return 0.0
    live = peak = 0
    for action in actions:
        live += (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.WEIGHT_GRAD))
        peak = max(peak, live)
    return peak / num_chunks
