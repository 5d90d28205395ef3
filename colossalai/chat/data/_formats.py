"""Row formats of chat data sets: recognized by their keys, and lowered to dialogues.

A format is a stage of training, the keys that a row must have, and a function that checks a row's values and
converts it to a dialogue. Every error has the row's place and the expected value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, get_args

from colossalai.chat.data._templates import ChatDialogue, Dialogue, Messages, PlainDialogue
from colossalai.inference import alpaca_prompt

ChatStage = Literal["sft", "preference", "prompts"]
"""Stage of rows: answers to learn, pairs with a preferred answer, or prompts alone."""

_ASSISTANT = "\n\nAssistant:"
_MESSAGES = "a list of at least one {role, content}, both texts"


@dataclass(frozen=True, eq=False)
class ChatRow(Mapping[str, Any]):
    """A row of chat data: an immutable mapping with all keys of the original row.

    Attributes:
        record: The keys and values.
        place: Place of the row in its source, for errors.
        stage: Its stage.
        dialogue: Its prompt and answers.
    """

    record: Mapping[str, Any]
    place: str
    stage: ChatStage
    dialogue: Dialogue

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Format of rows.

    Attributes:
        name: Value of `ChatData.format`.
        stage: Stage of the rows.
        keys: The keys that a row must have.
        has_messages: Whether the last key's value is a list of messages instead of a text; distinguishes
            formats with the same keys.
        lower: Converts a row to a dialogue, given its place for errors.
    """

    name: str
    stage: ChatStage
    keys: tuple[str, ...]
    has_messages: bool
    lower: Callable[[Mapping[str, Any], str], Dialogue]

    def __str__(self) -> str:
        return f"{{{', '.join(self.keys)}}} ({self.name})"

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has all the keys; a key whose value is None, as in a table, is missing."""
        return all(row.get(key) is not None for key in self.keys)

    def read(self, row: Any, place: str) -> ChatRow:
        """Check a row and return it.

        Args:
            row: The row as it was read.
            place: Place of the row in its source, for errors.

        Raises:
            ValueError: `row` has other keys than the format, or values of other types.
        """
        keys = _keys_of(row, place)
        missing = [key for key in self.keys if row.get(key) is None]
        if missing:
            raise ValueError(
                f"{place}: {', '.join(map(repr, missing))} missing among the keys {keys}; expected {self}, "
                "as in the rows before"
            )
        return ChatRow(dict(row), place, self.stage, self.lower(row, place))


def recognize(row: Any, place: str, stage: ChatStage | None = None) -> RowFormat:
    """Return the format of a row: the first in `ROW_FORMATS` whose keys it has.

    Args:
        row: The row as it was read.
        place: Place of the row in its source, for errors.
        stage: Try only the formats of this stage.

    Raises:
        ValueError: `row` fits no format, or there is no such `stage`.
    """
    if stage is not None and stage not in get_args(ChatStage):
        raise ValueError(f"stage={stage!r} is none of {', '.join(map(repr, get_args(ChatStage)))}")
    keys = _keys_of(row, place)
    formats = [each for each in ROW_FORMATS if stage in (None, each.stage)]
    fitting = [each for each in formats if each.is_of(row)]
    if not fitting:
        of_stage = "" if stage is None else f" of stage {stage!r}"
        raise ValueError(
            f"{place}: the keys {keys} fit no format{of_stage}; expected one of "
            f"{', '.join(map(str, formats))}"
        )
    first = fitting[0]
    has_messages = isinstance(row[first.keys[-1]], list | tuple)
    same_keys = (each for each in fitting if each.keys == first.keys)
    return next((each for each in same_keys if each.has_messages == has_messages), first)


def as_chat_row(row: Mapping[str, Any], stage: ChatStage) -> ChatRow:
    """Return a row of a stage, from a `ChatRow` or any mapping.

    Raises:
        ValueError: `row` fits no format of the stage, or was read for another one.
    """
    if not isinstance(row, ChatRow):
        return recognize(row, "the row", stage).read(row, "the row")
    if row.stage != stage:
        raise ValueError(
            f"{row.place}: the row was read for stage {row.stage!r}, not {stage!r}; read the data with "
            f"chat_data(..., stage={stage!r})"
        )
    return row


def _keys_of(row: Any, place: str) -> list[Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: a row is an object with keys, and this is {_describe(row)}")
    return list(row)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


def _text(row: Mapping[str, Any], key: str, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{place}: {key!r} is {_describe(value)}; expected a text")
    return _encodable(value, key, place)


def _encodable(text: str, key: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: character {error.start} of {key!r} is half of a surrogate pair, not a character"
        ) from error
    return text


def _messages(row: Mapping[str, Any], key: str, place: str) -> Messages:
    value = row[key]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{place}: {key!r} is {_describe(value)}; expected {_MESSAGES}")
    return tuple(_message(message, f"{key}[{number}]", place) for number, message in enumerate(value))


def _message(message: Any, name: str, place: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}: {name} is {_describe(message)}; expected {{role, content}}")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise ValueError(
                f"{place}: {name} has {_describe(message.get(key))} as its {key!r}; expected a text"
            )
        _encodable(message[key], f"{name}.{key}", place)
    return dict(message)


def _instruction(row: Mapping[str, Any], place: str) -> str:
    context = "" if row.get("input") is None else _text(row, "input", place)
    return alpaca_prompt(_text(row, "instruction", place), context)


def _lower_alpaca(row: Mapping[str, Any], place: str) -> Dialogue:
    return PlainDialogue(prompt=_instruction(row, place), answers=(_text(row, "output", place),))


def _lower_completion(row: Mapping[str, Any], place: str) -> Dialogue:
    return PlainDialogue(prompt=_text(row, "prompt", place), answers=(_text(row, "completion", place),))


def _lower_chat(row: Mapping[str, Any], place: str) -> Dialogue:
    messages = _messages(row, "messages", place)
    # All of the assistant's turns have a loss: they are in the answer, and so the prompt has no messages.
    return ChatDialogue(prompt=(), answers=(_answer_messages(messages, "messages", 0, place),))


def _answer_messages(messages: Messages, key: str, begin: int, place: str) -> Messages:
    """Return the messages from `begin` on, with at least one of the assistant."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[begin:]:
        raise ValueError(
            f"{place}: no message of {key!r} with role 'assistant' is left to learn; roles: {roles}"
        )
    if begin == 0 and roles[0] == "assistant":
        raise ValueError(
            f"{place}: {key!r} begins with the assistant, without a question before it; roles: {roles}"
        )
    return messages[begin:]


