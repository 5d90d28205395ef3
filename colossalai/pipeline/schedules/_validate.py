"""Validation of a schedule before any process starts: each action once, on its rank, without deadlock.

The ranks run against each other without computing: each proceeds through its list to the first action with a
missing dependency. Receivers keep early messages, so only a cycle of dependencies stops all of them.
"""

from collections import Counter
from collections.abc import Container, Iterable
from typing import NamedTuple

from colossalai.pipeline.schedules._action import Action, Op, Schedule


def completed_by(action: Action) -> tuple[Action, ...]:
    """Return the actions that an action completes: itself, or the two halves of a whole backward."""
    if action.op is Op.BACKWARD:
        return (
            Action(Op.INPUT_GRAD, action.stage, action.microbatch),
            Action(Op.WEIGHT_GRAD, action.stage, action.microbatch),
        )
    return (action,)


def needed_by(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the dependencies of an action, in the terms of `completed_by`.

    A forward needs the stage before; an input gradient, alone or in a whole backward, its own forward and the
    gradient from the next stage; a weight gradient its own input gradient, which keeps its inputs.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return (Action(Op.FORWARD, stage - 1, microbatch),) if stage > 0 else ()
    if action.op is Op.WEIGHT_GRAD:
        return (Action(Op.INPUT_GRAD, stage, microbatch),)
    own = Action(Op.FORWARD, stage, microbatch)
    if stage + 1 == num_stages:
        return (own,)
    return own, Action(Op.INPUT_GRAD, stage + 1, microbatch)


class ScheduleError(ValueError):
    """A schedule that no executor could run."""


class OrderedAction(NamedTuple):
    """An action in an order in which its dependencies precede it.

    Attributes:
        rank: The rank that runs it.
        action: The action.
        needs: Positions in the order of the actions that complete its dependencies.
    """

    rank: int
    action: Action
    needs: tuple[int, ...]


def validate(schedule: Schedule) -> list[OrderedAction]:
    """Check that a schedule computes every microbatch on every stage once, and ends.

    A schedule without backwards is for evaluation, and can be valid.

    Returns:
        All actions in an order in which a single process could run them.

    Raises:
        ScheduleError: `schedule` has an action that is missing, doubled, unknown, on the wrong rank or before
            a dependency, or ranks that wait for each other; the message names it.
    """
    _check_placement(schedule)
    for rank in range(schedule.num_ranks):
        _check_stages(schedule, rank)
    _check_complete(schedule)
    return _run_all(schedule)


def _check_placement(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(
            f"{_name(schedule)} has {schedule.num_microbatches} microbatches; it needs at least 1"
        )
    holders = set(schedule.rank_of_stage)
    for rank in sorted(holders - set(range(schedule.num_ranks))):
        stage = schedule.rank_of_stage.index(rank)
        raise ScheduleError(
            f"{_name(schedule)} places stage {stage} on rank {rank}, but has actions for ranks 0 to "
            f"{schedule.num_ranks - 1}"
        )
    for rank in range(schedule.num_ranks):
        if rank not in holders:
            raise ScheduleError(
                f"{_name(schedule)} has no stage on rank {rank}: use fewer ranks or more stages"
            )


def _check_stages(schedule: Schedule, rank: int) -> None:
    """Check that a rank's actions exist and belong to it."""
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    own = set(schedule.stages_of(rank))
    for position, action in enumerate(schedule.actions[rank]):
        if action.stage in own and 0 <= action.microbatch < num_microbatches:
            continue
        where = f"{_name(schedule)}: {action} (rank {rank}, position {position})"
        if not 0 <= action.stage < num_stages:
            raise ScheduleError(f"{where} names a stage that is not one of 0 to {num_stages - 1}")
        if not 0 <= action.microbatch < num_microbatches:
            raise ScheduleError(f"{where} names a microbatch that is not one of 0 to {num_microbatches - 1}")
        holder = schedule.rank_of_stage[action.stage]
        raise ScheduleError(f"{where} is on the wrong rank: stage {action.stage} is on rank {holder}")


def _check_complete(schedule: Schedule) -> None:
    """Check that every action is there once, and the backward whole or in two halves but not both."""
    counts = Counter(action for actions in schedule.actions for action in actions)
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{_name(schedule)}: {action} is there {count} times, not once")
    has_backward = any(action.op is not Op.FORWARD for action in counts)
    ops: dict[tuple[int, int], set[Op]] = {}
    for op, stage, microbatch in counts:
        ops.setdefault((stage, microbatch), set()).add(op)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            problem = _find_problem(ops.get((stage, microbatch), set()), has_backward)
            if problem:
                rank = schedule.rank_of_stage[stage]
                raise ScheduleError(
                    f"{_name(schedule)}: {problem} for stage {stage}, microbatch {microbatch} (rank {rank})"
                )


def _find_problem(there: set[Op], has_backward: bool) -> str | None:
    if Op.FORWARD not in there:
        return "the forward (F) is missing"
    if not has_backward:
        return None
    halves = there & {Op.INPUT_GRAD, Op.WEIGHT_GRAD}
    if Op.BACKWARD in there:
        return (
            f"the backward is there whole (B) and in parts ({', '.join(sorted(halves))})" if halves else None
        )
    if not halves:
        return "the backward (B, or I and W) is missing"
    if Op.INPUT_GRAD not in halves:
        return "the input gradient (I) of a weight gradient (W) is missing"
    if Op.WEIGHT_GRAD not in halves:
        return "the weight gradient (W) of an input gradient (I) is missing"
    return None


def _check_order(schedule: Schedule, rank: int) -> None:
    """Check that no action precedes a dependency on the same rank."""
    places = {
        done: position
        for position, action in enumerate(schedule.actions[rank])
        for done in completed_by(action)
    }
    for position, action in enumerate(schedule.actions[rank]):
        for need in needed_by(action, schedule.num_stages):
            if places.get(need, -1) > position:
                later = schedule.actions[rank][places[need]]
                raise ScheduleError(
                    f"{_name(schedule)}: {action} comes before {later} on rank {rank} (positions "
                    f"{position} and {places[need]}), but needs it"
                )


def _run_all(schedule: Schedule) -> list[OrderedAction]:
    """Run the ranks as far as possible; raise an error that names the waiting ranks if some do not end."""
    steps: list[OrderedAction] = []
    done: dict[Action, int] = {}  # position in `steps` of the completing action
    heads = [0] * schedule.num_ranks
    needs_of: dict[Action, tuple[Action, ...]] = {}  # cached for ranks that wait
    num_before = -1
    while len(steps) > num_before:
        num_before = len(steps)
        for rank, actions in enumerate(schedule.actions):
            while heads[rank] < len(actions):
                action = actions[heads[rank]]
                if (needs := needs_of.get(action)) is None:
                    needs = needs_of[action] = needed_by(action, schedule.num_stages)
                if not all(need in done for need in needs):
                    break
                done.update(dict.fromkeys(completed_by(action), len(steps)))
                steps.append(OrderedAction(rank, action, tuple(done[need] for need in needs)))
                heads[rank] += 1
    waiting = {rank: head for rank, head in enumerate(heads) if head < len(schedule.actions[rank])}
    if waiting:
        for rank in range(schedule.num_ranks):
            _check_order(schedule, rank)  # a rank that waits for itself has a simpler message than a cycle
        raise ScheduleError(f"{_name(schedule)} deadlocks: {_describe_cycle(schedule, waiting, done)}")
    return steps


def _describe_cycle(schedule: Schedule, waiting: dict[int, int], done: Container[Action]) -> str:
    """Follow the waiting ranks until one repeats; the ranks from there on wait for each other."""
    path: list[int] = []
    sentences: dict[int, str] = {}
    rank = min(waiting)
    while rank not in sentences:
        action = schedule.actions[rank][waiting[rank]]
        need = _first(need for need in needed_by(action, schedule.num_stages) if need not in done)
        holder = schedule.rank_of_stage[need.stage]
        place = next(
            place for place, other in enumerate(schedule.actions[holder]) if need in completed_by(other)
        )
        sentences[rank] = (
            f"rank {rank} waits at position {waiting[rank]} ({action}) for "
            f"{schedule.actions[holder][place]}, which is at position {place} of rank {holder}"
        )
        path.append(rank)
        rank = holder
    return "; ".join(sentences[member] for member in path[path.index(rank) :])


def _first(needs: Iterable[Action]) -> Action:
    return next(iter(needs))


def _name(schedule: Schedule) -> str:
    return f"schedule {schedule.name!r}"
