"""Costs of moves: alpha for each collective and beta for each byte, counted or measured.

The model of Hockney (1994): a message of n bytes takes alpha + beta n. A ring of p ranks sends, for n bytes
that a rank gives, what the ledger of `communication` counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class CollectiveCosts(Protocol):
    """What says how much a collective costs: counted bytes by default, measured seconds of a mesh."""

    def cost(self, op: str, num_bytes: float, axes: Sequence[str]) -> float:
        """Return the cost of a collective, the same on all ranks.

        Args:
            op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
            num_bytes: The bytes of the larger of the tensors that a rank has before and after it, as in
                `colossalai.device`: of an all-gather the gathered one.
            axes: The axes that it runs along, taken together.
        """


@dataclass(frozen=True)
class MessageCosts:
    """Bytes that a rank sends and collectives that it joins: the default.

    The fewest bytes win, and of equal ones the fewest collectives. That holds for tensors of more than a few
    bytes; with a larger `alpha` small tensors go in fewer collectives and more bytes.

    Attributes:
        axes: The axes of the mesh and their extents.
        alpha: The cost of a collective.
        beta: The cost of a byte that a rank sends.
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
    """Return what a rank of a ring sends, as a part of the larger of its tensors."""
    return (2 if op == "all_reduce" else 1) * (num_ranks - 1) / num_ranks


def exchange_cost(costs: CollectiveCosts, num_bytes: float, axes: Sequence[str], num_ranks: int) -> float:
    """Return the cost of an uneven all-to-all: that of an even one whose ranks send so much.

    Args:
        costs: Of the collectives.
        num_bytes: What the busiest rank sends to others, or gets from them.
        axes: The axes that it runs along.
        num_ranks: The ranks along them.
    """
    return costs.cost("all_to_all", num_bytes * num_ranks / (num_ranks - 1), axes) if num_ranks > 1 else 0.0
