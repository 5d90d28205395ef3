"""Zero-bubble schedules: the backward in two halves, of which the second one fills the gaps.

Nobody waits for the weight gradient (W); the stage before waits for the input gradient (I) only. So the order
of forwards and input gradients is chosen first, and weight gradients go where a rank would idle, or would
keep too many microbatches. F, I and W are costs per microbatch of a rank's share of the model, p the number
of ranks, m that of microbatches; live microbatches are those between F and W.

- ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2401.10241): the order of 1F1B, at most p live. The
  bubble is (p-1) (F+I-W) for m >= p and W no longer than F and I; 1F1B has (p-1) (F+I+W).
- ZB-V (section 6 of the same; Qi et al., "Pipeline Parallelism with Controllable Memory", 2405.15362): two
  chunks on a rank, the second half of the model comes back through the ranks. At most p live. With equal
  F, I and W and m >= p the step takes m (F+I+W) + (p-1) F/2, which no schedule with these chunks undercuts:
  the last rank starts (p-1) F/2 late. For m >= 2p-1 no rank idles between its first and its last action.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count

from colossalai.pipeline._alternate import alternate, check_sizes, on_stage
from colossalai.pipeline._dependencies import needed_by
from colossalai.pipeline._schedule import Action, Op, Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B with split backwards, and no more memory.

    Raises:
        ValueError: A number is less than one.
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
        ValueError: A number is less than one.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders = [_v_order(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    actions = _add_weight_grads(orders, num_stages=2 * num_ranks, max_live=2 * num_ranks)
    there = tuple(range(num_ranks))
    return Schedule("zb-v", num_microbatches, there + there[::-1], actions)


def _v_order(num_ranks: int, num_microbatches: int, rank: int) -> tuple[Action, ...]:
    """Return forwards and input gradients of a rank.

    Let every action take one unit. The first microbatch is on the rank at time `rank`, comes back after
    2 (p - rank) - 1 units, and its gradient is there after 2 rank + 1 more. The units until it comes back are
    filled with forwards of its first stage (`down`), those until the gradient by turns with both stages; 2p
    are live then, which is all that is allowed. The first gradients are all of the stage on the way back
    (`up`), and go on with a forward of that stage each; those of `down` come p - rank microbatches later.
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
    """Give the actions of each stage the microbatches in order, from 0."""
    microbatches = {stage: count() for stage in stages}
    return [Action(op, stage, next(microbatches[stage])) for stage in stages]


class _Rank:
    """A rank on its way through its order, with the weight gradients that it has put off."""

    def __init__(self, order: Sequence[Action], max_live: int) -> None:
        self._left = deque(order)
        self._put_off: deque[Action] = deque()
        self._num_live = 0
        self._max_live = max_live
        self.actions: list[Action] = []

    @property
    def has_ended(self) -> bool:
        """Whether all is done."""
        return not self._left and not self._put_off

    def choose(self, done: set[Action], num_stages: int) -> Action | None:
        """Return what to do now: the next action if it can start, else a weight gradient, if there is one."""
        if self._left and done.issuperset(needed_by(self._left[0], num_stages)):
            is_full = self._left[0].op is Op.FORWARD and self._num_live == self._max_live
            if not is_full:
                return self._left[0]
        return self._put_off[0] if self._put_off else None

    def run(self, action: Action) -> None:
        """Record an action that was chosen."""
        (self._put_off if action.op is Op.WEIGHT_GRAD else self._left).popleft()
        if action.op is Op.INPUT_GRAD:
            self._put_off.append(Action(Op.WEIGHT_GRAD, action.stage, action.microbatch))
        self._num_live += (action.op is Op.FORWARD) - (action.op is Op.WEIGHT_GRAD)
        self.actions.append(action)


def _add_weight_grads(
    orders: Sequence[Sequence[Action]], *, num_stages: int, max_live: int
) -> tuple[tuple[Action, ...], ...]:
    """Run all ranks unit by unit, and put weight gradients where there is room or need."""
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
    """Make I and W of stage 0 one whole backward where they follow each other.

    It takes as long, nobody waits for its input gradient, and a backward in one piece is cheaper to run.
    """
    joined: list[Action] = []
    for action in actions:
        half = Action(Op.INPUT_GRAD, action.stage, action.microbatch)
        if action.op is Op.WEIGHT_GRAD and action.stage == 0 and joined[-1] == half:
            joined[-1] = Action(Op.BACKWARD, action.stage, action.microbatch)
        else:
            joined.append(action)
    return tuple(joined)
