"""Texts of dialogues: plain ones, and a tokenizer's own chat template applied turn by turn.

A dialogue is a prompt and its answers. It is written as pieces of text, some of which have a loss; the text
up to an answer is exactly the input of a model at generation.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Messages = tuple[Mapping[str, Any], ...]
"""The turns of a chat, each with a `role` and its `content`."""

_SYSTEM_ROLES = ("system", "developer")
_PROBE = "an answer"


class ChatTemplateError(ValueError):
    """A tokenizer's chat template rejects these messages, or its answers cannot be located."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of a dialogue's text, and whether it has a loss."""

    text: str
    is_learned: bool


@dataclass(frozen=True, kw_only=True)
class WrittenDialogue:
    """A dialogue as text.

    Attributes:
        pieces: The pieces of the text in order.
        head: The beginning of the text that is never truncated: the system turn.
        has_special_tokens: Whether the text contains the special tokens itself, as chat templates do;
            otherwise the tokenizer's first token is added before it.
    """

    pieces: tuple[TextPiece, ...]
    head: str = ""
    has_special_tokens: bool


class Dialogue(ABC):
    """A prompt and the answers to it: none, one, or a chosen and a rejected one."""

    @abstractmethod
    def write_prompt(self, tokenizer: Any, place: str) -> WrittenDialogue:
        """Return the text of the prompt, ready for an answer.

        Args:
            tokenizer: A tokenizer of transformers.
            place: Place of the row in its source, for errors.

        Raises:
            ChatTemplateError: The template of `tokenizer` rejects these messages.
        """

    @abstractmethod
    def write(self, answer: int, tokenizer: Any, place: str) -> WrittenDialogue:
        """Return the text of the prompt and an answer.

        Args:
            answer: Number of the answer.
            tokenizer: A tokenizer of transformers.
            place: Place of the row in its source, for errors.

        Raises:
            ChatTemplateError: The template of `tokenizer` rejects these messages or hides the answers in
                them.
        """

    @abstractmethod
    def with_answer(self, text: str) -> "Dialogue":
        """Return the prompt with the given answer."""


@dataclass(frozen=True, kw_only=True)
class PlainDialogue(Dialogue):
    """A dialogue of plain texts, which are concatenated."""

    prompt: str
    answers: tuple[str, ...] = ()

    def write_prompt(self, tokenizer: Any, place: str) -> WrittenDialogue:
        """Return the prompt."""
        return WrittenDialogue(pieces=(TextPiece(self.prompt, False),), has_special_tokens=False)

    def write(self, answer: int, tokenizer: Any, place: str) -> WrittenDialogue:
        """Return the prompt and an answer."""
        pieces = TextPiece(self.prompt, False), TextPiece(self.answers[answer], True)
        return WrittenDialogue(pieces=pieces, has_special_tokens=False)

    def with_answer(self, text: str) -> Dialogue:
        """Return the prompt with the given answer."""
        return replace(self, answers=(text,))


@dataclass(frozen=True, kw_only=True)
class ChatDialogue(Dialogue):
    """A dialogue of messages, written by the tokenizer's chat template.

    The assistant's turns in an answer have a loss, those in the prompt do not.
    """

    prompt: Messages
    answers: tuple[Messages, ...] = ()

    def write_prompt(self, tokenizer: Any, place: str) -> WrittenDialogue:
        """Return the prompt, up to the beginning of the assistant's message."""
        text = _write_up_to_answer(self.prompt, tokenizer, place)
        return WrittenDialogue(
            pieces=(TextPiece(text, False),),
            head=_write_head(self.prompt, text, tokenizer, place),
            has_special_tokens=True,
        )

    # The template does not mark the author of its text. So it is applied to the messages before each answer
    # and to those up to it: the answer and its end are the difference.
    def write(self, answer: int, tokenizer: Any, place: str) -> WrittenDialogue:
        """Return the prompt and an answer, up to the assistant's last turn."""
        messages = self.prompt + self.answers[answer]
        text = ""
        pieces: list[TextPiece] = []
        for turn in range(len(self.prompt), len(messages)):
            if messages[turn]["role"] != "assistant":
                continue
            asked = _write_up_to_answer(messages[:turn], tokenizer, place)
            answered = _apply_template(messages[: turn + 1], tokenizer, place)
            if not (asked.startswith(text) and answered.startswith(asked)):
                raise ChatTemplateError(
                    f"{place}: the tokenizer's chat template writes the text before message {turn} otherwise "
                    "when that message follows, so the prompt in training would differ from the prompt in "
                    "generation; split the row so that it ends with its first answer, or give the tokenizer "
                    "a template that only ever appends"
                )
            pieces += [TextPiece(asked[len(text) :], False), TextPiece(answered[len(asked) :], True)]
            text = answered
        head = _write_head(messages, text, tokenizer, place)
        return WrittenDialogue(pieces=tuple(pieces), head=head, has_special_tokens=True)

    def with_answer(self, text: str) -> Dialogue:
        """Return the prompt with a turn of the assistant."""
        return replace(self, answers=(({"role": "assistant", "content": text},),))


def _apply_template(messages: Messages, tokenizer: Any, place: str, *, asks: bool = False) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError(
            f"{place}: messages need a tokenizer with a chat template, and this one has none; set "
            "tokenizer.chat_template, or give rows with a prompt and a completion"
        )
    from jinja2 import TemplateError  # transformers writes templates with it

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=asks
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ChatTemplateError(
            f"{place}: the tokenizer's chat template does not take these messages: {error}"
        ) from error
    return str(text)


def _write_up_to_answer(messages: Messages, tokenizer: Any, place: str) -> str:
    """Return the messages and the generation prompt.

    A template without a generation prompt is accepted only if it writes nothing between a question and its
    answer.
    """
    asked = _apply_template(messages, tokenizer, place, asks=True)
    if asked == _apply_template(messages, tokenizer, place):
        probe = (*messages, {"role": "assistant", "content": _PROBE})
        answered = _apply_template(probe, tokenizer, place)
        if not (answered.startswith(asked) and answered[len(asked) :].lstrip().startswith(_PROBE)):
            raise ChatTemplateError(
                f"{place}: the tokenizer's chat template has no generation prompt, the beginning of an "
                "answer; give a template that heeds add_generation_prompt"
            )
    return asked


def _write_head(messages: Messages, text: str, tokenizer: Any, place: str) -> str:
    """Return the system turn at the beginning of a text; "" if there is none."""
    if messages[0]["role"] not in _SYSTEM_ROLES:
        return ""
    try:
        alone = _apply_template(messages[:1], tokenizer, place)
    except ChatTemplateError:
        alone = ""  # some templates include the system message in the first question only
    if alone and text.startswith(alone):
        return alone
    words = messages[0]["content"].strip()
    begin = text.find(words)
    return "" if begin < 0 else text[: begin + len(words)]
