"""Cache of the keys and values of a layer in blocks of a pool, in the model's dtype or in 8 bits.

[Note: keys in bytes]
torch sums rows of bytes, each followed by a scale and an offset, like rows of floats (8 more bytes per row;
the scale covers the range of the row's values). A row of values belongs to one token and one head, and is
quantized once. A row of keys has one feature of a block of tokens, which arrive one by one: with its own
range it would be quantized again for each token, and the result would depend on the chunks of a prompt. So
each key has its own scale in a separate tensor, all rows have the same range, and scores are multiplied by
the scales of their keys afterwards: the stored values of a token depend on that token only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

_SUFFIX = 8  # bytes at the end of a row: its scale and its offset, each float32
_STEPS = 127
_OFFSET = 128
_LEAST = 1e-30


@dataclass(frozen=True)
class LayerShape:
    """Shape and dtype of the keys and values of a token in a layer.

    Attributes:
        num_heads: Number of key and value heads on this rank.
        key_size: Number of features of a key.
        value_size: Number of features of a value.
        dtype: Dtype of both.
        is_in_bytes: Whether they are quantized to 8 bits.
    """

    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    is_in_bytes: bool = False

    def bytes_of_block(self, block_size: int) -> int:
        """Return the size of a block of `block_size` tokens in bytes."""
        if not self.is_in_bytes:
            return block_size * self.num_heads * (self.key_size + self.value_size) * self.dtype.itemsize
        keys = self.key_size * (block_size + _SUFFIX) + block_size * torch.float32.itemsize
        return self.num_heads * (keys + block_size * (self.value_size + _SUFFIX))


@dataclass(frozen=True)
class TokenSlots:
    """Slots of the tokens of a step: block, offset in the block, and both as one number."""

    blocks: Tensor
    offsets: Tensor
    slots: Tensor


class LayerCache(ABC):
    """Abstract: keys and values of one layer, in blocks.

    Args:
        shape: Shape of a token's keys and values.
        block_size: Number of tokens of a block.
    """

    def __init__(self, shape: LayerShape, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size

    @property
    @abstractmethod
    def pools(self) -> tuple[Tensor, ...]:
        """The tensors of the cache, with blocks in dim 0."""

    @abstractmethod
    def write(self, places: TokenSlots, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens.

        Args:
            places: Slots of the tokens.
            key: (tokens, heads, key_size).
            value: (tokens, heads, value_size).

        Returns:
            Both as later reads return them.
        """

    @abstractmethod
    def read(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a sequence, each (heads, length, size)."""

    @abstractmethod
    def keys_of(self, table: Tensor) -> Tensor:
        """Return a copy of the keys of blocks (queries, blocks): (queries, heads, key_size, positions)."""

    @abstractmethod
    def values_of(self, slots: Tensor) -> Tensor:
        """Return a copy of the values of slots (queries, positions): (queries, heads, positions, size)."""

    @abstractmethod
    def score(self, rows: Tensor, starts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return products of queries and keys. See [Note: attention as bags of rows].

        Args:
            rows: Rows of keys, for (query, head, block, feature).
            starts: Offsets of the bags of `rows`.
            weights: Feature of the query for each row.
            slots: Slot and head of a key, for (query, head, position).

        Returns:
            (queries x heads x blocks, block_size), in the dtype of `weights`.
        """

    @abstractmethod
    def sum_values(self, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        """Return (bags, value_size): weighted sums of values, in the dtype of `weights`."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks."""
        for pool in self.pools:
            pool.index_copy_(0, targets, pool.index_select(0, sources))


class FloatLayerCache(LayerCache):
    """Cache of keys and values in the model's dtype.

    Args:
        shape: Shape of a token's keys and values.
        num_blocks: Number of blocks.
        block_size: Number of tokens of a block.
        device: Device of the cache.
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
        # Views for writes: (blocks, tokens, features) and (slots, features).
        self._keys_by_token = self.keys.flatten(1, 2).transpose(1, 2)
        self._values_by_slot = self.values.view(num_blocks * block_size, heads * shape.value_size)

    def write(self, places: TokenSlots, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens."""
        self._keys_by_token.index_put_((places.blocks, places.offsets), key.flatten(1))
        self._values_by_slot.index_copy_(0, places.slots, value.flatten(1))
        return key, value

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The tensors of the cache, with blocks in dim 0."""
        return self.keys, self.values

    def read(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a sequence, each (heads, length, size)."""
        keys = self.keys.index_select(0, blocks).permute(1, 0, 3, 2).flatten(1, 2)
        values = self.values.index_select(0, blocks).flatten(0, 1).transpose(0, 1)
        return keys[:, :length], values[:, :length]

    def keys_of(self, table: Tensor) -> Tensor:
        """Return a copy of the keys of blocks."""
        blocks = self.keys.index_select(0, table.flatten()).unflatten(0, table.shape)
        found: Tensor = blocks.permute(0, 2, 3, 1, 4).flatten(3)
        return found

    def values_of(self, slots: Tensor) -> Tensor:
        """Return a copy of the values of slots."""
        rows = self._values_by_slot.index_select(0, slots.flatten())
        return rows.view(*slots.shape, self.shape.num_heads, -1).transpose(1, 2)

    def score(self, rows: Tensor, starts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return products of queries and keys."""
        return _sum_rows(self.keys.view(-1, self.block_size), rows, starts, weights)

    def sum_values(self, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        """Return weighted sums of values."""
        return _sum_rows(self.values.view(-1, self.shape.value_size), rows, starts, weights)


class ByteLayerCache(LayerCache):
    """Cache of keys and values in 8 bits, on CPU. See [Note: keys in bytes].

    Args:
        shape: Shape of a token's keys and values.
        num_blocks: Number of blocks.
        block_size: Number of tokens of a block.
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
        """The tensors of the cache, with blocks in dim 0."""
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
        """Return copies of the keys and values of a sequence, each (heads, length, size)."""
        keys = self._keys_in(blocks).permute(1, 0, 3, 2).flatten(1, 2)
        rows = self.values.index_select(0, blocks).flatten(0, 1)
        values = torch.ops.quantized.embedding_bag_byte_unpack(rows.flatten(0, 1))
        by_head = values.view(len(rows), self.shape.num_heads, -1).transpose(0, 1)
        return keys[:, :length].to(self.shape.dtype), by_head[:, :length].to(self.shape.dtype)

    def keys_of(self, table: Tensor) -> Tensor:
        """Return a copy of the keys of blocks."""
        blocks = self._keys_in(table.flatten()).unflatten(0, table.shape)
        found: Tensor = blocks.permute(0, 2, 3, 1, 4).flatten(3).to(self.shape.dtype)
        return found

    def values_of(self, slots: Tensor) -> Tensor:
        """Return a copy of the values of slots."""
        rows = self._values_by_slot.index_select(0, slots.flatten()).view(-1, self.values.shape[-1])
        values: Tensor = torch.ops.quantized.embedding_bag_byte_unpack(rows)
        return values.view(*slots.shape, self.shape.num_heads, -1).transpose(1, 2).to(self.shape.dtype)

    def _keys_in(self, blocks: Tensor) -> Tensor:
        """Return (blocks, heads, key_size, block_size) in float32."""
        codes = self.keys[..., : self.block_size].index_select(0, blocks).float().sub_(_OFFSET)
        scales = self.key_scales.index_select(0, blocks).transpose(1, 2).unsqueeze(2)
        return codes.mul_(scales)

    def score(self, rows: Tensor, starts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return products of queries and keys."""
        summed = _sum_bytes(self.keys.view(-1, self.block_size + _SUFFIX), rows, starts, weights)
        scales = self.key_scales.view(-1).index_select(0, slots)
        return summed.mul_(scales.view(summed.shape)).to(weights.dtype)

    def sum_values(self, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        """Return weighted sums of values."""
        table = self.values.view(-1, self.shape.value_size + _SUFFIX)
        return _sum_bytes(table, rows, starts, weights).to(weights.dtype)


def _sum_rows(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return (bags, columns): weighted sums of rows of a table."""
    # The operator behind `functional.embedding_bag`, 20 us faster per call: fewer checks, no gradients.
    summed: Tensor = torch._embedding_bag_forward_only(
        table, rows, starts, False, 0, False, weights, False, -1
    )[0]
    return summed


def _sum_bytes(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return the same in float32 for rows of bytes, each followed by its scale and offset."""
    summed: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        table, rows, starts, False, 0, False, weights.float(), None, False
    )
    return summed
