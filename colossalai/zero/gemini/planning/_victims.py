"""Evictions from the compute tier: the victims of a moment, and the plan of a whole iteration.

A chunk that is needed has to be present; a present chunk takes its bytes; an absent one has to be fetched
before
its next need, which moves them. Evictions are arithmetic on a trace, with ties broken by number: ranks with
the same trace decide alike, and gather the same chunks in the same order.

# [Note: Optimal plans]
Optimal means: fewest bytes moved, among the plans that are the same in every iteration. See [Note: Stays].

- Up to `EXACT_CHUNKS` chunks, of any sizes and with any other memory, the plan is optimal (it
  takes up to seconds on one core for `EXACT_MOMENTS` uses, milliseconds for 20).
- For more it is the better of two greedy ones, MIN and least recently used, with further stays that fit.
  MIN drops the chunk needed latest (Belady 1966). For chunks of one size that is optimal wherever it does
  the same in every iteration, as on a trace that goes through the chunks and back. For several it is a guess.
- Never are more bytes moved than by dropping the least recently used.
- A plan that alternates may move fewer: of chunks 0, 1, 2 in turn with room for two, ours moves 2 in every
  iteration, and 3 in two iterations is possible.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from colossalai.zero.gemini.planning._stays import Stay, StayRing
from colossalai.zero.gemini.planning._trace import Trace

EXACT_CHUNKS = 8
EXACT_MOMENTS = 256
LAPS = 3  # of a greedy plan, from nothing present: the last one is taken for the iteration that comes again

Order = Callable[[int], float]  # of the chunks present; the smallest is dropped first


@dataclass(frozen=True)
class Victims:
    """Chunks to drop, in this order, and the bytes that are missing even so."""

    chunks: tuple[int, ...]
    missing_bytes: int


def needed_latest(trace: Trace, moment: int) -> Order:
    """Return the order of a moment on the trace: the chunk whose next need is the latest goes first."""

    def order(chunk: int) -> float:
        need = trace.next_need(chunk, moment)
        return -math.inf if need is None else -need

    return order


def least_recently_used(last_uses: Mapping[int, int]) -> Order:
    """Return the order off the trace: the chunk whose last use is the earliest goes first, unused ones ahead.

    Args:
        last_uses: A number for each chunk that was used; the larger the later.
    """
    return lambda chunk: last_uses.get(chunk, -math.inf)


def choose_victims(
    present: Mapping[int, int], num_bytes: int, *, order: Order, pinned: Collection[int] = ()
) -> Victims:
    """Return the chunks to drop so that `num_bytes` become free.

    Args:
        present: The bytes of each chunk that is present.
        num_bytes: Number of bytes to free; nothing is evicted for 0 or fewer.
        order: The order of eviction; ties by the smaller number.
        pinned: Chunks that may not be dropped now.
    """
    victims = []
    candidates = present.keys() - set(pinned)
    for chunk in sorted(candidates, key=lambda chunk: (order(chunk), chunk)):
        if num_bytes <= 0:
            break
        victims.append(chunk)
        num_bytes -= present[chunk]
    return Victims(tuple(victims), max(0, num_bytes))


@dataclass(frozen=True)
class Period:
    """Actions at a use, in this order, and the state until the next one.

    Attributes:
        drop: The chunks that go before the use.
        fetch: The chunks that have to come before the use.
        ahead: The chunks of the next use whose fetch starts when this use has its chunks.
        present: The present chunks of this period, without fetches in flight.
    """

    drop: tuple[int, ...]
    fetch: tuple[int, ...]
    ahead: tuple[int, ...]
    present: frozenset[int]


@dataclass(frozen=True)
class ResidencePlan:
    """Present chunks over one repeated iteration.

    The chunks at the start of the first planned iteration can differ from those at the end of the plan: then
    chunks that are not in `present` are also evicted, and absent ones that are needed are fetched.

    Attributes:
        periods: One for each moment of the trace.
        moved_bytes: The bytes of all fetches of an iteration.
        is_exact: Whether no plan that is the same in every iteration moves fewer.
    """

    periods: tuple[Period, ...]
    moved_bytes: int
    is_exact: bool


@dataclass(frozen=True)
class DoesNotFit:
    """The moment that needs most bytes, and they are more than the budget.

    Attributes:
        chunk: The chunk that is used.
        moment: The index of the use.
        needed_bytes: Bytes of it, of chunks held with it, and of other data: the sufficient budget.
        allowed_bytes: The budget.
    """

    chunk: int
    moment: int
    needed_bytes: int
    allowed_bytes: int


def plan_residence(
    trace: Trace, sizes: Sequence[int], budget: int | None, *, out_of_date: Collection[int] = ()
) -> ResidencePlan | DoesNotFit:
    """Plan stays, evictions and prefetches. See [Note: Optimal plans].

    A fetch starts one period ahead if the chunk fits in addition to all data of that period.

    Args:
        trace: The trace of every iteration, covering those of all ranks.
        sizes: Bytes of each chunk on the compute tier when it is present, by number.
        budget: Bytes of the compute tier for chunks and other data; None for no bound.
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
    ring = StayRing(trace, sizes, tuple(limit - need for need in needs), written)
    present = [set(needed) for needed in trace.needed]
    for stay in _choose_stays(ring):
        for period in ring.between(stay):
            present[period].add(stay.chunk)
    ahead = [_fetches_ahead(ring, present, moment) for moment in range(len(trace))]
    before = present[-1:] + present[:-1]
    before[:1] = [last - written for last in before[:1]]
    periods = tuple(
        Period(
            drop=tuple(sorted(before[moment] - present[moment])),
            fetch=tuple(sorted(present[moment] - before[moment] - set(ahead[moment - 1]))),
            ahead=ahead[moment],
            present=frozenset(present[moment]),
        )
        for moment in range(len(trace))
    )
    moved = sum(_bytes((*period.fetch, *period.ahead), sizes) for period in periods)
    return ResidencePlan(periods, moved, is_exact=_is_small(trace) or not moved)


