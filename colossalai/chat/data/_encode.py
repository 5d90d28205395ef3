"""Tokens of dialogues and their loss masks.

A text with an answer ends with the answer's end-of-sequence token, even if a template writes more after it,
so that a model learns to stop where generation stops. A text that is too long is truncated in its prompt,
never in the answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, cast

from colossalai.chat.data._chat_data import ChatData
from colossalai.chat.data._formats import ChatRow, ChatStage, as_chat_row, num_shared
from colossalai.chat.data._templates import WrittenDialogue

# [Note: tokens of a text in parts]
# The tokens of an answer's prompt must be those that the model receives at generation: the tokens of the
# prompt alone. Tokens of the whole text mostly begin with them, and then continue as the model would. If a
# token of the whole text spans the boundary, as " An" does for "Response: " and "An apple", the next piece is
# encoded separately and appended.


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a prompt and an optional answer.

    Attributes:
        input_ids: The tokens.
        loss_mask: Whether each token has a loss.
        num_cut: Number of tokens truncated from the prompt.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    num_cut: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


class EncodedPair(NamedTuple):
    """A prompt with a chosen and a rejected answer; both have the same prompt tokens."""

    chosen: EncodedText
    rejected: EncodedText


@dataclass(frozen=True, kw_only=True)
class EncodedData:
    """The tokens of chat data; a dataset for torch's loaders.

    Attributes:
        stage: Stage of the rows; those of "preference" are pairs.
        rows: The encoded rows.
        sources: The original row of each, with the keys for a reward function.
        num_cut: Number of tokens truncated from prompts.
        num_left_out: Number of rows left out because their answers are too long.
    """

    stage: ChatStage
    rows: tuple[EncodedText | EncodedPair, ...]
    sources: tuple[ChatRow, ...]
    num_cut: int
    num_left_out: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EncodedText | EncodedPair:
        return self.rows[index]

    @property
    def texts(self) -> tuple[EncodedText, ...]:
        """The rows of stage "sft" or "prompts"."""
        if self.stage == "preference":
            raise ValueError("rows of stage 'preference' are pairs of texts: take .pairs")
        return cast(tuple[EncodedText, ...], self.rows)

    @property
    def pairs(self) -> tuple[EncodedPair, ...]:
        """The rows of stage "preference"."""
        if self.stage != "preference":
            raise ValueError(f"rows of stage {self.stage!r} are not pairs: take .texts")
        return cast(tuple[EncodedPair, ...], self.rows)


def encode_sft(row: ChatRow | Mapping[str, Any], tokenizer: Any, max_length: int) -> EncodedText | None:
    """Tokenize a row of stage "sft"; None if its answer is too long.

    The loss is on the answer; for messages, on all of the assistant's turns. A longer text is truncated after
    its first token and its system turn; an earlier answer that loses a part has no loss.

    Messages after the assistant's last one are left out: there is nothing to learn in them.

    Args:
        row: A row of `chat_data`, or a mapping in one of its formats.
        tokenizer: A tokenizer of transformers.
        max_length: Maximum number of tokens of prompt and answer.

    Raises:
        ChatTemplateError: The template of `tokenizer` rejects these messages or hides the answers in them.
        ValueError: `row` is for another stage or has no token to learn, `tokenizer` has no end-of-sequence
            token, or `max_length` is below 1.
    """
    return _encode_sft(as_chat_row(row, "sft"), _TextEncoder(tokenizer), _check_length(max_length))


def encode_preference(
    row: ChatRow | Mapping[str, Any], tokenizer: Any, max_length: int
) -> EncodedPair | None:
    """Tokenize a row of stage "preference"; None if one of its answers is too long.

    The prompt is truncated for the longer answer, equally in both texts.

    Args:
        row: A row of `chat_data`, or a mapping in one of its formats.
        tokenizer: A tokenizer of transformers.
        max_length: Maximum number of tokens of prompt and answer.

    Raises:
        ChatTemplateError: The template of `tokenizer` rejects these messages or hides the answers in them.
        ValueError: `row` is for another stage or has no token to learn, `tokenizer` has no end-of-sequence
            token, or `max_length` is below 1.
    """
    return _encode_preference(
        as_chat_row(row, "preference"), _TextEncoder(tokenizer), _check_length(max_length)
    )


def encode_prompt(row: ChatRow | Mapping[str, Any], tokenizer: Any, max_length: int) -> list[int] | None:
    """Tokenize a prompt; None if the system turn alone is too long.

    Args:
        row: A row of `chat_data` of stage "prompts", or a mapping in one of its formats.
        tokenizer: A tokenizer of transformers.
        max_length: Maximum number of tokens of the prompt.

    Raises:
        ChatTemplateError: The template of `tokenizer` rejects these messages or has no generation prompt.
        ValueError: `row` is for another stage or has no tokens, or `max_length` is below 1.
    """
    encoded = _encode_prompt(as_chat_row(row, "prompts"), _TextEncoder(tokenizer), _check_length(max_length))
    return None if encoded is None else encoded.input_ids


def encode_all(data: ChatData, tokenizer: Any, max_length: int) -> EncodedData:
    """Tokenize all rows that are not too long.

    Args:
        data: The rows.
        tokenizer: A tokenizer of transformers.
        max_length: Maximum number of tokens of prompt and answer; of the prompt, for stage "prompts".

    Raises:
        ChatTemplateError: The template of `tokenizer` rejects the messages of a row.
        ValueError: `data` has a row without a token to learn, or only rows that are too long; `tokenizer` has
            no end-of-sequence token, or `max_length` is below 1.
    """
    encoder, encode = _TextEncoder(tokenizer), _ENCODERS[data.stage]
    _check_length(max_length)
    found = [(encode(row, encoder, max_length), row) for row in data]
    kept = [(encoded, row) for encoded, row in found if encoded is not None]
    if not kept:
        raise ValueError(
            f"max_length={max_length}: all {len(data)} rows have longer answers; give a larger max_length"
        )
    rows, sources = zip(*kept, strict=True)
    num_cut = sum(_prompt_of(encoded).num_cut for encoded in rows)
    return EncodedData(
        stage=data.stage,
        rows=rows,
        sources=sources,
        num_cut=num_cut,
        num_left_out=len(data) - len(rows),
    )


def _prompt_of(encoded: EncodedText | EncodedPair) -> EncodedText:
    return encoded.chosen if isinstance(encoded, EncodedPair) else encoded


def _check_length(max_length: int) -> int:
    if max_length < 1:
        raise ValueError(f"max_length={max_length} tokens: give at least 1")
    return max_length


@dataclass(frozen=True, kw_only=True)
class _FullText:
    """Tokens before truncation.

    Attributes:
        input_ids: The tokens.
        loss_mask: Whether each token has a loss.
        num_head: Number of tokens at the beginning that always stay.
        first_answer: Index of the first token of the first answer.
        last_answer: Index of the first token of the last answer.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    num_head: int
    first_answer: int
    last_answer: int

    def cut(self, num_cut: int, keep_from: int) -> EncodedText | None:
        """Remove tokens after the head, none from `keep_from` on; None if too few would be left."""
        begin, end = self.num_head, self.num_head + num_cut
        if num_cut > 0 and (end > keep_from or len(self.input_ids) - num_cut < 2):
            return None
        mask = list(self.loss_mask)
        if num_cut > 0 and mask[end - 1]:  # the rest of a truncated answer
            for place in takewhile(mask.__getitem__, range(end, keep_from)):
                mask[place] = False
        return EncodedText(self.input_ids[:begin] + self.input_ids[end:], mask[:begin] + mask[end:], num_cut)


