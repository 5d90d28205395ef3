"""Search of a logical shape: the grid of the ranks on which a list of operations is cheapest."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from colossalai.device._speed import OPERATIONS, MeshSpeed

NumBytes = float | Callable[[Mapping[str, int]], float]
"""Bytes of an operation, or a function of the numbers of ranks: `lambda ranks: 4e8 / ranks["tp"]`."""

Operation = tuple[str, NumBytes, str]


@dataclass(frozen=True)
class ShapeChoice:
    """A logical shape, and the time of a list of operations over it.

    Attributes:
        shape: The extents, outermost axis first.
        roles: The role of each axis.
        seconds: The sum over the operations.
    """

    shape: tuple[int, ...]
    roles: tuple[str, ...]
    seconds: float

    @property
    def num_ranks(self) -> dict[str, int]:
        """The number of ranks of each role."""
        return dict(zip(self.roles, self.shape, strict=True))


def search_shape(speed: MeshSpeed, operations: Sequence[Operation]) -> ShapeChoice:
    """Return the cheapest shape with one axis for each role; ties are broken by the order of the roles.

    All factorizations of the number of ranks are tried, each with the roles in all orders.

    Args:
        speed: Costs of operations over the ranks.
        operations: See `DeviceMesh.search_shape`.

    Raises:
        ValueError: `operations` is empty, has an unknown operation, or bytes that are negative or not a
            number, or its cost is infinite in every shape.
    """
    if not operations:
        raise ValueError("operations=[]: give at least one (operation, bytes, role of an axis)")
    for op, _, _ in operations:
        if op not in OPERATIONS:
            raise ValueError(f"operation {op!r}: choose one of {', '.join(OPERATIONS)}")
    roles = tuple(dict.fromkeys(role for _, _, role in operations))
    best: ShapeChoice | None = None
    for order in itertools.permutations(roles):
        for shape in _factorizations(math.prod(speed.shape), len(roles)):
            seconds = _seconds(speed.of_shape(shape), order, operations)
            if best is None or seconds < best.seconds:
                best = ShapeChoice(shape, order, seconds)
    assert best is not None, "one factorization is the number itself"
    if best.seconds == math.inf:
        raise ValueError("operations cost math.inf in every shape: allow some numbers of ranks")
    return best


def _seconds(speed: MeshSpeed, roles: Sequence[str], operations: Sequence[Operation]) -> float:
    num_ranks = dict(zip(roles, speed.shape, strict=True))
    axis_of = {role: str(number) for number, role in enumerate(roles)}
    total = 0.0
    for op, num_bytes, role in operations:
        size = num_bytes(num_ranks) if callable(num_bytes) else num_bytes
        if size == math.inf:  # also forbidden along an axis of one rank, where the cost would be 0
            return math.inf
        total += speed.cost(op, size, axis_of[role])
    return total


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all factorizations of a number into `count` factors, in all orders."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)
