"""Generators of the named schedules: GPipe, 1F1B, interleaved, ZB-H1 and ZB-V.

With p ranks and m microbatches, GPipe (Huang et al., 1811.06965) and 1F1B (Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2006.09503) idle for the same (p-1)/m of
the ideal time; rank i keeps m microbatches under GPipe and at most p - i under 1F1B.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, pairwise
from types import MappingProxyType

from colossalai.pipeline.schedules._action import Action, Op, Schedule
from colossalai.pipeline.schedules._validate import needed_by


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_first: int) -> tuple[Action, ...]:
    """Return the actions of a rank: `num_first` forwards, then by turns, then the remaining backwards."""
    num_first = min(num_first, len(forwards))
    actions = list(forwards[:num_first])
    for forward, backward in zip(forwards[num_first:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - num_first :])


def on_stage(op: Op, stage: int, microbatches: Iterable[int]) -> list[Action]:
    """Return an action for each microbatch."""
    return [Action(op, stage, microbatch) for microbatch in microbatches]


def check_sizes(**sizes: int) -> None:
    """Check that sizes are at least one.

    Raises:
        ValueError: A size is below 1.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return the interleaved 1F1B schedule; with one chunk it is 1F1B.

    The microbatches go through the chunks in groups: a whole group through one chunk, then through the next.
    A group has at least as many microbatches as there are ranks, so that its first one has reached the last
    rank when its last one leaves the first. If the number of ranks divides the number of microbatches, every
    group has one for each rank (the published schedule); otherwise groups are as even as possible, the larger
    ones first, and the bubble is still the published one.

    Raises:
        ValueError: `num_ranks`, `num_microbatches` or `num_chunks` is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    groups = _groups(num_ranks, num_microbatches)
    actions = []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(num_chunks)]
        num_first = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * len(groups[0])
        if num_chunks == 1:
            num_first = num_ranks - rank - 1  # twice as many would serve the later chunks, and there are none
        forwards = _through(groups, Op.FORWARD, stages)
        actions.append(alternate(forwards, _through(groups, Op.BACKWARD, stages[::-1]), num_first))
    return Schedule("interleaved", num_microbatches, tuple(range(num_ranks)) * num_chunks, tuple(actions))


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Cut the microbatches into groups of at least `num_ranks` (one smaller group if there are fewer)."""
    num_groups = max(1, num_microbatches // num_ranks)
    size, num_larger = divmod(num_microbatches, num_groups)
    starts = [number * size + min(number, num_larger) for number in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _through(groups: Iterable[range], op: Op, stages: Sequence[int]) -> list[Action]:
    return [action for group in groups for stage in stages for action in on_stage(op, stage, group)]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B with split backwards, within the memory of 1F1B.

    Raises:
        ValueError: `num_ranks` or `num_microbatches` is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    orders = [
        alternate(
            on_stage(Op.FORWARD, rank, microbatches),
            on_stage(Op.INPUT_GRAD, rank, microbatches),
            num_ranks - rank - 1,
        )
        for rank in range(num_ranks)
    ]
    actions = _add_weight_grads(orders, num_stages=num_ranks, max_live=num_ranks)
    return Schedule("zb-h1", num_microbatches, tuple(range(num_ranks)), actions)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-V schedule: stages 0 to p-1 on ranks 0 to p-1, stages p to 2p-1 on ranks p-1 to 0.

    Raises:
        ValueError: `num_ranks` or `num_microbatches` is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders = [_v_order(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    actions = _add_weight_grads(orders, num_stages=2 * num_ranks, max_live=2 * num_ranks)
    there = tuple(range(num_ranks))
    return Schedule("zb-v", num_microbatches, there + there[::-1], actions)


def _v_order(num_ranks: int, num_microbatches: int, rank: int) -> tuple[Action, ...]:
    """Return forwards and input gradients of a rank.

    Every action takes one unit. The first microbatch reaches the rank at time `rank`, comes back after
    2 (p - rank) - 1 units, and its gradient arrives after 2 rank + 1 more. The units until it comes back are
    filled with forwards of the rank's first stage (`down`), the units until the gradient with both stages by
    turns; then 2p are live, the limit. The first gradients all belong to the returning stage (`up`),
    each followed by a forward of that stage; the gradients of `down` follow p - rank microbatches later.
    From then on, both stages take turns.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    gap = num_ranks - rank
    first = [down] * (2 * gap - 1) + [up, down] * rank
    backwards = [up] * gap + [down, up] * num_microbatches
    forwards = [*first, *[up] * gap, *[down, up] * num_microbatches]
    order = alternate(_numbered(Op.FORWARD, forwards), _numbered(Op.INPUT_GRAD, backwards), len(first))
    return tuple(action for action in order if action.microbatch < num_microbatches)


def _numbered(op: Op, stages: Sequence[int]) -> list[Action]:
    """Return actions that number the microbatches of each stage from 0."""
    microbatches = {stage: count() for stage in stages}
    return [Action(op, stage, next(microbatches[stage])) for stage in stages]


