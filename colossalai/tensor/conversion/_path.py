"""Paths between layouts: the documented greedy search, and the shortest path over costs.

[Note: why greedy is not enough]
Greedy search takes, again and again, the one-step placement that differs least from the target. From S0R to
RS1 it gathers first and shards then, for a whole dimension is nearer to the target than one that is cut
otherwise; to shard first and to gather the smaller slice sends fewer bytes. No difference function is right
for every extent, since what a move costs depends on the slice that it finds. Dijkstra's algorithm (1959) over
the graph of placements is: the graph is small (a few hundred nodes), and one search gives the paths to all
targets of a source.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from colossalai.tensor.conversion._costs import CollectiveCosts
from colossalai.tensor.conversion._layout import AxisPlacement, Extents
from colossalai.tensor.conversion._moves import Move, one_step_moves


@dataclass(frozen=True)
class Path:
    """Moves from a placement to another one.

    Attributes:
        moves: One after the other.
        cost: Their sum.
    """

    moves: tuple[Move, ...]
    cost: float


def shortest_paths(
    source: AxisPlacement, extents: Extents, costs: CollectiveCosts
) -> Mapping[AxisPlacement, Path]:
    """Return the cheapest path from a placement to every other one that moves reach.

    Of paths of one cost that of the fewest moves is taken, then the one that was found first: all ranks find
    the same.
    """
    found = {source: Path((), 0.0)}
    closed: set[AxisPlacement] = set()
    queue = [(0.0, 0, source)]
    while queue:
        _, _, here = heapq.heappop(queue)
        if here in closed:
            continue
        closed.add(here)
        path = found[here]
        for move in one_step_moves(here, extents, joined=True):
            cost = path.cost + move.cost(costs, extents.largest(here, move.target))
            length = len(path.moves) + 1
            known = found.get(move.target)
            if known is None or (cost, length) < (known.cost, len(known.moves)):
                found[move.target] = Path((*path.moves, move), cost)
                heapq.heappush(queue, (cost, length, move.target))
    return found


def greedy_path(
    source: AxisPlacement, target: AxisPlacement, extents: Extents, costs: CollectiveCosts
) -> Path:
    """Return the path by the documented search; see [Note: why greedy is not enough].

    Each step takes the one-step placement, along a single axis, of least difference from the target; of
    equal ones the cheapest. A placement is not visited twice.

    Raises:
        ValueError: `source` and `target` are such that the search comes to an end elsewhere.
    """
    here, path, seen = source, Path((), 0.0), {source}
    while here != target:
        moves = [move for move in one_step_moves(here, extents, joined=False) if move.target not in seen]
        if not moves:
            raise ValueError(f"the greedy search from {source} to {target} ends at {here}")
        cost_of = {move: move.cost(costs, extents.largest(here, move.target)) for move in moves}
        best = min(moves, key=lambda move: (difference(move.target, target), cost_of[move]))
        path = Path((*path.moves, best), path.cost + cost_of[best])
        here = best.target
        seen.add(here)
    return path


def difference(placement: AxisPlacement, target: AxisPlacement) -> float:
    """Return how far a placement is from another one, as the documented search reckons.

    Of each dimension the axes that both begin with agree. Each further one of `placement` is to be gathered,
    or to be summed: 1. Each further one of `target` is to be sharded: 1/2, for that is local.
    """
    total = float(len(set(placement.partial) ^ set(target.partial)))
    for has, wants in zip(placement.dims, target.dims, strict=True):
        agree = 0
        while agree < min(len(has), len(wants)) and has[agree] == wants[agree]:
            agree += 1
        total += (len(has) - agree) + 0.5 * (len(wants) - agree)
    return total
