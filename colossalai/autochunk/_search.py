"""RegionChoice of regions and chunk sizes: the least estimated time within a budget of bytes.

[Note: the choice of regions]
Regions are disjoint ranges, and a region changes the live bytes only of its own operations: at all others
the same storages live. So the fastest choice within a budget is a shortest path over positions: an operation
within the budget is an edge to the next one, and a region is an edge from its first operation to the position
after its last one, with the largest chunk size that the budget allows. The smallest possible budget is the
path whose largest number of bytes is least.

The memory of a region is an estimate (a strided slice may be copied, hoisting moves operations). After the
graph has been rewritten it is profiled; the excess is added to the estimate of its region, and the choice is
repeated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from colossalai.autochunk._flow import MOST_OPERATIONS, Candidates, candidates_of
from colossalai.autochunk._profile import BYTES_PER_SECOND, SECONDS_PER_CALL, GraphProfile


@dataclass(frozen=True)
class RegionChoice:
    """A region and its chunk size.

    Attributes:
        first: Position of its first operation.
        last: Position of its last operation.
        choices: Dimension of each free operation, by position.
        size: Elements of a chunk.
        seconds: Estimated time that the loop adds.
        estimate: Estimated bytes that live at most within the region.
        key: Identity of the region in the search; the same for repeated blocks.
    """

    first: int
    last: int
    choices: Mapping[int, int]
    size: int
    seconds: float = 0.0
    estimate: int = 0
    key: Any = None


class RegionSearch:
    """Search for regions, see [Note: the choice of regions].

    Args:
        profile: The profile of the graph.
        inplace: Whether outputs of regions take the memory of inputs.

    Attributes:
        excess: Bytes that the estimate of a region lacks, by its window and its number there.
    """

    def __init__(self, profile: GraphProfile, *, inplace: bool) -> None:
        self.excess: dict[bytes, dict[int, int]] = {}
        self._profile = profile
        self._inplace = inplace
        self._windows = _windows(profile)
        self._found: dict[bytes, Candidates] = {}

    def fastest(self, budget: int) -> list[RegionChoice] | None:
        """Return the regions of the least estimated time within a budget; None if there are none."""
        profile = self._profile
        too_large = profile.live > budget
        near = _near(too_large)
        cost = np.full(len(profile.nodes) + 1, math.inf)
        cost[0] = 0.0
        edges: dict[int, RegionChoice] = {}
        for last in range(len(profile.nodes)):
            if not too_large[last]:
                cost[last + 1] = cost[last]
            if not near[last]:
                continue
            found = self._candidates(last)
            first = last + 1 - found.num_operations
            # The largest chunks: the live set within a region is proportional to the elements of a chunk.
            room = budget - self._fixed(found, last)
            sizes = np.minimum(room * found.extent // np.maximum(found.inner, 1), found.extent)
            num_chunks = -(-found.extent // np.maximum(sizes, 1))
            seconds = _added_seconds(found, num_chunks)
            # With one chunk, the region is as it was.
            total = np.where((sizes < 1) | (num_chunks < 2), math.inf, seconds + cost[first])
            if len(total) and total[best := int(total.argmin())] < cost[last + 1]:
                cost[last + 1] = total[best]
                size = -(-int(found.extent[best]) // int(num_chunks[best]))  # of about equal chunks
                edges[last] = self._choice(found, best, last, size, float(seconds[best]))
        return _path(edges, len(too_large)) if math.isfinite(cost[-1]) else None

    def smallest(self) -> tuple[list[RegionChoice], int]:
        """Return the regions of the smallest peak, with chunks of one element, and where the peak is."""
        profile = self._profile
        most = np.zeros(len(profile.nodes) + 1, dtype=np.int64)
        edges: dict[int, RegionChoice] = {}
        for last in range(len(profile.nodes)):
            most[last + 1] = max(most[last], int(profile.live[last]))
            found = self._candidates(last)
            if not len(found.extent):
                continue
            first = last + 1 - found.num_operations
            peaks = np.maximum(most[first], self._fixed(found, last) + found.inner // found.extent)
            best = int(peaks.argmin())
            if peaks[best] < most[last + 1]:
                most[last + 1] = peaks[best]
                seconds = float(_added_seconds(found, found.extent)[best])
                edges[last] = self._choice(found, best, last, 1, seconds)
        return _path(edges, len(profile.nodes)), int(most[-1])

    def correct(self, choice: RegionChoice, num_bytes: int) -> None:
        """Add bytes to the estimates of a region and of its repetitions in other blocks."""
        window, number = choice.key
        of_window = self.excess.setdefault(window, {})
        of_window[number] = of_window.get(number, 0) + num_bytes

    def _window(self, last: int) -> bytes:
        return self._windows[last : last + MOST_OPERATIONS].tobytes()

    def _candidates(self, last: int) -> Candidates:
        """Return the regions with a last operation; those of repeated blocks are found once."""
        window = self._window(last)
        if window not in self._found:
            self._found[window] = candidates_of(self._profile, last, inplace=self._inplace)
        return self._found[window]

    def _fixed(self, found: Candidates, last: int) -> np.ndarray:
        """Return the bytes of each region that do not depend on its chunk size."""
        fixed: np.ndarray = self._profile.before[last + 1 - found.num_operations] + found.fixed
        for number, excess in self.excess.get(self._window(last), {}).items():
            fixed[number] += excess
        return fixed

    def _choice(self, found: Candidates, number: int, last: int, size: int, seconds: float) -> RegionChoice:
        choices = {last - distance: dim for distance, dim in found.choices[number].items()}
        inner = int(found.inner[number]) * size // int(found.extent[number])
        return RegionChoice(
            first=last + 1 - int(found.num_operations[number]),
            last=last,
            choices=choices,
            size=size,
            seconds=seconds,
            estimate=int(self._fixed(found, last)[number]) + inner,
            key=(self._window(last), number),
        )


def _added_seconds(found: Candidates, num_chunks: np.ndarray) -> np.ndarray:
    """Return the estimated time that the loops add."""
    again = found.num_chunked * SECONDS_PER_CALL + found.reread / BYTES_PER_SECOND
    return (num_chunks - 1) * again + 2 * found.moved / BYTES_PER_SECOND


def _near(too_large: np.ndarray) -> np.ndarray:
    """Return the positions that can end a region with an operation beyond the budget."""
    count = np.concatenate([[0], np.cumsum(too_large)])
    ends = np.arange(1, len(too_large) + 1)
    return count[ends] > count[np.maximum(0, ends - MOST_OPERATIONS)]


def _path(edges: Mapping[int, RegionChoice], num_operations: int) -> list[RegionChoice]:
    """Return the regions of the best path, in order: from its end, each region leads to where it begins."""
    path: list[RegionChoice] = []
    last = num_operations - 1
    while last >= 0:
        if last in edges:
            path.append(edges[last])
            last = edges[last].first - 1
        else:
            last -= 1
    return path[::-1]


def _windows(profile: GraphProfile) -> np.ndarray:
    """Return a number for each operation, preceded by zeros; equal windows have equal candidates."""
    numbers: dict[Any, int] = {}
    found = [0] * (MOST_OPERATIONS - 1)
    for position, node in enumerate(profile.nodes):
        found.append(numbers.setdefault(_signature(profile, position, node), len(numbers) + 1))
    return np.array(found, dtype=np.int32)


def _signature(profile: GraphProfile, position: int, node: fx.Node) -> Any:
    """Return all properties of an operation that a walk depends on, with relative positions."""

    def relative(other: fx.Node) -> Any:
        at = profile.positions.get(other)
        is_far = at is None or position - at >= MOST_OPERATIONS
        return ("far", at is None) if is_far else position - at  # type: ignore[operator]

    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            shown = value.meta["val"]
            shape = (tuple(shown.shape), shown.dtype) if isinstance(shown, Tensor) else ()
            return relative(value), shape
        if isinstance(value, tuple | list):
            return tuple(map(described, value))
        return repr(value)

    made = [profile.storages[number] for number in profile.of_node[position]]
    value = node.meta["val"]
    return (
        str(node.target),
        described(node.args),
        tuple((name, described(each)) for name, each in node.kwargs.items()),
        (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else repr(value),
        tuple(
            (
                each.size,
                min(position - each.first, MOST_OPERATIONS),
                min(each.last - position, MOST_OPERATIONS),
            )
            for each in made
        ),
        profile.temporary[position],
        position in profile.own_writes,
        tuple(
            (
                number in profile.copied_and_written,
                *(min(at - position, MOST_OPERATIONS) for at in profile.writes.get(number, ())),
            )
            for number in profile.of_node[position]
        ),
        tuple(
            sorted(
                min(profile.positions.get(user, len(profile.nodes)) - position, MOST_OPERATIONS)
                for user in node.users
            )
        ),
    )
