"""Paths between layouts: the documented greedy search, and the shortest path over costs.

[Note: limits of a greedy search]
Greedy search repeatedly takes the one-step placement with the least difference from the target. From S0R to
RS1 it gathers and then shards, since a replicated dimension is nearer to the target than a dimension with
another sharding; sharding first and gathering the smaller slice sends fewer bytes. No difference function is
right for every extent, since the cost of a move depends on the size of the slice. Dijkstra's algorithm (1959)
over the graph of placements is right: the graph is small (a few hundred nodes), and one search returns the
paths to all targets of a source.
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
        moves: The moves, in order.
        cost: Sum of their costs.
    """

    moves: tuple[Move, ...]
    cost: float


def shortest_paths(
    source: AxisPlacement, extents: Extents, costs: CollectiveCosts
) -> Mapping[AxisPlacement, Path]:
    """Return the cheapest path from a placement to every reachable placement.

    Ties are resolved by the number of moves, then by the order of the search, so that all ranks find the same
    path.
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
    """Return the path by the documented search; see [Note: limits of a greedy search].

    Each step takes the one-step placement, along a single axis, with the least difference from the target;
    ties are resolved by cost. A placement is not visited twice.

    Raises:
        ValueError: `target` is not reached by the search from `source`.
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
    """Return the difference between two placements, as defined by the documented search.

    The common leading axes of each dimension count 0. Each further axis of `placement` counts 1, since it has
    to be gathered or reduced. Each further axis of `target` counts 1/2, since sharding is local.
    """
    total = float(len(set(placement.partial) ^ set(target.partial)))
    for has, wants in zip(placement.dims, target.dims, strict=True):
        agree = 0
        while agree < min(len(has), len(wants)) and has[agree] == wants[agree]:
            agree += 1
        total += (len(has) - agree) + 0.5 * (len(wants) - agree)
    return total
