"""Request bodies of OpenAI's routes: supported fields, and fields that are refused with a reason.

`SamplingParams` checks the ranges of sampling arguments; the schemas check types.
"""

import json
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from colossalai.inference import SamplingParams, Structure
from colossalai.serving._errors import UNKNOWN_FIELD, ApiError, bad_value

_NO_TOOLS = "this server calls no tools; describe them in a message, or ask for response_format"
_NO_VOICE = "this server reads and writes text"


class StrictBody(BaseModel):
    """A JSON object without unknown fields, conversions of types, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, str]] = {}
    """OpenAI's fields that would affect an answer but are not supported, with reasons. null is accepted."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            text = "it must be a JSON object (and the header Content-Type must be application/json)"
            raise PydanticCustomError("object", "{text}", {"text": text})
        data = {name: value for name, value in data.items() if value is not None or name not in cls.refused}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in data:
            if name in known:
                continue
            if name in cls.refused:
                text = f"{name} is not supported: {cls.refused[name]}"
            else:
                near = get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known ones are {', '.join(sorted(known))}"
                text = f"there is no field {name!a}; {hint}"
            raise PydanticCustomError(UNKNOWN_FIELD, "{text}", {"text": text, "field": ascii(name)[1:-1]})
        for name, value in data.items():
            if not _is_whole(value):
                text = "it has half a character (a surrogate without the other one)"
                raise PydanticCustomError("half_a_character", "{name}: {text}", {"name": name, "text": text})
        return data


def _is_whole(value: Any) -> bool:
    """Whether a text, or each text of a list, is valid Unicode: JSON permits lone surrogates."""
    texts = value if isinstance(value, list) else [value]
    try:
        for text in texts:
            if isinstance(text, str):
                text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _union_of(expected: str) -> WrapValidator:
    """Return a validator with one error message for a union, where pydantic has one for each branch."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("union", "it must be {expected}", {"expected": expected}) from error

    return WrapValidator(validate)


_Texts = Annotated[list[str], Field(fail_fast=True)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(StrictBody):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are never padded.")


class NamedSchema(StrictBody):
    """A JSON schema, in the form of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(StrictBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(StrictBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(StrictBody):
    """A text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: str


_Format = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat, Field(discriminator="type")
]


class GeneratingBody(StrictBody):
    """Common fields of `/v1/completions` and `/v1/chat/completions`."""

    model: str | None = Field(None, description="A name of /v1/models; the served model if left out.")
    n: int | None = Field(None, description="Number of answers to a prompt; 1 if left out.")
    max_tokens: int | None = Field(None, description="Most tokens of an answer.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    temperature: float | None = Field(None, description="0 takes the most likely token; 1 if left out.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop: Annotated[str | _Texts | None, _union_of("a text, or a list of texts")] = None
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="From token ids, as texts, to biases.")
    response_format: _Format | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, description="Smaller numbers go first; 0 if left out.")
    user: str | None = Field(None, description="Without effect.")
    store: bool | None = Field(None, description="Without effect.")
    metadata: dict[str, Any] | None = Field(None, description="Without effect.")
    service_tier: str | None = Field(None, description="Without effect.")
    safety_identifier: str | None = Field(None, description="Without effect.")
    prompt_cache_key: str | None = Field(None, description="Without effect.")
    prompt_cache_retention: str | None = Field(None, description="Without effect.")

    @property
    def asked_tokens(self) -> int | None:
        """Maximum number of tokens of an answer, by either name.

        Raises:
            ApiError: `max_tokens` and `max_completion_tokens` contradict each other.
        """
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} are "
                "two names of the same; send one of them",
                param="max_tokens",
            )
        return both.pop() if both else None

    def check(self) -> None:
        """Check combinations of fields.

        Raises:
            ApiError: `stream_options` are given without `stream`.
        """
        if self.stream_options is not None and not self.stream:
            text = "stream_options are for streamed answers; send stream=true, or leave them out"
            raise ApiError(400, text, param="stream_options")


class CompletionBody(GeneratingBody):
    """A request for continuations of prompts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "The longest river", "max_tokens": 64, "temperature": 0.7}]
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        "suffix": "the model continues a text, it does not fill gaps",
        "best_of": "ask for n answers with logprobs and choose",
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "function_call": _NO_TOOLS,
    }

    prompt: Annotated[
        str | _Texts | _TokenIds | Annotated[list[_TokenIds], Field(fail_fast=True)],
        _union_of("a text, a list of texts, a list of token ids, or a list of such lists"),
    ]
    logprobs: int | None = Field(
        None, description="Log-probabilities of the tokens, and of so many most likely ones."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")


class TextPart(StrictBody):
    """A part of a message."""

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(("image_url", "input_audio", "file"), _NO_VOICE)

    type: Literal["text"]
    text: str


class ChatMessage(StrictBody):
    """A message of a chat."""

    refused: ClassVar[Mapping[str, str]] = {
        "tool_calls": _NO_TOOLS,
        "tool_call_id": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _NO_VOICE,
        "refusal": "send it as the content",
        "annotations": "sources are not read",
    }

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is the newer name of system."
    )
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)],
        _union_of('a text, or a list of {"type": "text", "text": ...}; images, audio and files are not read'),
    ]
    name: str | None = None

    @property
    def for_template(self) -> dict[str, str]:
        """The message in the form of chat templates."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(GeneratingBody):
    """A request for the next message of a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "Name the longest river."}], "stream": True}
            ]
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "parallel_tool_calls": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "web_search_options": _NO_TOOLS,
        "modalities": _NO_VOICE,
        "audio": _NO_VOICE,
        "prediction": "it would be without effect",
        "reasoning_effort": "say it in a message, in the model's own words",
        "verbosity": "say it in a message",
        "suffix": "the model continues a text, it does not fill gaps",
        "best_of": "ask for n answers with logprobs and choose",
        "echo": "the messages are not part of the answer",
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Check combinations of fields.

        Raises:
            ApiError: `stream_options` are given without `stream`, or `top_logprobs` without `logprobs`.
        """
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            text = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            raise ApiError(400, text, param="top_logprobs")


def sampling_params(
    body: GeneratingBody,
    *,
    max_tokens: int | None,
    room: int,
    vocab_size: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        body: The request.
        max_tokens: Maximum number of tokens of an answer; None for `room`.
        room: Number of tokens that the window leaves after the prompt; a cap on `max_tokens`.
        vocab_size: Number of tokens of the vocabulary.
        logprobs: Number of alternatives for the tokens of the answer.
        prompt_logprobs: Number of alternatives for the tokens of the prompt.

    Raises:
        ApiError: A field is out of its range.
    """
    given = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            seed=body.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
            structure=_structure(body.response_format),
            **given,
        )
    except ValueError as error:
        raise bad_value(error) from error


_AS_THEY_ARE = (
    *("n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in given.items():
        if not re.fullmatch("[0-9]{1,9}", name) or int(name) >= vocab_size:
            raise ValueError(f"logit_bias names the token {name!a}; tokens are from 0 to {vocab_size - 1}")
        bias[int(name)] = value
    return bias


def _structure(asked: Any) -> Structure | None:
    if isinstance(asked, JsonObjectFormat):
        return Structure(kind="json", source='{"type": "object"}')
    if isinstance(asked, JsonSchemaFormat):
        try:
            source = json.dumps(asked.json_schema.schema_, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"response_format has a schema that is not JSON: {error}") from error
        return Structure(kind="json", source=source)
    if isinstance(asked, RegexFormat):
        return Structure(kind="regex", source=asked.regex)
    return None
