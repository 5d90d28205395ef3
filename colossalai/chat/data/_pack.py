"""Packing: several texts in one sequence, with attention within each text only.

Texts are packed first-fit decreasing (Johnson, 1973): longest first, each into the first sequence with enough
room. Positions restart with each text, and attention stays within it, so the loss of a text is unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossalai.chat.data._encode import EncodedText


@dataclass(frozen=True)
class PackedText:
    """Several texts in one sequence.

    Attributes:
        input_ids: The tokens.
        loss_mask: Whether each token has a loss; False for the first token of a text, which would be
            predicted from another text.
        position_ids: Position of each token in its text.
        segment_ids: Index of each token's text in this sequence.
        members: Indices of the texts among all packed ones.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    position_ids: list[int]
    segment_ids: list[int]
    members: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.input_ids)


def pack(encoded: Sequence[EncodedText], max_length: int) -> tuple[PackedText, ...]:
    """Pack texts into sequences by first-fit decreasing.

    The result depends on the texts and their order only.

    Args:
        encoded: The texts.
        max_length: Maximum number of tokens of a sequence.

    Raises:
        ValueError: A text in `encoded` is longer than `max_length`.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []
    first, last_length = 0, 0
    for number in sorted(range(len(encoded)), key=lambda number: -len(encoded[number])):
        length = len(encoded[number])
        if length > max_length:
            raise ValueError(
                f"text {number} has {length} tokens, more than max_length={max_length}: encode with the same "
                "max_length"
            )
        if length != last_length:  # for texts of equal length, sequences that were too full before stay so
            first, last_length = 0, length
        while first < len(bins) and rooms[first] < length:
            first += 1
        if first == len(bins):
            bins.append([])
            rooms.append(max_length)
        bins[first].append(number)
        rooms[first] -= length
    return tuple(_concatenate(encoded, members) for members in bins)


def _concatenate(encoded: Sequence[EncodedText], members: Sequence[int]) -> PackedText:
    texts = [encoded[number] for number in members]
    return PackedText(
        input_ids=[token for text in texts for token in text.input_ids],
        loss_mask=[
            is_learned and place > 0 for text in texts for place, is_learned in enumerate(text.loss_mask)
        ],
        position_ids=[place for text in texts for place in range(len(text))],
        segment_ids=[segment for segment, text in enumerate(texts) for _ in range(len(text))],
        members=tuple(members),
    )


def packed_attention_mask(segment_ids: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mask of causal attention within each text.

    It is the `attention_mask` of models of transformers. Their `sdpa` attention takes booleans; their `eager`
    attention adds the mask to the scores and needs it in the model's dtype.

    Args:
        segment_ids: (batch, length), or (length,) for one sequence. Padding with an index of its own attends
            to padding only: a token without any visible token would cause a NaN.
        dtype: A floating dtype: 0 for visible tokens, and the dtype's minimum for all others. None: booleans,
            True for visible tokens.

    Returns:
        (batch, 1, length, length): rows are queries, columns are keys.
    """
    rows = segment_ids if segment_ids.dim() == 2 else segment_ids.unsqueeze(0)
    same_text = rows.unsqueeze(2) == rows.unsqueeze(1)  # (batch, query, key)
    seen = same_text.tril().unsqueeze(1)
    if dtype is None:
        return seen
    least = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, least)
