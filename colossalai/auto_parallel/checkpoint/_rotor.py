r"""Optimal checkpointing of a chain of blocks by dynamic programming ("rotor", hal-02352969, 1911.13214).

Let T(s, t, m) be the least seconds for forward and backward of the blocks s to t - 1 in m bytes, which do not
include the input of block s. Either block s keeps all, or the blocks s to q - 1 are run keeping only the
input of s, the rest is run forward and backward, and then these blocks are, from that input:

    T(s, t, m) = min( F_s + T(s + 1, t, m - out_s - saved_s) + B_s,
                      min over q of F_s + ... + F_(q-1) + T(q, t, m - in_q)
                                    + T(s, q, m - g_q - ... - g_(t-1)) ).

While the range runs backward, the gradients g of the parameters of its blocks appear, the last one first:
those of the blocks from q on are live when the blocks before q are recomputed. The gradients of blocks from t
on are live all the time and, like the input, are not part of m: so equal ranges have equal tables, anywhere
in the chain.

A run is forbidden if one of its events does not fit into m (see [Note: live bytes of a chain]). The second
form is a segment, and the choices of T(s, q, m) are its inner segments. A segment never ends a range: running
the last blocks without keeping anything, and then again immediately, frees nothing. The result is the optimum
of `simulate` over all nested segments, among schedules that keep an input until the backward of its block
("persistent" ones; for a chain of heterogeneous blocks others may be better, and torch runs none of them).

[Note: slots]
Bytes are counted in slots, and every kept size and every event is rounded up. So the result for a number of
slots takes at most their bytes, and often fewer: 5.1 slots of a block count as 6. Hence answers
for up to a quarter more slots than the budget are considered, the fastest first, until the exact bytes of one
are within the budget.

A larger budget never results in a longer time. Therefore the size of a slot does not follow from the budget,
which would then affect the rounding, but from the octave of the budget: `slots` slots cover the peak without
any segment, or a half of it, a quarter, and so on. Finer slots can find answers that coarse ones miss, so the
octaves below are considered, too, unless a bound excludes a faster answer there: the bytes that are kept from
the forward until the backward are within the budget, and all other blocks run forward twice.

Feasibility is computed without slots: the least peak follows the same recursion, with maxima instead of sums,
in bytes. The error has this number, and its segments are the answer if slots are too coarse.

Ranges of equal blocks are solved once: 96 equal blocks cost 192 ranges, not 4,656.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from colossalai.auto_parallel.checkpoint._chain import Chain, simulate
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.runtime import RecomputeSegment

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def solve_rotor(chain: Chain, budget_bytes: int, slots: int = 500) -> tuple[RecomputeSegment, ...]:
    """Return the segments that take the least time within a budget.

    Args:
        chain: The chain.
        budget_bytes: Limit of live bytes, as counted by `simulate`.
        slots: Number of slots that memory is divided into. The answer is exact if there are as many as bytes
            at the peak of the chain without segments.

    Raises:
        BudgetError: No segments fit; the error has the least budget that works.
        ValueError: `slots` is below 1.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; it must be 1 or more (500 is usual)")
    ranges = _Ranges(chain)
    least = _LeastPeaks(ranges)
    base = chain.blocks[0].input_bytes
    room, whole = budget_bytes - base, simulate(chain, ()).peak_bytes - base
    if room < least.peak:
        raise BudgetError(
            f"a budget of {budget_bytes:,} bytes is below the need of the blocks {chain.names[0]!r} to "
            f"{chain.names[-1]!r} with any segments: give at least {base + least.peak:,} bytes",
            base + least.peak,
        )
    if room >= whole:
        return ()
    fastest = least.segments()
    seconds = simulate(chain, fastest).seconds
    for limit, unit in _octaves(room, whole, least.peak, slots):  # See [Note: slots]
        if ranges.least_seconds(limit) >= seconds:
            break
        for segments in _Times(ranges, unit, limit // unit).fastest_first():
            cost = simulate(chain, segments)
            if cost.peak_bytes <= budget_bytes:
                if cost.seconds < seconds:
                    fastest, seconds = segments, cost.seconds
                break
    return fastest


def least_budget(chain: Chain) -> int:
    """Return the smallest budget, in bytes, for which `solve_rotor` has an answer."""
    return chain.blocks[0].input_bytes + _LeastPeaks(_Ranges(chain)).peak


def _octaves(room: int, whole: int, least: int, slots: int) -> Iterator[tuple[int, int]]:
    """Yield (limit in bytes, bytes of a slot) for the octave of a budget, then for all finer ones."""
    top = whole
    while room <= top // 2:
        top //= 2
    while room >= least:
        unit = max(1, -(-top // slots))
        if unit == 1:  # exact
            yield room, unit
            return
        yield room + room // 4, unit
        room = top = top // 2


class _Ranges:
    """The ranges of blocks s to t - 1 of a chain, and the bytes of their events; the input does not count.

    Args:
        chain: The chain.

    Attributes:
        num_blocks: Number of blocks.
        forward_s: [s, t]: seconds of one forward of all blocks of the range.
        both_s: [s]: seconds of forward and backward of block s.
        kept: [s]: bytes that block s keeps.
        entry: [s]: bytes of the input of block s.
        arriving: [t]: bytes of the gradient that is live while a range that ends with t is run forward; 0 at
            the end of the chain, where no gradient exists yet.
        forward: [s]: live bytes in the forward of a block that keeps all.
        backward: [s]: live bytes in its backward.
        lost: [s, t]: live bytes in a forward that keeps only the input.
        gradients: [s, t]: bytes of the parameter gradients of the range.
    """

    def __init__(self, chain: Chain) -> None:
        blocks = chain.blocks
        self.num_blocks = len(blocks)
        seconds = np.cumsum([0.0, *(block.forward_s for block in blocks)])
        self.forward_s: _Floats = seconds[None, :] - seconds[:, None]
        self.both_s: _Floats = np.array([block.forward_s + block.backward_s for block in blocks])
        outputs = _ints(block.output_bytes for block in blocks)
        self.entry = _ints(block.input_bytes for block in blocks)
        self.kept = outputs + _ints(block.saved_bytes for block in blocks)
        self.arriving = np.concatenate([[0], outputs[:-1], [0]])
        self.forward = self.kept + _ints(block.forward_peak for block in blocks)
        peaks = _ints(block.backward_peak for block in blocks)
        gradients = _ints(block.gradient_bytes for block in blocks)
        self.backward = np.maximum(self.kept + outputs + peaks, self.entry + gradients)
        complete = np.concatenate([[0], np.cumsum(gradients)])
        self.gradients = np.maximum(complete[None, :] - complete[:, None], 0)
        self.lost = np.zeros((self.num_blocks, self.num_blocks + 1), np.int64)
        for first in range(self.num_blocks):
            later = self.forward[first + 1 :] + self.entry[first + 1 :]
            self.lost[first, first + 1 :] = np.maximum.accumulate([self.forward[first], *later])
        self._kinds = [tuple(vars(block).values())[1:] for block in blocks]  # all but the names

    def least_seconds(self, room: int) -> float:
        """Return a lower bound of the seconds of any segments within some bytes."""
        forwards = np.diff(self.forward_s[0])
        seconds = float(self.both_s.sum() + forwards.sum())
        # The blocks that save most seconds per byte keep all; the last of them counts fractionally.
        for block in np.argsort(-forwards / np.maximum(self.kept, 1), kind="stable"):
            share = min(1.0, room / self.kept[block]) if self.kept[block] else 1.0
            seconds -= share * forwards[block]
            room -= share * self.kept[block]
        return seconds

    def in_order(self) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
        """Yield (s, t, an earlier range of equal blocks or None), each range after those inside of it."""
        numbers: dict[object, int] = {}
        first_of: dict[int, tuple[int, int]] = {}
        for last in range(1, self.num_blocks + 1):
            rest = -1 if last < self.num_blocks else -2  # at the end of the chain no gradient arrives
            for first in reversed(range(last)):
                # A range is identified by its first block and the number of the range behind that.
                rest = numbers.setdefault((self._kinds[first], rest), len(numbers))
                twin = first_of.setdefault(rest, (first, last))
                yield first, last, None if twin == (first, last) else twin

    def segments(
        self,
        room: int,
        kept: _Ints,
        entry: _Ints,
        gradients: _Ints,
        choose: Callable[[int, int, int], int | None],
    ) -> tuple[RecomputeSegment, ...]:
        """Return the segments of the whole chain under given choices.

        Args:
            room: Limit of live memory, in some unit.
            kept: The field `kept`, in that unit.
            entry: The field `entry`, in that unit.
            gradients: The field `gradients`, in that unit.
            choose: For (s, t, room), the end of the segment that begins with block s. None: block s keeps
                all.
        """

        def collect(first: int, last: int, room: int) -> tuple[RecomputeSegment, ...]:
            found = []
            while first < last:
                end = choose(first, last, room)
                if end is None:
                    room -= int(kept[first])
                    first += 1
                else:
                    inner = collect(first, end, room - int(gradients[end, last]))
                    found.append(RecomputeSegment(first, end, inner))
                    room -= int(entry[end])
                    first = end
            return tuple(found)

        return collect(0, self.num_blocks, room)


class _LeastPeaks:
    """The least peak of each range over all segments, in bytes.

    Args:
        ranges: Ranges of the chain.
    """

    def __init__(self, ranges: _Ranges) -> None:
        self._ranges = ranges
        n = ranges.num_blocks
        self._peaks = np.zeros((n + 1, n + 1), np.int64)  # [s, t], 0 for an empty range
        for first, last, twin in ranges.in_order():
            self._peaks[first, last] = (
                min(self._if_kept(first, last), self._by_end(first, last).min(initial=_NO_END))
                if twin is None
                else self._peaks[twin]
            )

    @property
    def peak(self) -> int:
        """The least peak of the whole chain."""
        return int(self._peaks[0, -1])

    def segments(self) -> tuple[RecomputeSegment, ...]:
        """Return segments with that peak."""
        ranges = self._ranges
        return ranges.segments(self.peak, ranges.kept, ranges.entry, ranges.gradients, self._choose)

    def _choose(self, first: int, last: int, room: int) -> int | None:
        if self._if_kept(first, last) <= room:
            return None
        return first + 1 + int(self._by_end(first, last).argmin())

    def _if_kept(self, first: int, last: int) -> int:
        """Return the peak if the first block keeps all."""
        ranges = self._ranges
        backward = ranges.backward[first] + ranges.gradients[first + 1, last]
        events = (ranges.arriving[last] + ranges.forward[first], backward)
        return int(max(*events, ranges.kept[first] + self._peaks[first + 1, last]))

    def _by_end(self, first: int, last: int) -> _Ints:
        """Return the peaks if a segment begins with the first block, by the block behind the segment."""
        ranges, ends = self._ranges, slice(first + 1, last)
        behind = ranges.entry[ends] + self._peaks[ends, last]
        lost = ranges.arriving[last] + ranges.lost[first, ends]
        before = self._peaks[first, ends] + ranges.gradients[ends, last]
        peaks: _Ints = np.maximum(np.maximum(lost, behind), before)
        return peaks


_NO_END = np.iinfo(np.int64).max


class _Times:
    """The least seconds of each range for each number of slots: the table T(s, t, m).

    Args:
        ranges: Ranges of the chain.
        unit: Bytes of a slot.
        num_slots: Number of slots of the whole chain.
    """

    def __init__(self, ranges: _Ranges, unit: int, num_slots: int) -> None:
        self._ranges = ranges
        self._unit = unit
        self._num_slots = num_slots
        self._kept, self._entry = self._slots(ranges.kept), self._slots(ranges.entry)
        self._gradients = self._slots(ranges.gradients)
        n = ranges.num_blocks
        self._times = np.full((n, n + 1, num_slots + 1), np.inf)
        # [t, s, m]: the same behind a segment that ends before block s; the input of s is kept, too.
        self._behind = np.full((n + 1, n, num_slots + 1), np.inf)
        for first, last, twin in ranges.in_order():
            if twin is not None:
                self._times[first, last] = self._times[twin]
                self._behind[last, first] = self._behind[twin[1], twin[0]]
                continue
            self._times[first, last] = self._fastest(first, last)
            if (taken := int(self._entry[first])) <= num_slots:
                self._behind[last, first, taken:] = self._times[first, last, : num_slots + 1 - taken]

    def fastest_first(self) -> Iterator[tuple[RecomputeSegment, ...]]:
        """Yield segments for the whole chain, for a decreasing number of slots."""
        seconds = self._times[0, -1]
        for room in range(self._num_slots, -1, -1):
            if np.isfinite(seconds[room]) and (room == 0 or seconds[room - 1] > seconds[room]):
                sizes = (self._kept, self._entry, self._gradients)
                yield self._ranges.segments(room, *sizes, self._choose)

    def _slots(self, num_bytes: _Ints) -> _Ints:
        return -(-num_bytes // self._unit)

    def _fastest(self, first: int, last: int) -> _Floats:
        by_end = self._by_end(first, last, slice(None))
        seconds: _Floats = np.minimum(self._if_kept(first, last), by_end.min(axis=0, initial=np.inf))
        return seconds

    def _choose(self, first: int, last: int, room: int) -> int | None:
        by_end = self._by_end(first, last, slice(room, room + 1))[:, 0]
        if self._if_kept(first, last)[room] <= by_end.min(initial=np.inf):
            return None
        return first + 1 + int(by_end.argmin())

    def _if_kept(self, first: int, last: int) -> _Floats:
        """Return the seconds if the first block keeps all, by slots."""
        ranges = self._ranges
        backward = ranges.backward[first] + ranges.gradients[first + 1, last]
        event = max(ranges.arriving[last] + ranges.forward[first], backward)
        start = int(self._slots(event))  # at least the slots that it keeps
        seconds = np.full(self._num_slots + 1, np.inf)
        if start <= self._num_slots:
            seconds[start:] = ranges.both_s[first]
            if first + 1 < last:
                taken = int(self._kept[first])
                seconds[start:] += self._times[first + 1, last, start - taken : self._num_slots + 1 - taken]
        return seconds

    def _by_end(self, first: int, last: int, rooms: slice) -> _Floats:
        """Return the seconds if a segment begins with the first block: [end - first - 1, slots]."""
        ranges, ends = self._ranges, slice(first + 1, last)
        room = np.arange(self._num_slots + 1)[rooms]
        seconds: _Floats = self._behind[last, ends, rooms] + ranges.forward_s[first, ends, None]
        complete = self._gradients[ends, last]
        if complete.any():
            # The segment has less room when it is recomputed: inf if the gradients leave none.
            left = room - complete[:, None]
            again = np.take_along_axis(self._times[first, ends], np.maximum(left, 0), axis=1)
            seconds += np.where(left < 0, np.inf, again)
        else:
            seconds += self._times[first, ends, rooms]
        least = self._slots(ranges.arriving[last] + ranges.lost[first, ends])
        seconds[room < least[:, None]] = np.inf
        return seconds


def _ints(values: Iterator[int]) -> _Ints:
    return np.fromiter(values, np.int64)
