"""Keys and values of a layer in blocks of a pool, as they are or in 8 bits.

[Note: keys in bytes]
torch sums rows of bytes, each with a scale and an offset behind it, as it sums rows of floats (8 bytes a row,
and the range of a row is that of its values). A row of values belongs to one token and one head, and is
rounded when it comes. A row of keys has one feature of a block of tokens, which come one by one: with a range
of its own it would be rounded anew for each, and what is stored would depend on how a prompt was cut. So each
key has its own scale, kept apart, all rows have the same range, and scores are multiplied by the scales of
their keys afterwards: what is stored of a token depends on nothing but the token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

_SUFFIX = 8  # bytes behind a row: its scale and its offset, each float32
_STEPS = 127
_OFFSET = 128
_LEAST = 1e-30


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a token.

    Attributes:
        num_heads: Heads of keys and values on this rank.
        key_size: Features of a key.
        value_size: Features of a value.
        dtype: Type of both.
        is_in_bytes: Whether they are rounded to 8 bits.
    """

    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    is_in_bytes: bool = False

    def bytes_of_block(self, block_size: int) -> int:
        """Return the bytes of a block of so many tokens."""
        if not self.is_in_bytes:
            return block_size * self.num_heads * (self.key_size + self.value_size) * self.dtype.itemsize
        keys = self.key_size * (block_size + _SUFFIX) + block_size * torch.float32.itemsize
        return self.num_heads * (keys + block_size * (self.value_size + _SUFFIX))


@dataclass(frozen=True)
class TokenSlots:
    """Where the tokens of a step are stored: block, place in the block, and both as one number."""

    blocks: Tensor
    offsets: Tensor
    slots: Tensor


