"""Eviction: the plan of an iteration, with the chunks that are evicted, fetched and kept at each use.

A chunk is present when it is needed. A present chunk takes its bytes; an absent one is fetched before its
next need. The plan is a function of the trace, with ties broken by number, so ranks with equal traces gather
the same chunks in the same order.

# [Note: Intervals]
From one need of a chunk until the next, the chunk is either kept or fetched again. A plan is a choice of
intervals in which chunks are kept. A kept chunk takes its bytes in every period of the interval, where the
room is the budget minus the needed chunks and minus memory that is not chunks; it saves as many bytes of
fetches. The iteration repeats, so the periods form a ring: the chunks at its end are those at its start.
Earlier fetches and later evictions change no byte.

With chunks of one size this is interval scheduling, which evicting the chunk needed latest solves. With
several sizes it is NP-hard; for a few chunks, dynamic programming over sets of chunks solves it.

# [Note: Optimal plans]
Optimal means: fewest bytes moved, among the plans that are the same in every iteration.

- Up to `EXACT_CHUNKS` chunks, of any sizes and with any other memory, the plan is optimal (up to seconds on
  one core for `EXACT_MOMENTS` uses, milliseconds for 20).
- For more chunks it is the better of two greedy plans, MIN and least recently used, plus the intervals that
  still fit. MIN evicts the chunk needed latest (Belady 1966). For chunks of one size that is optimal wherever
  it does the same in every iteration, as on a trace through the chunks and back. For several sizes it is a
  heuristic.
- The plan never moves more bytes than evicting the least recently used chunks.
- An alternating plan can move fewer: of chunks 0, 1, 2 in turn with room for two, this plan moves 2 in every
  iteration, and 3 in two iterations is possible.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from colossalai.zero.gemini.planning._trace import Trace

EXACT_CHUNKS = 8
EXACT_MOMENTS = 256
LAPS = 3  # of a greedy plan, from nothing present: the last one is taken for the iteration that comes again


@dataclass(frozen=True)
class Period:
    """A period of a plan: chunks outside of `present` are evicted at its use, and then others are fetched.

    Attributes:
        fetch: Chunks that are fetched before the use.
        ahead: Chunks of the next use whose fetch starts when the chunks of this use are present.
        present: Chunks present in this period, without those in flight.
    """

    fetch: tuple[int, ...]
    ahead: tuple[int, ...]
    present: frozenset[int]


@dataclass(frozen=True)
class EvictionPlan:
    """The present chunks of each period of an iteration that repeats.

    The chunks at the start of the first planned iteration can differ from those at the end of the plan. Then
    needed chunks that are absent are fetched as well.

    Attributes:
        periods: One for each moment of the trace.
        moved_bytes: The bytes of all fetches of an iteration.
    """

    periods: tuple[Period, ...]
    moved_bytes: int


@dataclass(frozen=True)
class DoesNotFit:
    """The moment that needs most bytes, and they are more than the budget.

    Attributes:
        chunk: The chunk that is used.
        moment: The index of the use.
        needed_bytes: Bytes of the chunk, those held with it and other memory: the smallest budget that fits.
        allowed_bytes: The budget.
    """

    chunk: int
    moment: int
    needed_bytes: int
    allowed_bytes: int


@dataclass(frozen=True)
class KeptInterval:
    """A chunk kept from one need to the next; `end` is beyond the trace for a need of the next iteration."""

    chunk: int
    begin: int
    end: int


@dataclass(frozen=True)
class IntervalRing:
    """The problem: choose intervals that fit and save many bytes; see [Note: Intervals].

    Attributes:
        trace: The iteration.
        sizes: Bytes of each chunk when it is present, by number.
        room: Bytes of each period for chunks that are not needed in it.
        out_of_date: Chunks that are written between two iterations: they cannot be kept across the step.
    """

    trace: Trace
    sizes: Sequence[int]
    room: tuple[int, ...]
    out_of_date: frozenset[int] = frozenset()

    @cached_property
    def intervals(self) -> tuple[KeptInterval, ...]:
        """All intervals, from each need of a chunk until its next."""
        return tuple(
            KeptInterval(chunk, begin, end)
            for (chunk, begin), end in self.trace.next_needs.items()
            if end < len(self.trace) or chunk not in self.out_of_date
        )

    def between(self, interval: KeptInterval) -> Iterator[int]:
        """Iterate over the periods in which the chunk takes room only because it is kept."""
        return (moment % len(self.trace) for moment in range(interval.begin + 1, interval.end))

    def saved_bytes(self, intervals: Iterable[KeptInterval]) -> int:
        """Return the number of bytes that are not fetched when these are chosen."""
        return sum(self.sizes[interval.chunk] for interval in intervals)

    def pack(self, favoured: Collection[KeptInterval]) -> tuple[KeptInterval, ...]:
        """Choose the intervals that fit, one after the other: favoured ones first, then shorter ones."""
        room = list(self.room)
        chosen = []
        for interval in sorted(
            self.intervals, key=lambda interval: (interval not in favoured, interval.end - interval.begin)
        ):
            size = self.sizes[interval.chunk]
            if all(size <= room[period] for period in self.between(interval)):
                chosen.append(interval)
                for period in self.between(interval):
                    room[period] -= size
        return tuple(chosen)

    def choose_best(self, *, more_than: int) -> tuple[KeptInterval, ...] | None:
        """Choose the intervals that save most bytes; None if they save at most `more_than`.

        The work grows as moments x 4 ** chunks at worst; `more_than` cuts most of it off.
        """
        search = _SetSearch(self)
        best = None
        for start in sorted(search.starts, key=lambda chunks: -search.bounds[0][chunks]):
            if search.bounds[0][start] <= more_than:
                break  # the bounds are sorted: the rest cannot be better
            path = search.find_path(start, more_than=more_than)
            if path is not None:
                best = tuple(
                    interval
                    for interval in self.intervals
                    if path[interval.begin] >> search.bits[interval.chunk] & 1
                )
                more_than = self.saved_bytes(best)
        return best


def plan_evictions(
    trace: Trace, sizes: Sequence[int], budget: int | None, *, out_of_date: Collection[int] = ()
) -> EvictionPlan | DoesNotFit:
    """Plan the evictions, fetches and prefetches of an iteration. See [Note: Optimal plans].

    A fetch starts one period ahead if the chunk also fits into the room of that period.

    Args:
        trace: The iteration, covering the traces of all ranks.
        sizes: Bytes of each chunk on the compute tier when it is present, by number.
        budget: Bytes of the compute tier for chunks and other memory. None: no bound.
        out_of_date: Chunks that the optimizer writes between two iterations: they are fetched in each.
    """
    needs = [
        other + _bytes(needed, sizes) for other, needed in zip(trace.other_bytes, trace.needed, strict=True)
    ]
    if budget is not None and needs and max(needs) > budget:
        worst = needs.index(max(needs))
        return DoesNotFit(trace.uses[worst], worst, needs[worst], budget)
    limit = sum(sizes) + max(needs, default=0) if budget is None else budget
    written = frozenset(out_of_date)
    ring = IntervalRing(trace, sizes, tuple(limit - need for need in needs), written)
    present = [set(needed) for needed in trace.needed]
    for interval in _choose_intervals(ring):
        for period in ring.between(interval):
            present[period].add(interval.chunk)
    ahead = [_fetches_ahead(ring, present, moment) for moment in range(len(trace))]
    before = present[-1:] + present[:-1]
    before[:1] = [last - written for last in before[:1]]
    periods = tuple(
        Period(
            fetch=tuple(sorted(present[moment] - before[moment] - set(ahead[moment - 1]))),
            ahead=ahead[moment],
            present=frozenset(present[moment]),
        )
        for moment in range(len(trace))
    )
    moved = sum(_bytes((*period.fetch, *period.ahead), sizes) for period in periods)
    return EvictionPlan(periods, moved)


def _choose_intervals(ring: IntervalRing) -> tuple[KeptInterval, ...]:
    """Return the best intervals for a few chunks, good ones for many. See [Note: Optimal plans]."""
    # MIN evicts the chunk whose next need is the latest, LRU the one whose last need is the earliest.
    latest = _greedy_intervals(ring, lambda _, next_need: -next_need)
    oldest = _greedy_intervals(ring, lambda last_need, _: last_need)
    greedy = max(ring.pack(latest), ring.pack(oldest), key=ring.saved_bytes)  # the first of equals
    if not _is_small(ring.trace):
        return greedy
    return ring.choose_best(more_than=ring.saved_bytes(greedy)) or greedy


def _greedy_intervals(ring: IntervalRing, order: Callable[[int, int], int]) -> set[KeptInterval]:
    """Return the intervals kept by an iteration that evicts only when room is needed.

    Args:
        ring: The problem.
        order: Sort key of a chunk that is present, from the moments of its last and of its next need: the
            smallest is evicted first. Ties are broken by number.
    """
    trace, length = ring.trace, len(ring.trace)
    present: dict[int, tuple[int, int]] = {}  # last and next need of each chunk, counted over the laps
    intervals: set[KeptInterval] = set()
    for now in range(LAPS * length):
        moment = now % length
        if moment == 0:
            intervals = set()
            present = {chunk: needs for chunk, needs in present.items() if chunk not in ring.out_of_date}
        needed = trace.needed[moment]
        for chunk in needed:
            if chunk in present:
                begin = present[chunk][0] % length
                intervals.add(KeptInterval(chunk, begin, trace.next_needs[chunk, begin]))
            present[chunk] = now, now - moment + trace.next_needs[chunk, moment]
        unneeded = sorted(present.keys() - needed, key=lambda chunk: (order(*present[chunk]), chunk))
        excess = _bytes(unneeded, ring.sizes) - ring.room[moment]
        for chunk in unneeded:
            if excess <= 0:
                break
            excess -= ring.sizes[chunk]
            del present[chunk]
    return intervals


def _fetches_ahead(ring: IntervalRing, present: Sequence[set[int]], moment: int) -> tuple[int, ...]:
    """Return the chunks of the next use that fit into the room left in this period."""
    left = ring.room[moment] - _bytes(present[moment] - ring.trace.needed[moment], ring.sizes)
    ahead = []
    following = ring.trace.needed[(moment + 1) % len(ring.trace)] - present[moment]
    if moment + 1 == len(ring.trace):
        following -= ring.out_of_date  # values fetched before the optimizer step are out of date after it
    for chunk in sorted(following):
        if ring.sizes[chunk] <= left:
            ahead.append(chunk)
            left -= ring.sizes[chunk]
    return tuple(ahead)


def _is_small(trace: Trace) -> bool:
    return len(trace.moments) <= EXACT_CHUNKS and len(trace) <= EXACT_MOMENTS


def _bytes(chunks: Iterable[int], sizes: Sequence[int]) -> int:
    return sum(sizes[chunk] for chunk in chunks)


class _SetSearch:
    """Dynamic programming over the sets of chunks that are kept from a period into the next one.

    A set is an integer with a bit for each chunk. Each moment decides which of the needed chunks are kept,
    until their next need, and that decision saves their bytes. `bounds[moment][chunks]` is the most that can
    be saved from a moment to the end of the trace when `chunks` were kept until that moment. It leaves the
    set at the end open, so a path around the ring never saves more.
    """

    def __init__(self, ring: IntervalRing) -> None:
        self.bits = {chunk: bit for bit, chunk in enumerate(ring.trace.moments)}
        self.sets = range(1 << len(self.bits))
        self._out_of_date = sum(1 << bit for chunk, bit in self.bits.items() if chunk in ring.out_of_date)
        self.starts = [chunks for chunks in self.sets if not chunks & self._out_of_date]
        self._room = ring.room
        self._needed = [sum(1 << self.bits[chunk] for chunk in needed) for needed in ring.trace.needed]
        self._bytes = [
            sum(ring.sizes[chunk] for chunk, bit in self.bits.items() if chunks >> bit & 1)
            for chunks in self.sets
        ]
        self._choices = [list(self._choices_at(moment)) for moment in range(len(self._needed))]
        self.bounds: list[list[float]] = [[0.0] * len(self.sets)]
        for moment in reversed(range(len(self._needed))):
            self.bounds.insert(0, [self._bound(moment, chunks) for chunks in self.sets])

    def _choices_at(self, moment: int) -> Iterator[tuple[int, int]]:
        """Iterate over the subsets of needed chunks that can be kept, each with its bytes."""
        needed, following = self._needed[moment], self._needed[(moment + 1) % len(self._needed)]
        if moment + 1 == len(self._needed):
            needed &= ~self._out_of_date  # none of these is kept
        optional = needed & ~following  # a chunk of both uses is kept without taking room
        some = optional
        while True:
            chosen = needed & following | some
            yield chosen, self._bytes[chosen]
            if not some:
                return
            some = (some - 1) & optional  # the next smaller subset

    def _bound(self, moment: int, chunks: int) -> float:
        unneeded = chunks & ~self._needed[moment]
        if self._bytes[unneeded] > self._room[moment]:
            return -math.inf
        after = self.bounds[0]
        return max(saved + after[unneeded | chosen] for chosen, saved in self._choices[moment])

    def find_path(self, start: int, *, more_than: int) -> list[int] | None:
        """Return the set kept after each moment if `start` is kept before the first and after the last one.

        None if that saves at most `more_than` bytes.
        """
        most_saved = {start: 0}  # by set, at the moment
        came_from: list[dict[int, int]] = []
        for moment, bounds in enumerate(self.bounds[1:]):
            before, most_saved = most_saved, {}
            came_from.append({})
            for chunks, saved_before in before.items():
                unneeded = chunks & ~self._needed[moment]  # it fits, or its bound would have cut it off
                for chosen, more in self._choices[moment]:
                    following, saved = unneeded | chosen, saved_before + more
                    if saved + bounds[following] > more_than and saved > most_saved.get(following, -1):
                        most_saved[following] = saved
                        came_from[moment][following] = chunks
        if start not in most_saved:
            return None
        path = [start]
        for origins in reversed(came_from[1:]):
            path.append(origins[path[-1]])
        return path[::-1]