def _lower_pair(row: Mapping[str, Any], place: str) -> Dialogue:
    answers = _text(row, "chosen", place), _text(row, "rejected", place)
    return PlainDialogue(prompt=_text(row, "prompt", place), answers=answers)


def _lower_dialogue_pair(row: Mapping[str, Any], place: str) -> Dialogue:
    chosen, rejected = _text(row, "chosen", place), _text(row, "rejected", place)
    end = chosen.rfind(_ASSISTANT, 0, num_shared(chosen, rejected))
    if end < 0:
        raise ValueError(
            f"{place}: 'chosen' and 'rejected' share no beginning up to {_ASSISTANT!r}; expected two "
            "dialogues '\\n\\nHuman: ...\\n\\nAssistant: ...' with the same question"
        )
    end += len(_ASSISTANT)
    return PlainDialogue(prompt=chosen[:end], answers=(chosen[end:], rejected[end:]))


def _lower_message_pair(row: Mapping[str, Any], place: str) -> Dialogue:
    chosen, rejected = _messages(row, "chosen", place), _messages(row, "rejected", place)
    chosen, rejected = (_with_prompt(row, messages, place) for messages in (chosen, rejected))
    # The prompt is the common part, up to the point where both continue with the assistant.
    begin = num_shared(chosen, rejected)
    last = min(len(chosen), len(rejected)) - 1
    begin = min(begin, last)
    while begin > 0 and not chosen[begin]["role"] == rejected[begin]["role"] == "assistant":
        begin -= 1
    if begin == 0:
        raise ValueError(
            f"{place}: 'chosen' and 'rejected' share no messages before an answer; expected the same "
            "question and two answers of the assistant, or the answers alone and a 'prompt'"
        )
    answers = tuple(
        _answer_messages(messages, key, begin, place)
        for key, messages in (("chosen", chosen), ("rejected", rejected))
    )
    return ChatDialogue(prompt=chosen[:begin], answers=answers)


