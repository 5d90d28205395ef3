"""Which positions of the whole sequence a rank holds.

Contiguous: rank r of p holds the r-th of p chunks. Under a causal mask the first rank then has little to
compute and the last one much. Zigzag: rank r holds the chunks r and 2p-1-r of 2p, one early and one late, so
that all ranks have equally many pairs of a query and a key that it sees.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from colossalai.communication import gather_forward_split_backward, split_forward_gather_backward
from colossalai.context import Axis

Order = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive positions that a rank holds.

    Attributes:
        offset: Offset in the rank's tensor.
        start: Offset in the whole sequence.
        size: Number of positions.
    """

    offset: int
    start: int
    size: int

    def take(self, tensor: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """Return a view of these positions of the rank's tensor along `dim`."""
        return tensor.narrow(dim, self.offset, self.size)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions in the whole sequence."""
        return torch.arange(self.start, self.start + self.size, device=device)


def spans(order: Order, axis_rank: int, axis_size: int, sub_seq: int, *, longest: int) -> list[TokenSpan]:
    """Return the positions of a rank as spans of at most `longest` positions, in the order of its tensor."""
    chunks = _chunks(order, axis_rank, axis_size)
    chunk_size = sub_seq // len(chunks)
    return [
        TokenSpan(index * chunk_size + begin, chunk * chunk_size + begin, min(longest, chunk_size - begin))
        for index, chunk in enumerate(chunks)
        for begin in range(0, chunk_size, longest)
    ]


def check_order(order: str, sub_seq: int) -> None:
    """Refuse an order that there is not, and a sub-sequence that it cannot have.

    Raises:
        ValueError: `order` is unknown, or is "zigzag" and `sub_seq` is odd.
    """
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}; it must be one of {get_args(Order)}")
    if order == "zigzag" and sub_seq % 2:
        raise ValueError(
            f"a rank holds {sub_seq} positions: in zigzag order it holds two chunks of equal length; pad the "
            "sequence to a multiple of 2 x ranks, or use order='contiguous'"
        )


def zigzag_split(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """Return this rank's positions, in zigzag order, of a tensor that all ranks hold whole.

    The backward gathers the gradients of all ranks: every rank gets the gradient of the whole.

    Args:
        x: The whole, the same on all ranks.
        dim: The dimension of the sequence.
        axis: The ranks that share it.

    Raises:
        ValueError: Twice the number of ranks does not divide the sequence.
    """
    by_rank = _zigzag_permutation(x.shape[dim], axis.size).to(x.device)
    return split_forward_gather_backward(x.index_select(dim, by_rank), axis, dim)


def zigzag_gather(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """Return the whole, in the order of the sequence, of which every rank holds its zigzag part.

    In the backward every rank keeps its part of the gradient, which must be the same on all ranks: they use
    the whole alike.

    Args:
        x: This rank's part.
        dim: The dimension of the sequence.
        axis: The ranks that share it.
    """
    by_position = _zigzag_permutation(x.shape[dim] * axis.size, axis.size).argsort().to(x.device)
    return gather_forward_split_backward(x, axis, dim).index_select(dim, by_position)


def zigzag_positions(seq_length: int, axis: Axis, *, device: torch.device | None = None) -> torch.Tensor:
    """Return `own_positions` in zigzag order."""
    return own_positions(seq_length, axis, order="zigzag", device=device)


def own_positions(
    seq_length: int, axis: Axis, *, order: Order, device: torch.device | None = None
) -> torch.Tensor:
    """Return the positions in the whole sequence that this rank holds, for position embeddings.

    Args:
        seq_length: Length of the whole sequence.
        axis: The ranks that share it.
        order: Which positions a rank holds.
        device: Device of the result.

    Raises:
        ValueError: The ranks do not divide the sequence, in zigzag order twice their number does not.
    """
    if order == "zigzag":
        return _zigzag_permutation(seq_length, axis.size).chunk(axis.size)[axis.rank].to(device)
    if seq_length % axis.size:
        raise ValueError(
            f"a sequence of {seq_length} positions, which {axis.size} ranks do not divide: pad it to a "
            f"multiple of {axis.size}"
        )
    return torch.arange(seq_length, device=device).chunk(axis.size)[axis.rank]


def rank_by_rank(
    seq_length: int, axis_size: int, *, order: Order, device: torch.device
) -> torch.Tensor | None:
    """Return the positions that the ranks hold, one rank after the other; None where that is their order."""
    if order == "contiguous" or axis_size == 1:
        return None
    return _zigzag_permutation(seq_length, axis_size).to(device)


def _zigzag_permutation(seq_length: int, axis_size: int) -> torch.Tensor:
    """Return the positions that the ranks hold, one rank after the other."""
    if seq_length % (2 * axis_size):
        raise ValueError(
            f"a sequence of {seq_length} positions over {axis_size} ranks: zigzag order cuts it into "
            f"{2 * axis_size} chunks of equal length; pad it to a multiple of that"
        )
    chunks = torch.arange(seq_length).view(2 * axis_size, -1)
    return torch.cat([chunks[_chunks("zigzag", rank, axis_size)].flatten() for rank in range(axis_size)])


def _chunks(order: Order, axis_rank: int, axis_size: int) -> list[int]:
    return [axis_rank] if order == "contiguous" else [axis_rank, 2 * axis_size - 1 - axis_rank]
