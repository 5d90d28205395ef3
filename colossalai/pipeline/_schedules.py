"""The schedules by name, and the two plain ones.

With p ranks and m microbatches, GPipe (Huang et al., 1811.06965) and 1F1B (Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2006.09503) idle for the same (p-1)/m of
the ideal time; rank i keeps m microbatches under GPipe and at most p - i under 1F1B.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from colossalai.pipeline._alternate import alternate, check_sizes, on_stage
from colossalai.pipeline._interleaved import interleaved
from colossalai.pipeline._schedule import Op, Schedule
from colossalai.pipeline._zero_bubble import zb_h1, zb_v


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards.

    Raises:
        ValueError: A number is less than one.
    """
    return _plain("gpipe", num_ranks, num_microbatches, lambda rank: num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule: a backward as soon as there is one, then a forward and a backward by turns.

    Raises:
        ValueError: A number is less than one.
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
        num_chunks: Number of stages on a rank; None: what the schedule has, and two for "interleaved".

    Raises:
        ValueError: There is no such schedule, it has another number of chunks, or a number is less than one.
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

    Without backwards there is less to wait for: a schedule that ends still ends.
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
