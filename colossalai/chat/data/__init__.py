"""Data of chat training: rows of known formats, their tokens and loss masks, packing, batches.

`chat_data` reads rows, `encode_all` tokenizes them with a tokenizer of transformers, and
`make_chat_dataloader` makes batches of the tokens. `make_toy_data` generates rows.
"""

from colossalai.chat.data._batches import (
    collate,
    collate_packed,
    collate_pairs,
    make_chat_dataloader,
    places_in_batches,
)
from colossalai.chat.data._chat_data import ChatData, chat_data
from colossalai.chat.data._encode import (
    EncodedData,
    EncodedPair,
    EncodedText,
    encode_all,
    encode_preference,
    encode_prompt,
    encode_sft,
)
from colossalai.chat.data._formats import ChatRow, ChatStage
from colossalai.chat.data._pack import PackedText, pack, packed_attention_mask
from colossalai.chat.data._templates import ChatTemplateError
from colossalai.chat.data._toy import make_toy_data, make_toy_tokenizer

__all__ = [
    "ChatData",
    "ChatRow",
    "ChatStage",
    "ChatTemplateError",
    "EncodedData",
    "EncodedPair",
    "EncodedText",
    "PackedText",
    "chat_data",
    "collate",
    "collate_packed",
    "collate_pairs",
    "encode_all",
    "encode_preference",
    "encode_prompt",
    "encode_sft",
    "make_chat_dataloader",
    "make_toy_data",
    "make_toy_tokenizer",
    "pack",
    "packed_attention_mask",
    "places_in_batches",
]
