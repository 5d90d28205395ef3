"""Costs of moves: alpha for each collective and beta for each byte, counted or measured.

The model of Hockney (1994): a message of n bytes takes alpha + beta n. The bytes of a ring of p ranks are
those that the ledger of `communication` counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class CollectiveCosts(Protocol):
    """Cost model of collectives: counted bytes (the default), or measured seconds of a mesh."""

    def cost(self, op: str, num_bytes: float, axes: Sequence[str]) -> float:
        """Return the cost of a collective, the same on all ranks.

        Args:
            op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
            num_bytes: Size in bytes of the larger of a rank's input and output, as in `colossalai.device`:
                the output of an all-gather.
            axes: Axes of the collective, flattened.
        """


@dataclass(frozen=True)
class MessageCosts:
    """Default costs: the bytes that a rank sends and the collectives that it joins.

    The plan with the fewest bytes is the cheapest, and among equal ones the plan with the fewest collectives.
    This holds for tensors of more than a few bytes; with a larger `alpha`, small tensors are sent in fewer
    collectives and more bytes.

    Attributes:
        axes: Axes of the mesh and their extents.
        alpha: Cost of a collective.
        beta: Cost of a byte that a rank sends.
    """

    axes: Mapping[str, int]
    alpha: float = 1.0
    beta: float = 1.0

    def cost(self, op: str, num_bytes: float, axes: Sequence[str]) -> float:
        """Return the cost of a collective over a ring."""
        count = 1
        for axis in axes:
            count *= self.axes[axis]
        return self.alpha + self.beta * num_bytes * _sent(op, count)


def _sent(op: str, num_ranks: int) -> float:
    """Return the bytes that a rank of a ring sends, as a fraction of the larger of its tensors."""
    return (2 if op == "all_reduce" else 1) * (num_ranks - 1) / num_ranks


def exchange_cost(costs: CollectiveCosts, num_bytes: float, axes: Sequence[str], num_ranks: int) -> float:
    """Return the cost of an uneven all-to-all: the cost of an even one with the busiest rank's bytes.

    Args:
        costs: Cost model of the collectives.
        num_bytes: Maximum over the ranks of the bytes sent to, or received from, other ranks.
        axes: Axes of the all-to-all.
        num_ranks: Number of ranks along the axes.
    """
    return costs.cost("all_to_all", num_bytes * num_ranks / (num_ranks - 1), axes) if num_ranks > 1 else 0.0