class LayerCache(ABC):
    """Keys and values of one layer, in blocks.

    Args:
        shape: What it keeps of a token.
        block_size: Tokens of a block.
    """

    def __init__(self, shape: LayerShape, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size

    @property
    @abstractmethod
    def pools(self) -> tuple[Tensor, ...]:
        """The memory, by blocks."""

    @abstractmethod
    def write(self, places: TokenSlots, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens.

        Args:
            places: Where they belong.
            key: (tokens, heads, key_size).
            value: (tokens, heads, value_size).

        Returns:
            Both as they will be read.
        """

    @abstractmethod
    def read(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence, copied: each (heads, length, size)."""

    @abstractmethod
    def keys_of(self, table: Tensor) -> Tensor:
        """Return the keys of blocks (queries, blocks), copied: (queries, heads, key_size, positions)."""

    @abstractmethod
    def values_of(self, slots: Tensor) -> Tensor:
        """Return the values of slots (queries, positions), copied: (queries, heads, positions, size)."""

    @abstractmethod
    def score(self, rows: Tensor, starts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return products of queries with keys. See [Note: attention as bags of rows].

        Args:
            rows: Of keys, for (query, head, block, feature).
            starts: Where each bag of these begins.
            weights: For each row the feature of the query.
            slots: For (query, head, position) the slot and head of a key.

        Returns:
            (queries x heads x blocks, block_size), in the type of `weights`.
        """

    @abstractmethod
    def sum_values(self, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        """Return (bags, value_size): sums of values, each times its weight, in the type of `weights`."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks."""
        for pool in self.pools:
            pool.index_copy_(0, targets, pool.index_select(0, sources))


class FloatLayerCache(LayerCache):
    """Keys and values as they are.

    Args:
        shape: What it keeps of a token.
        num_blocks: Number of blocks.
        block_size: Tokens of a block.
        device: Where they are.
    """

    def __init__(self, shape: LayerShape, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        heads = shape.num_heads
        super().__init__(shape, block_size)
        self.keys = torch.zeros(
            num_blocks, heads, shape.key_size, block_size, dtype=shape.dtype, device=device
        )
        self.values = torch.zeros(
            num_blocks, block_size, heads, shape.value_size, dtype=shape.dtype, device=device
        )
        # (blocks, tokens, features) and (slots, features): what is written to.
        self._keys_by_token = self.keys.flatten(1, 2).transpose(1, 2)
        self._values_by_slot = self.values.view(num_blocks * block_size, heads * shape.value_size)

    def write(self, places: TokenSlots, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens."""
        self._keys_by_token.index_put_((places.blocks, places.offsets), key.flatten(1))
        self._values_by_slot.index_copy_(0, places.slots, value.flatten(1))
        return key, value

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The memory, by blocks."""
        return self.keys, self.values

    def read(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence, copied: each (heads, length, size)."""
        keys = self.keys.index_select(0, blocks).permute(1, 0, 3, 2).flatten(1, 2)
        values = self.values.index_select(0, blocks).flatten(0, 1).transpose(0, 1)
        return keys[:, :length], values[:, :length]

    def keys_of(self, table: Tensor) -> Tensor:
        """Return the keys of blocks, copied."""
        blocks = self.keys.index_select(0, table.flatten()).unflatten(0, table.shape)
        found: Tensor = blocks.permute(0, 2, 3, 1, 4).flatten(3)
        return found

    def values_of(self, slots: Tensor) -> Tensor:
        """Return the values of slots, copied."""
        rows = self._values_by_slot.index_select(0, slots.flatten())
        return rows.view(*slots.shape, self.shape.num_heads, -1).transpose(1, 2)

    def score(self, rows: Tensor, starts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return products of queries with keys."""
        return _sum_rows(self.keys.view(-1, self.block_size), rows, starts, weights)

    def sum_values(self, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        """Return sums of values, each times its weight."""
        return _sum_rows(self.values.view(-1, self.shape.value_size), rows, starts, weights)


class ByteLayerCache(LayerCache):
    """Keys and values in 8 bits, on CPU. See [Note: keys in bytes].

    Args:
        shape: What it keeps of a token.
        num_blocks: Number of blocks.
        block_size: Tokens of a block.
    """

    def __init__(self, shape: LayerShape, *, num_blocks: int, block_size: int) -> None:
        super().__init__(shape, block_size)
        heads = shape.num_heads
        self.keys = torch.zeros(num_blocks, heads, shape.key_size, block_size + _SUFFIX, dtype=torch.uint8)
        self.keys[..., block_size:] = torch.tensor([1.0, -_OFFSET]).view(torch.uint8)
        self.key_scales = torch.zeros(num_blocks, block_size, heads)
        self.values = torch.zeros(
            num_blocks, block_size, heads, shape.value_size + _SUFFIX, dtype=torch.uint8
        )
        self._keys_by_token = self.keys[..., :block_size].flatten(1, 2).transpose(1, 2)
        self._scales_by_slot = self.key_scales.view(num_blocks * block_size, heads)
        self._values_by_slot = self.values.view(num_blocks * block_size, -1)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The memory, by blocks."""
        return self.keys, self.key_scales, self.values

    def write(self, places: TokenSlots, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens."""
        scales = key.float().abs().amax(-1, keepdim=True).div_(_STEPS).clamp_(min=_LEAST)
        codes = (key.float() / scales).add_(_OFFSET + 0.5).to(torch.uint8)
        rows = torch.ops.quantized.embedding_bag_byte_prepack(value.float().flatten(0, 1))
        self._keys_by_token.index_put_((places.blocks, places.offsets), codes.flatten(1))
        self._scales_by_slot.index_copy_(0, places.slots, scales.squeeze(-1))
        self._values_by_slot.index_copy_(0, places.slots, rows.view(len(value), -1))
        stored = torch.ops.quantized.embedding_bag_byte_unpack(rows).view(value.shape)
        return (codes.float() - _OFFSET).mul_(scales).to(key.dtype), stored.to(value.dtype)

    def read(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence, copied: each (heads, length, size)."""
        keys = self._keys_in(blocks).permute(1, 0, 3, 2).flatten(1, 2)
        rows = self.values.index_select(0, blocks).flatten(0, 1)
        values = torch.ops.quantized.embedding_bag_byte_unpack(rows.flatten(0, 1))
        by_head = values.view(len(rows), self.shape.num_heads, -1).transpose(0, 1)
        return keys[:, :length].to(self.shape.dtype), by_head[:, :length].to(self.shape.dtype)

    def keys_of(self, table: Tensor) -> Tensor:
        """Return the keys of blocks, copied."""
        blocks = self._keys_in(table.flatten()).unflatten(0, table.shape)
        found: Tensor = blocks.permute(0, 2, 3, 1, 4).flatten(3).to(self.shape.dtype)
        return found

    def values_of(self, slots: Tensor) -> Tensor:
        """Return the values of slots, copied."""
        rows = self._values_by_slot.index_select(0, slots.flatten()).view(-1, self.values.shape[-1])
        values: Tensor = torch.ops.quantized.embedding_bag_byte_unpack(rows)
        return values.view(*slots.shape, self.shape.num_heads, -1).transpose(1, 2).to(self.shape.dtype)

    def _keys_in(self, blocks: Tensor) -> Tensor:
        """Return (blocks, heads, key_size, block_size) in float32."""
        codes = self.keys[..., : self.block_size].index_select(0, blocks).float().sub_(_OFFSET)
        scales = self.key_scales.index_select(0, blocks).transpose(1, 2).unsqueeze(2)
        return codes.mul_(scales)

    def score(self, rows: Tensor, starts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return products of queries with keys."""
        summed = _sum_bytes(self.keys.view(-1, self.block_size + _SUFFIX), rows, starts, weights)
        scales = self.key_scales.view(-1).index_select(0, slots)
        return summed.mul_(scales.view(summed.shape)).to(weights.dtype)

    def sum_values(self, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        """Return sums of values, each times its weight."""
        table = self.values.view(-1, self.shape.value_size + _SUFFIX)
        return _sum_bytes(table, rows, starts, weights).to(weights.dtype)


def _sum_rows(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return (bags, columns): sums of rows of a table, each times its weight."""
    # The operator below `functional.embedding_bag`: 20 us a call less of checks, and no gradients.
    summed: Tensor = torch._embedding_bag_forward_only(
        table, rows, starts, False, 0, False, weights, False, -1
    )[0]
    return summed


def _sum_bytes(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return the same in float32 of rows of bytes, each with its scale and offset behind it."""
    summed: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        table, rows, starts, False, 0, False, weights.float(), None, False
    )
    return summed
