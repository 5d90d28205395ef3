"""Batches of encoded texts: padded tensors, and loaders that give each rank its own part.

Order, position and resumption are those of the loader of `colossalai.runtime`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from colossalai.chat.data._encode import EncodedData, EncodedPair, EncodedText
from colossalai.chat.data._pack import PackedText, pack, packed_attention_mask
from colossalai.runtime import DataParallelLoader, make_dataloader

_PADDING_SEGMENT = -1


def places_in_batches(
    lengths: Sequence[int], *, rows: int, tokens: int | None = None, multiple_of: int = 1, at_least: int = 1
) -> list[list[int]]:
    """Divide texts into batches; texts of similar lengths share a batch, to reduce padding.

    Args:
        lengths: Number of tokens of each text; at least one text.
        rows: Maximum number of texts of a batch.
        tokens: Maximum number of tokens of a batch, with padding; a longer text is a batch by itself. None
            for no limit.
        multiple_of: The number of rows of a batch is padded to a multiple of this.
        at_least: Minimum number of batches, up to the number of texts.

    Returns:
        The indices of the texts of each batch.
    """
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        # The last text of a batch is its longest one.
        count = len(batches[-1]) + 1 if batches else 1
        size = -(-count // multiple_of) * multiple_of * lengths[place]
        if not batches or count > rows or (tokens is not None and size > tokens):
            batches.append([])
        batches[-1].append(place)
    while len(batches) < min(at_least, len(lengths)):
        largest = max(range(len(batches)), key=lambda number: len(batches[number]))
        places = batches[largest]
        batches[largest : largest + 1] = [places[: len(places) // 2], places[len(places) // 2 :]]
    return batches


def collate(
    encoded_rows: Sequence[EncodedText], *, pad_token_id: int, multiple_of: int = 1
) -> dict[str, Tensor]:
    """Collate texts into one batch, padded on the right.

    Args:
        encoded_rows: The texts, at least one.
        pad_token_id: The padding token; any token is suitable, since the masks exclude it.
        multiple_of: The length of the batch is a multiple of this.

    Returns:
        `input_ids` and `attention_mask`, (batch, length) of int64, and `loss_mask`, (batch, length) of bool:
        True for tokens with a loss. Losses shift: the mask at t belongs to the logits at t - 1.

    Raises:
        ValueError: `encoded_rows` is empty, `pad_token_id` is not a token, or `multiple_of` is below 1.
    """
    length = _padded_length(encoded_rows, pad_token_id, multiple_of)
    return {
        "input_ids": _pad([row.input_ids for row in encoded_rows], length, pad_token_id),
        "attention_mask": _pad([[1] * len(row) for row in encoded_rows], length, 0),
        "loss_mask": _pad([row.loss_mask for row in encoded_rows], length, 0).bool(),
    }


def collate_pairs(
    encoded_pairs: Sequence[EncodedPair], *, pad_token_id: int, multiple_of: int = 1
) -> dict[str, Tensor]:
    """Collate pairs into one batch of twice as many rows: the chosen text of a pair, then the rejected one.

    Chosen texts are rows 0, 2, 4, ..., rejected ones 1, 3, 5, ...: pairs stay together when a batch is
    divided into microbatches of an even size.

    Args:
        encoded_pairs: The pairs, at least one.
        pad_token_id: The padding token.
        multiple_of: The length of the batch is a multiple of this.

    Returns:
        The same as `collate`.

    Raises:
        ValueError: `encoded_pairs` is empty, `pad_token_id` is not a token, or `multiple_of` is below 1.
    """
    texts = list(chain.from_iterable(encoded_pairs))
    return collate(texts, pad_token_id=pad_token_id, multiple_of=multiple_of)


def collate_packed(
    packed_rows: Sequence[PackedText],
    *,
    pad_token_id: int,
    multiple_of: int = 1,
    mask_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Collate packed texts into one batch, padded on the right.

    Args:
        packed_rows: The sequences, at least one.
        pad_token_id: The padding token.
        multiple_of: The length of the batch is a multiple of this.
        mask_dtype: Dtype of `packed_attention_mask`: the model's dtype for `eager` attention.

    Returns:
        `input_ids` and `position_ids`, (batch, length) of int64; `loss_mask`, (batch, length) of bool;
        `attention_mask`, (batch, 1, length, length), from `packed_attention_mask`.

    Raises:
        ValueError: `packed_rows` is empty, `pad_token_id` is not a token, or `multiple_of` is below 1.
    """
    length = _padded_length(packed_rows, pad_token_id, multiple_of)
    segment_ids = _pad([row.segment_ids for row in packed_rows], length, _PADDING_SEGMENT)
    return {
        "input_ids": _pad([row.input_ids for row in packed_rows], length, pad_token_id),
        "attention_mask": packed_attention_mask(segment_ids, dtype=mask_dtype),
        "position_ids": _pad([row.position_ids for row in packed_rows], length, 0),
        "loss_mask": _pad([row.loss_mask for row in packed_rows], length, 0).bool(),
    }


def make_chat_dataloader(
    encoded: EncodedData,
    *,
    batch_size: int,
    pad_token_id: int,
    multiple_of: int = 1,
    pack_length: int | None = None,
    mask_dtype: torch.dtype | None = None,
    num_replicas: int = 1,
    replica: int = 0,
    **options: Any,
) -> DataParallelLoader:
    """Return a loader of one replica's part of encoded data.

    Its order depends on `seed` and the epoch only; `state_dict()` and `load_state_dict()` save and restore
    the position.

    Args:
        encoded: The data. Batches of stage "prompts" are padded on the right like the others.
        batch_size: Number of rows in a batch of one replica: texts, pairs, or packed sequences.
        pad_token_id: The padding token.
        multiple_of: The length of a batch is a multiple of this.
        pack_length: Maximum number of tokens of a packed sequence; None for no packing.
        mask_dtype: As for `collate_packed`.
        num_replicas: Number of replicas: the size of the mesh's `dp` axis.
        replica: Index of this replica: its rank on that axis.
        options: Further arguments of `colossalai.runtime.make_dataloader`: `shuffle`, `seed`, `drop_last`,
            `device` and others.

    Raises:
        ValueError: Pairs of `encoded` cannot be packed, a text is longer than `pack_length`, or there are too
            few rows for `num_replicas`.
    """
    rows: Sequence[EncodedText | EncodedPair | PackedText] = encoded.rows
    join: Callable[..., dict[str, Tensor]] = collate_pairs if encoded.stage == "preference" else collate
    if pack_length is not None:
        rows, join = pack(encoded.texts, pack_length), partial(collate_packed, mask_dtype=mask_dtype)
    return make_dataloader(
        cast(Dataset[Any], rows),  # torch needs only `__len__` and `__getitem__`
        num_replicas=num_replicas,
        replica=replica,
        batch_size=batch_size,
        collate_fn=partial(join, pad_token_id=pad_token_id, multiple_of=multiple_of),
        **options,
    )


def _padded_length(rows: Sequence[EncodedText | PackedText], pad_token_id: int, multiple_of: int) -> int:
    if not rows:
        raise ValueError("a batch needs at least one row, and there is none")
    if type(pad_token_id) is not int or pad_token_id < 0:
        raise ValueError(
            f"pad_token_id={pad_token_id!r} is not a token: if the tokenizer has none, give its eos_token_id"
        )
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of}: give at least 1")
    return -(-max(map(len, rows)) // multiple_of) * multiple_of


def _pad(rows: Sequence[Sequence[int]], length: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)
