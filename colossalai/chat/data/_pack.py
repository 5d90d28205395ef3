"""Packing: several texts in one sequence, none of which sees another.

Texts are packed first-fit decreasing (Johnson, 1973): longest first, each into the first sequence that has
room. Positions begin anew with each text, and attention stays within it, so that the loss of a text is what
it is alone.
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
        loss_mask: For each token, whether it is learned; never the first one of a text, which would be
            predicted from another text.
        position_ids: The place of each token in its text.
        segment_ids: The number of each token's text in this sequence.
        members: The numbers of the texts among those that were packed.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    position_ids: list[int]
    segment_ids: list[int]
    members: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.input_ids)


def pack(encoded: Sequence[EncodedText], max_length: int) -> tuple[PackedText, ...]:
    """Put texts together into as few sequences as first-fit decreasing finds.

    The result depends on the texts and their order alone.

    Args:
        encoded: The texts.
        max_length: Most tokens of a sequence.

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
        if length != last_length:  # among texts of one length, what was too full for the one before stays so
            first, last_length = 0, length
        while first < len(bins) and rooms[first] < length:
            first += 1
        if first == len(bins):
            bins.append([])
            rooms.append(max_length)
        bins[first].append(number)
        rooms[first] -= length
    return tuple(_joined(encoded, members) for members in bins)


def _joined(encoded: Sequence[EncodedText], members: Sequence[int]) -> PackedText:
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
    """Return the mask of causal attention that stays within each text.

    It goes to models of transformers as their `attention_mask`. Their `sdpa` attention takes booleans; their
    `eager` attention adds the mask to the scores and needs one in the model's dtype.

    Args:
        segment_ids: (batch, length), or (length,) for one sequence. Padding with a number of its own sees
            padding alone: a token that saw nothing at all would make a NaN.
        dtype: A floating dtype: 0 where a token is seen and the dtype's least number elsewhere; None:
            booleans, True where a token is seen.

    Returns:
        (batch, 1, length, length): a row for each query, a column for each key.
    """
    rows = segment_ids if segment_ids.dim() == 2 else segment_ids.unsqueeze(0)
    same_text = rows.unsqueeze(2) == rows.unsqueeze(1)  # (batch, query, key)
    seen = same_text.tril().unsqueeze(1)
    if dtype is None:
        return seen
    least = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, least)
