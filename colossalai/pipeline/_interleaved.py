"""Interleaved 1F1B: several chunks of the model on each rank, and a bubble that is shorter by their number.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2104.04473. Chunk c of rank r is stage c p + r. With p ranks, m >= p microbatches and v chunks the bubble is
(p-1)/(v m) of the ideal time, and rank 0 keeps at most p (1 + (p-1)/(p v)) microbatches where p divides m.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from colossalai.pipeline._alternate import alternate, check_sizes, on_stage
from colossalai.pipeline._schedule import Action, Op, Schedule


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return the interleaved 1F1B schedule; with one chunk it is 1F1B.

    The microbatches go through the chunks in groups: a whole group through one chunk, then through the next.
    A group has at least as many microbatches as there are ranks, so that its first one has reached the last
    rank when its last one leaves the first. Where the number of microbatches is a multiple of that of ranks,
    every group has one for each rank (the published schedule); where not, groups are as even as they can be,
    the larger ones first, and the bubble is still the published one.

    Raises:
        ValueError: A number is less than one.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    groups = _groups(num_ranks, num_microbatches)
    actions = []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(num_chunks)]
        num_first = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * len(groups[0])
        if num_chunks == 1:
            num_first = num_ranks - rank - 1  # twice as many serve the chunks behind, of which there are none
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
