"""Checkpointing by the square root (Chen et al., "Training deep nets with sublinear memory cost").

The paper is 1604.06174. A chain is cut into segments that would save about equal bytes, and each is
recomputed as a whole. With about sqrt(n) segments of sqrt(n) blocks, both the memory between segments and the
memory of one recomputed segment are O(sqrt(n)). The last segment keeps all: its backward follows its forward
directly.
"""

import math
from itertools import pairwise

import numpy as np

from colossalai.auto_parallel.checkpoint._chain import Chain, simulate
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.runtime import RecomputeSegment


def solve_chen(
    chain: Chain, budget_bytes: int | None = None, *, num_segments: int | None = None
) -> tuple[RecomputeSegment, ...]:
    """Return segments of about equal bytes; the last segment keeps all and is not returned.

    Args:
        chain: The chain.
        budget_bytes: Limit of live bytes: of the numbers of segments within it, the fastest is used. None: no
            limit.
        num_segments: Number of segments, including the last one, instead of a budget. Blocks of very uneven
            sizes result in fewer, if one has the bytes of several segments. None: chosen by `budget_bytes`,
            and without a budget about the square root of the number of blocks.

    Raises:
        BudgetError: No number of segments fits; the error has the least budget for which one does.
        ValueError: `num_segments` is below 1 or above the number of blocks, or given with `budget_bytes`.
    """
    num_blocks = len(chain.blocks)
    if num_segments is not None:
        if budget_bytes is not None:
            raise ValueError("num_segments and budget_bytes both limit the saved bytes: give one of them")
        if not 1 <= num_segments <= num_blocks:
            raise ValueError(
                f"num_segments={num_segments}: a chain of {num_blocks} blocks has 1 to {num_blocks} segments"
            )
        return _segments(chain, num_segments)
    if budget_bytes is None:
        return _segments(chain, round(math.sqrt(num_blocks)))
    candidates = [_segments(chain, num_segments) for num_segments in range(1, num_blocks + 1)]
    costs = [simulate(chain, segments) for segments in candidates]
    fitting = [number for number, cost in enumerate(costs) if cost.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(cost.peak_bytes for cost in costs)
        raise BudgetError(
            f"a budget of {budget_bytes:,} bytes is below the need of the blocks {chain.names[0]!r} to "
            f"{chain.names[-1]!r} in any number of segments of equal bytes: give at least {least:,} "
            "bytes, or let rotor choose the segments",
            least,
        )
    return candidates[min(fitting, key=lambda number: costs[number].seconds)]


def _segments(chain: Chain, num_segments: int) -> tuple[RecomputeSegment, ...]:
    """Cut a chain where the cumulative bytes kept by its blocks are closest to equal parts."""
    reached = np.cumsum([block.output_bytes + block.saved_bytes for block in chain.blocks])
    shares = reached[-1] * np.arange(1, num_segments) / num_segments
    ends = {1 + int(np.abs(reached - share).argmin()) for share in shares} - {len(chain.blocks)}
    bounds = [0, *sorted(ends)]
    return tuple(RecomputeSegment(*pair) for pair in pairwise(bounds))
