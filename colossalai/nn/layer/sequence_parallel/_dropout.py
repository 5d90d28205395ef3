"""Dropout masks that depend on positions only: they can be drawn again, in pieces of any size.

Whether the weight of key j for query i is dropped is a hash of (seed, sample, head, i, j). So the backward
draws the mask of the forward without keeping it, and neither the number of ranks, nor the order, nor the size
of the tiles, nor the device changes the result.

Each row (sample, head, i) and each column j has a 32-bit key out of 64 well mixed bits (the finalizer of
splitmix64, Steele et al. 2014); an element is the sum of its row's and its column's key, mixed by two rounds
of multiplication and shift (Wellons' `lowbias32`).
"""

import torch

from colossalai.communication import broadcast
from colossalai.context import Axis, drawing_by_batch
from colossalai.nn.layer.sequence_parallel._order import TokenSpan

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_MIX_64 = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
_MIX_32 = ((16, 0x7FEB352D), (15, -0x7B935975))


def draw_seed(axis: Axis, device: torch.device) -> int | torch.Tensor:
    """Draw a seed that the ranks of a sequence share: the number of the first of them.

    It is drawn from the state in force, which recomputation restores and which differs along the sequence, so
    it is broadcast: 8 bytes, which stay on the device.

    Args:
        axis: The ranks that share the sequence.
        device: Device of the seed.
    """
    with drawing_by_batch():
        number = torch.randint(2**62, (), device="cpu")
    if axis.size == 1:
        return int(number)
    return broadcast(number.to(device), axis.ranks[0], axis)


def dropout_factors(
    like: torch.Tensor,
    queries: TokenSpan,
    keys: TokenSpan,
    *,
    dropout_seed: int | torch.Tensor,
    dropout_p: float,
    lanes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return 0 with probability `dropout_p`, else 1 / (1 - dropout_p), for a tile of weights.

    Args:
        like: A tile (batch, heads, queries, keys); the result has its shape, type and device.
        queries: Their positions.
        keys: Their positions.
        dropout_seed: Seed of the whole mask; a tensor () on the device of `like`, or a number.
        dropout_p: From 0 to below 1.
        lanes: (batch, heads), the number of each sample and head; None: they are counted, as all there are.
    """
    if lanes is None:
        lanes = numbered_lanes(*like.shape[:2], device=like.device)
    rows = _key((lanes[:, :, None, None] << 32) + queries.positions(like.device)[:, None], dropout_seed)
    columns = _key(keys.positions(like.device), ~dropout_seed)
    bits = _mix32(rows + columns)
    threshold = round(dropout_p * 2**32) - 2**31  # bits are spread evenly over the signed 32-bit numbers
    return (bits >= threshold).to(like.dtype).mul_(1.0 / (1.0 - dropout_p))


def numbered_lanes(batch: int, heads: int, *, device: torch.device) -> torch.Tensor:
    """Return a number for each head of each sample, (batch, heads), which identifies its mask."""
    return torch.arange(batch * heads, device=device).view(batch, heads)


def _key(counter: torch.Tensor, salt: int | torch.Tensor) -> torch.Tensor:
    """Return 32 mixed bits for each counter."""
    x = (counter + 1) * _GOLDEN ^ _mix64(torch.as_tensor(salt, device=counter.device))
    return _mix64(x).to(torch.int32)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in _MIX_64:
        x = (x ^ _shift_right(x, shift, 64)) * factor
    return x ^ _shift_right(x, 31, 64)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Mix in place."""
    for shift, factor in _MIX_32:
        x.bitwise_xor_(_shift_right(x, shift, 32)).mul_(factor)
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def _shift_right(x: torch.Tensor, shift: int, width: int) -> torch.Tensor:
    """Shift as if `x` had no sign."""
    return (x >> shift).bitwise_and_((1 << (width - shift)) - 1)