class _TextEncoder:
    """Tokenizer of dialogues, with the special tokens at the beginning and the end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        first = tokenizer("")["input_ids"][:1]  # token that the tokenizer adds before each text
        self._first: list[int] = first if first == [tokenizer.bos_token_id] else []

    def prompt(self, row: ChatRow) -> _FullText:
        """Tokenize a prompt."""
        return self._tokens_of(row.dialogue.write_prompt(self._tokenizer, row.place))

    def answered(self, row: ChatRow, answer: int) -> _FullText:
        """Tokenize a prompt and an answer, with the loss mask."""
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, so a model cannot learn where an answer ends; "
                "set tokenizer.eos_token"
            )
        written = row.dialogue.write(answer, self._tokenizer, row.place)
        found = self._tokens_of(written)
        ids = self._append_eos(found.input_ids, found.last_answer)
        mask = found.loss_mask[: len(ids)] + [True] * (len(ids) - len(found.loss_mask))
        if not any(mask[1:]):  # the first token has no loss: nothing predicts it
            raise ValueError(f"{row.place}: there is no token to learn: prompt and answer are empty")
        return _FullText(
            input_ids=ids,
            loss_mask=mask,
            num_head=found.num_head,
            first_answer=found.first_answer,
            last_answer=found.last_answer,
        )

    def _tokens_of(self, written: WrittenDialogue) -> _FullText:
        # See [Note: tokens of a text in parts]
        text = ""
        ids: list[int] = []
        mask: list[bool] = []
        begins = []
        for piece in written.pieces:
            if piece.is_learned:
                begins.append(len(ids))
            text += piece.text
            whole = self._encode(text, written)
            ids = whole if whole[: len(ids)] == ids else ids + self._tokenize(piece.text)
            mask += [piece.is_learned] * (len(ids) - len(mask))
        begins = begins or [len(ids)]
        return _FullText(
            input_ids=ids,
            loss_mask=mask,
            num_head=min(self._num_head(ids, written), begins[0]),
            first_answer=begins[0],
            last_answer=begins[-1],
        )

    def _num_head(self, ids: list[int], written: WrittenDialogue) -> int:
        """Return the number of tokens shared by the head and the text."""
        head = self._encode(written.head, written)
        has_bos = ids[:1] == [self._tokenizer.bos_token_id]  # a template may write it, as a tokenizer does
        return max(num_shared(head, ids), int(has_bos))

    def _encode(self, text: str, written: WrittenDialogue) -> list[int]:
        bare = self._tokenize(text)
        if written.has_special_tokens or (self._first and bare[:1] == self._first):
            return bare
        return self._first + bare

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _append_eos(self, ids: list[int], begin: int) -> list[int]:
        """Append the end-of-sequence token, if it is missing.

        Some templates end an answer with it and a line break; others end turns with another token, or none.
        """
        eos: int = self._tokenizer.eos_token_id
        if eos not in ids[begin:]:
            return [*ids, eos]
        end = len(ids) - ids[::-1].index(eos)
        is_over = not self._tokenizer.decode(ids[end:]).strip()
        return ids[:end] if is_over else [*ids, eos]


def _encode_sft(row: ChatRow, encoder: _TextEncoder, max_length: int) -> EncodedText | None:
    found = encoder.answered(row, 0)
    return found.cut(max(len(found.input_ids) - max_length, 0), found.last_answer)


def _encode_preference(row: ChatRow, encoder: _TextEncoder, max_length: int) -> EncodedPair | None:
    found = encoder.answered(row, 0), encoder.answered(row, 1)
    num_cut = max(0, *(len(each.input_ids) - max_length for each in found))
    chosen, rejected = (each.cut(num_cut, each.first_answer) for each in found)
    return None if chosen is None or rejected is None else EncodedPair(chosen, rejected)


def _encode_prompt(row: ChatRow, encoder: _TextEncoder, max_length: int) -> EncodedText | None:
    found = encoder.prompt(row)
    if not found.input_ids:
        raise ValueError(f"{row.place}: the prompt has no tokens; a model cannot answer it")
    # One token after the head stays, so that the prompt is not empty.
    return found.cut(max(len(found.input_ids) - max_length, 0), len(found.input_ids) - 1)


_Encode = Callable[[ChatRow, _TextEncoder, int], EncodedText | EncodedPair | None]

_ENCODERS: Mapping[ChatStage, _Encode] = {
    "sft": _encode_sft,
    "preference": _encode_preference,
    "prompts": _encode_prompt,
}