def _with_prompt(row: Mapping[str, Any], messages: Messages, place: str) -> Messages:
    """Return a conversation with its `prompt` before it, unless it is there already."""
    if row.get("prompt") is None:
        return messages
    if isinstance(row["prompt"], str):
        question = _text(row, "prompt", place)
        if any(message["content"].strip() == question.strip() for message in messages[:-1]):
            return messages
        prompt: Messages = ({"role": "user", "content": question},)
    else:
        prompt = _messages(row, "prompt", place)
        if messages[: len(prompt)] == prompt:
            return messages
    if messages[0]["role"] != "assistant":
        raise ValueError(
            f"{place}: the 'prompt' is not in the messages of 'chosen' and 'rejected', and they do not begin "
            "with the assistant; expected answers to the prompt, or whole conversations that have it"
        )
    return prompt + messages


def num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the number of common items at the beginning of two sequences."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _lower_instruction(row: Mapping[str, Any], place: str) -> Dialogue:
    return PlainDialogue(prompt=_instruction(row, place))


def _lower_prompt(row: Mapping[str, Any], place: str) -> Dialogue:
    return PlainDialogue(prompt=_text(row, "prompt", place))


def _lower_question(row: Mapping[str, Any], place: str) -> Dialogue:
    messages = _messages(row, "messages", place)
    # The prompt of an answered conversation excludes its last answer, which stays in the row only.
    end = len(messages)
    while end > 0 and messages[end - 1]["role"] == "assistant":
        end -= 1
    if end == 0:
        raise ValueError(f"{place}: 'messages' has the assistant's turns only; expected a question")
    return ChatDialogue(prompt=messages[:end])


ROW_FORMATS = (
    RowFormat(
        name="prompt_pair",
        stage="preference",
        keys=("prompt", "chosen", "rejected"),
        has_messages=False,
        lower=_lower_pair,
    ),
    RowFormat(
        name="message_pair",
        stage="preference",
        keys=("prompt", "chosen", "rejected"),
        has_messages=True,
        lower=_lower_message_pair,
    ),
    RowFormat(
        name="dialogue_pair",
        stage="preference",
        keys=("chosen", "rejected"),
        has_messages=False,
        lower=_lower_dialogue_pair,
    ),
    RowFormat(
        name="message_pair",
        stage="preference",
        keys=("chosen", "rejected"),
        has_messages=True,
        lower=_lower_message_pair,
    ),
    RowFormat(
        name="alpaca", stage="sft", keys=("instruction", "output"), has_messages=False, lower=_lower_alpaca
    ),
    RowFormat(
        name="prompt_completion",
        stage="sft",
        keys=("prompt", "completion"),
        has_messages=False,
        lower=_lower_completion,
    ),
    RowFormat(name="messages", stage="sft", keys=("messages",), has_messages=True, lower=_lower_chat),
    RowFormat(
        name="alpaca", stage="prompts", keys=("instruction",), has_messages=False, lower=_lower_instruction
    ),
    RowFormat(name="prompt", stage="prompts", keys=("prompt",), has_messages=False, lower=_lower_prompt),
    RowFormat(name="messages", stage="prompts", keys=("messages",), has_messages=True, lower=_lower_question),
)
"""All formats, in the order in which they are tried."""