class _Rank:
    """A rank in a simulation of its order, with its deferred weight gradients."""

    def __init__(self, order: Sequence[Action], max_live: int) -> None:
        self._left = deque(order)
        self._put_off: deque[Action] = deque()
        self._num_live = 0
        self._max_live = max_live
        self.actions: list[Action] = []

    @property
    def has_ended(self) -> bool:
        """Whether all actions have run."""
        return not self._left and not self._put_off

    def choose(self, done: set[Action], num_stages: int) -> Action | None:
        """Return the next action if it can start, else a deferred weight gradient, else None."""
        if self._left and done.issuperset(needed_by(self._left[0], num_stages)):
            is_full = self._left[0].op is Op.FORWARD and self._num_live == self._max_live
            if not is_full:
                return self._left[0]
        return self._put_off[0] if self._put_off else None

    def run(self, action: Action) -> None:
        """Record a chosen action."""
        (self._put_off if action.op is Op.WEIGHT_GRAD else self._left).popleft()
        if action.op is Op.INPUT_GRAD:
            self._put_off.append(Action(Op.WEIGHT_GRAD, action.stage, action.microbatch))
        self._num_live += (action.op is Op.FORWARD) - (action.op is Op.WEIGHT_GRAD)
        self.actions.append(action)


def _add_weight_grads(
    orders: Sequence[Sequence[Action]], *, num_stages: int, max_live: int
) -> tuple[tuple[Action, ...], ...]:
    """Run all ranks unit by unit, and insert weight gradients into idle units or where memory is full."""
    ranks = [_Rank(order, max_live) for order in orders]
    done: set[Action] = set()
    while not all(rank.has_ended for rank in ranks):
        chosen = [rank.choose(done, num_stages) for rank in ranks]
        assert any(chosen), "the order of forwards and input gradients deadlocks within max_live"
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.run(action)
                done.add(action)
    return tuple(_join_on_first_stage(rank.actions) for rank in ranks)


def _join_on_first_stage(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Merge adjacent I and W of stage 0 into one whole backward.

    It takes as long, no rank waits for its input gradient, and a whole backward is cheaper to run.
    """
    joined: list[Action] = []
    for action in actions:
        half = Action(Op.INPUT_GRAD, action.stage, action.microbatch)
        if action.op is Op.WEIGHT_GRAD and action.stage == 0 and joined[-1] == half:
            joined[-1] = Action(Op.BACKWARD, action.stage, action.microbatch)
        else:
            joined.append(action)
    return tuple(joined)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards.

    Raises:
        ValueError: `num_ranks` or `num_microbatches` is below 1.
    """
    return _plain("gpipe", num_ranks, num_microbatches, lambda rank: num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule: a backward as soon as possible, then a forward and a backward by turns.

    Raises:
        ValueError: `num_ranks` or `num_microbatches` is below 1.
    """
    return _plain("1f1b", num_ranks, num_microbatches, lambda rank: num_ranks - rank - 1)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1, "zb-v": zb_v}
)

_CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": None, "zb-h1": 1, "zb-v": 2}  # None: any number
_DEFAULT_CHUNKS = 2


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Return a schedule by its name, one of `SCHEDULES`.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-v".
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of microbatches of a batch.
        num_chunks: Number of stages on a rank; None: the schedule's own number, two for "interleaved".

    Raises:
        ValueError: `name` is unknown, the schedule has another number of chunks, or a number is below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    own_chunks = _CHUNKS[name]
    if own_chunks is None:
        num_chunks = _DEFAULT_CHUNKS if num_chunks is None else num_chunks
        return interleaved(num_ranks, num_microbatches, num_chunks)
    if num_chunks not in (None, own_chunks):
        raise ValueError(
            f"schedule {name!r} has {own_chunks} chunk{'s' * (own_chunks > 1)} on a rank, not {num_chunks}: "
            f"give num_chunks={own_chunks} or none, or choose 'interleaved', which has any number"
        )
    return SCHEDULES[name](num_ranks, num_microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule in their order, for evaluation.

    Forwards alone have fewer dependencies, so a schedule without deadlock stays without one.
    """
    actions = tuple(
        tuple(action for action in actions if action.op is Op.FORWARD) for actions in schedule.actions
    )
    return Schedule(schedule.name, schedule.num_microbatches, schedule.rank_of_stage, actions)


def _plain(name: str, num_ranks: int, num_microbatches: int, num_first: Callable[[int], int]) -> Schedule:
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    actions = tuple(
        alternate(
            on_stage(Op.FORWARD, rank, microbatches),
            on_stage(Op.BACKWARD, rank, microbatches),
            num_first(rank),
        )
        for rank in range(num_ranks)
    )
    return Schedule(name, num_microbatches, tuple(range(num_ranks)), actions)
