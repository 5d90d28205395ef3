"""Stays: chunks that remain on the compute tier from one need until the next, and their choice.

# [Note: Stays]
From one need of a chunk until its next it either stays or is fetched again. So an eviction plan is a choice
among stays. A stay takes the bytes of the chunk in every period between the two needs, where the
room is the budget less what is needed and what is not chunks; and it saves as many bytes from being moved.
The iteration is repeated, so that periods form a ring: chunks present at its end are present at its start. An
earlier fetch or a later eviction does not change the bytes.

With chunks of one size this is interval scheduling, which the rule "drop the chunk needed latest" solves;
with several sizes it is NP-hard, and for a few chunks dynamic programming over sets of them does it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from colossalai.zero.gemini.planning._trace import Trace


@dataclass(frozen=True)
class Stay:
    """A chunk from a need until its next one; `end` is beyond the trace if that is in the next iteration."""

    chunk: int
    begin: int
    end: int


@dataclass(frozen=True)
class StayRing:
    """The problem: choose stays that fit together and save many bytes.

    Attributes:
        trace: The iteration.
        sizes: Bytes of each chunk when it is present, by number.
        room: The bytes of each period for chunks that are not needed in it.
        out_of_date: Chunks that are written between two iterations: they cannot stay from one to the next.
    """

    trace: Trace
    sizes: Sequence[int]
    room: tuple[int, ...]
    out_of_date: frozenset[int] = frozenset()

    @cached_property
    def stays(self) -> tuple[Stay, ...]:
        """All of them, from each need of a chunk until its next."""
        return tuple(
            Stay(chunk, begin, end)
            for chunk, moments in self.trace.moments.items()
            for begin, end in pairwise((*moments, len(self.trace) + moments[0]))
            if end < len(self.trace) or chunk not in self.out_of_date
        )

    def between(self, stay: Stay) -> Iterator[int]:
        """Iterate over the periods in which a chunk takes room that it would not take without the stay."""
        return (moment % len(self.trace) for moment in range(stay.begin + 1, stay.end))

    def saved_bytes(self, stays: Iterable[Stay]) -> int:
        """Return how many bytes are not moved when these are chosen."""
        return sum(self.sizes[stay.chunk] for stay in stays)

    def pack(self, favoured: Collection[Stay]) -> tuple[Stay, ...]:
        """Choose the stays that fit, one after the other: the favoured ones first, then the shorter ones."""
        room = list(self.room)
        chosen = []
        for stay in sorted(self.stays, key=lambda stay: (stay not in favoured, stay.end - stay.begin)):
            size = self.sizes[stay.chunk]
            if all(size <= room[period] for period in self.between(stay)):
                chosen.append(stay)
                for period in self.between(stay):
                    room[period] -= size
        return tuple(chosen)

    def choose_best(self, *, more_than: int) -> tuple[Stay, ...] | None:
        """Choose the stays that save most bytes; None if that is not above `more_than`.

        The work grows as moments x 4 ** chunks at worst; `more_than` cuts most of it off.
        """
        search = _SetSearch(self)
        best = None
        for start in sorted(search.starts, key=lambda chunks: -search.bounds[0][chunks]):
            if search.bounds[0][start] <= more_than:
                break  # and so are all that follow
            path = search.find_path(start, more_than=more_than)
            if path is not None:
                best = tuple(stay for stay in self.stays if path[stay.begin] >> search.bits[stay.chunk] & 1)
                more_than = self.saved_bytes(best)
        return best


class _SetSearch:
    """Dynamic programming over the sets of chunks that stay from a period into the next one.

    A set is an integer with a bit for each chunk. At each moment a subset of the needed chunks is chosen to
    stay until their next need; the bytes are saved by that choice. `bounds[moment][chunks]` is the most that
    can be saved from a moment to the end of the trace when `chunks` stayed until that moment: the set at the
    end is free, so a path around the ring never saves more.
    """

    def __init__(self, ring: StayRing) -> None:
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
        """Iterate over the sets of those needed that may stay, each with its bytes."""
        needed, following = self._needed[moment], self._needed[(moment + 1) % len(self._needed)]
        if moment + 1 == len(self._needed):
            needed &= ~self._out_of_date  # none of these stays
        optional = needed & ~following  # chunks that are also needed next stay without additional room
        some = optional
        while True:
            chosen = needed & following | some
            yield chosen, self._bytes[chosen]
            if not some:
                return
            some = (some - 1) & optional  # the next smaller subset

    def _bound(self, moment: int, chunks: int) -> float:
        beside = chunks & ~self._needed[moment]
        if self._bytes[beside] > self._room[moment]:
            return -math.inf
        after = self.bounds[0]
        return max(saved + after[beside | chosen] for chosen, saved in self._choices[moment])

    def find_path(self, start: int, *, more_than: int) -> list[int] | None:
        """Return the staying chunks after each moment, with `start` before the first and after the last one.

        None if that saves no more than `more_than` bytes.
        """
        most_saved = {start: 0}  # by set, at the moment
        came_from: list[dict[int, int]] = []
        for moment, bounds in enumerate(self.bounds[1:]):
            before, most_saved = most_saved, {}
            came_from.append({})
            for chunks, saved_before in before.items():
                beside = chunks & ~self._needed[moment]  # it fits, or its bound would have cut it off
                for chosen, more in self._choices[moment]:
                    following, saved = beside | chosen, saved_before + more
                    if saved + bounds[following] > more_than and saved > most_saved.get(following, -1):
                        most_saved[following] = saved
                        came_from[moment][following] = chunks
        if start not in most_saved:
            return None
        path = [start]
        for origins in reversed(came_from[1:]):
            path.append(origins[path[-1]])
        return path[::-1]