def _choose_stays(ring: StayRing) -> tuple[Stay, ...]:
    """Return the best stays of a few chunks, good ones of many. See [Note: Optimal plans]."""
    latest = _greedy_stays(ring, lambda moment, _: needed_latest(ring.trace, moment))
    oldest = _greedy_stays(ring, lambda _, last_needs: least_recently_used(last_needs))
    greedy = max(ring.pack(latest), ring.pack(oldest), key=ring.saved_bytes)  # the first of equals
    if not _is_small(ring.trace):
        return greedy
    return ring.choose_best(more_than=ring.saved_bytes(greedy)) or greedy


def _greedy_stays(ring: StayRing, order_at: Callable[[int, Mapping[int, int]], Order]) -> set[Stay]:
    """Return the stays of an iteration in which victims go when room is needed, and not before."""
    length = len(ring.trace)
    stay_from = {(stay.chunk, stay.begin): stay for stay in ring.stays}
    present: set[int] = set()
    last_needs: dict[int, int] = {}
    stays: set[Stay] = set()
    for now in range(LAPS * length):
        moment = now % length
        if moment == 0:
            stays = set()
            present -= ring.out_of_date
        needed = ring.trace.needed[moment]
        stays |= {stay_from[chunk, last_needs[chunk] % length] for chunk in needed & present}
        beside = {chunk: ring.sizes[chunk] for chunk in present - needed}
        excess = sum(beside.values()) - ring.room[moment]
        victims = choose_victims(beside, excess, order=order_at(moment, last_needs))
        present = (present | needed) - set(victims.chunks)
        last_needs.update(dict.fromkeys(needed, now))
    return stays


def _fetches_ahead(ring: StayRing, present: Sequence[set[int]], moment: int) -> tuple[int, ...]:
    """Return the chunks of the next use that fit in addition to those present in this period."""
    left = ring.room[moment] - _bytes(present[moment] - ring.trace.needed[moment], ring.sizes)
    ahead = []
    following = ring.trace.needed[(moment + 1) % len(ring.trace)] - present[moment]
    if moment + 1 == len(ring.trace):
        following -= ring.out_of_date  # a fetch before they are written would be useless
    for chunk in sorted(following):
        if ring.sizes[chunk] <= left:
            ahead.append(chunk)
            left -= ring.sizes[chunk]
    return tuple(ahead)


def _is_small(trace: Trace) -> bool:
    return len(trace.moments) <= EXACT_CHUNKS and len(trace) <= EXACT_MOMENTS


def _bytes(chunks: Iterable[int], sizes: Sequence[int]) -> int:
    return sum(sizes[chunk] for chunk in chunks)
