"""Answers in OpenAI's form: the deltas of each choice, gathered whole or streamed in chunks."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from colossalai.inference import Delta, FinishReason, TokenLogprobs
from colossalai.serving._prompts import Prompts, Tokens
from colossalai.serving._request_record import RequestRecord

_IMPOSSIBLE = -9999.0


class CachedTokens(BaseModel):
    """Prompt tokens that came from a cache."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice, token by token; offsets count characters of `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionAnswer(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class TopLogprob(BaseModel):
    """An alternative token, its log-probability and its bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A token of a message, with the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """The generated message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


@dataclass
class ChoiceSoFar:
    """State of one answer to one prompt."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    has_begun: bool = False
    offset: int = 0  # of the next token's text, in characters


class Answers:
    """All choices of a call, ordered by prompt.

    Args:
        prompts: The prompts.
        n: Number of answers to each prompt.
        record: Record of the call, where tokens are counted.
    """

    def __init__(self, prompts: Sequence[Tokens], n: int, record: RequestRecord) -> None:
        self._record = record
        self._n = n
        self.choices = [ChoiceSoFar(index) for index in range(len(prompts) * n)]
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._num_cached = dict.fromkeys(range(len(prompts)), 0)
        record.prompt_tokens = sum(map(len, prompts))

    def add(self, prompt: int, delta: Delta) -> ChoiceSoFar:
        """Add a delta, and return its choice."""
        if delta.is_restart:
            for number in range(prompt * self._n, (prompt + 1) * self._n):
                self.choices[number] = ChoiceSoFar(number)
            self.prompt_logprobs.pop(prompt, None)
        choice = self.choices[prompt * self._n + delta.index]
        is_replaced = delta.finish_reason == "content_filter"
        choice.text = delta.text.lstrip() if is_replaced else choice.text + delta.text
        choice.logprobs += delta.logprobs or ()
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = delta.prompt_logprobs
        self._num_cached[prompt] = max(self._num_cached[prompt], delta.cached_tokens)
        self._record.cached_tokens = sum(self._num_cached.values())
        if delta.finish_reason == "abort":  # by the shutdown; a disconnected client receives nothing
            self._record.outcome = "aborted"
        return choice

    def prompt_of(self, choice: ChoiceSoFar) -> int:
        """Return the index of the prompt of a choice."""
        return choice.index // self._n

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of the call so far."""
        record = self._record
        return {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.generated_tokens,
            "total_tokens": record.prompt_tokens + record.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
        }


class Form(Protocol):
    """Response format of a route."""

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the response with all finished answers."""

    def chunks(self, choice: ChoiceSoFar, delta: Delta, answers: Answers) -> Iterable[dict[str, Any]]:
        """Return the chunks of a delta: none if it adds no text, or several."""

    def last(self, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, if the request includes it."""


@dataclass(frozen=True)
class Heading:
    """Common fields of every chunk of a call.

    Attributes:
        request_id: Id of the call.
        model: Name of the model in the request.
        shows_usage: Whether the last chunk has the usage, and the others a null.
    """

    request_id: str
    model: str
    shows_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer or a chunk with the given choices."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk other than the last one."""
        chunk = self.of(kind, choices)
        return {**chunk, "usage": None} if self.shows_usage else chunk

    def last(self, kind: str, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, if the request includes it."""
        return [{**self.of(kind, []), "usage": answers.usage}] if self.shows_usage else []


class CompletionForm:
    """Response format of /v1/completions.

    Args:
        heading: Common fields of the chunks.
        prompts: Tokenizer, for the texts of tokens.
        echoes: Text and tokens of each prompt, to begin each answer with; None without `echo`.
        has_logprobs: Whether the request includes log-probabilities.
        num_top: Number of alternatives for each token.
    """

    def __init__(
        self,
        heading: Heading,
        prompts: Prompts,
        *,
        echoes: Sequence[tuple[str, Tokens]] | None,
        has_logprobs: bool,
        num_top: int,
    ) -> None:
        self._heading = heading
        self._prompts = prompts
        self._echoes = echoes
        self._has_logprobs = has_logprobs
        self._num_top = num_top

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the response with all finished answers."""
        choices = []
        for choice in answers.choices:
            text, before = self._echo(choice, answers)
            logprobs = self._logprobs(choice, [*before, *choice.logprobs])
            choices.append(
                {
                    "index": choice.index,
                    "text": text + choice.text,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
        return {**self._heading.of("text_completion", choices), "usage": answers.usage}

    def chunks(self, choice: ChoiceSoFar, delta: Delta, answers: Answers) -> Iterable[dict[str, Any]]:
        """Return the chunks of a delta."""
        text, before = ("", []) if choice.has_begun else self._echo(choice, answers)
        choice.has_begun = True
        text += delta.text
        logprobs = self._logprobs(choice, [*before, *(delta.logprobs or ())])
        if text or delta.finish_reason is not None or (logprobs and logprobs["tokens"]):
            yield self._heading.chunk(
                "text_completion",
                [
                    {
                        "index": choice.index,
                        "text": text,
                        "logprobs": logprobs,
                        "finish_reason": delta.finish_reason,
                    }
                ],
            )

    def last(self, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, if the request includes it."""
        return self._heading.last("text_completion", answers)

    def _echo(self, choice: ChoiceSoFar, answers: Answers) -> tuple[str, list[TokenLogprobs | int]]:
        """Return the prompt's text and its log-probabilities; the first token has none and is a bare id."""
        if self._echoes is None:
            return "", []
        prompt = answers.prompt_of(choice)
        text, tokens = self._echoes[prompt]
        return text, [tokens[0], *answers.prompt_logprobs.get(prompt, ())] if self._has_logprobs else []

    def _logprobs(self, choice: ChoiceSoFar, found: Sequence[TokenLogprobs | int]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        named = [each if isinstance(each, int) else each.token_id for each in found]
        offsets = []
        for token in named:
            offsets.append(choice.offset)
            choice.offset += self._prompts.token_width(token)
        top = [None if isinstance(each, int) else self._top(each) for each in found]
        return {
            "tokens": [self._prompts.token_text(token) for token in named],
            "token_logprobs": [
                None if isinstance(each, int) else _clamp_logprob(each.logprob) for each in found
            ],
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens by their texts; the likelier one of two with the same text."""
        top: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token_id, found.logprob)):
            top.setdefault(self._prompts.token_text(token), _clamp_logprob(logprob))
        return top


class ChatForm:
    """Response format of /v1/chat/completions.

    Args:
        heading: Common fields of the chunks.
        prompts: Tokenizer, for the texts of tokens.
        has_logprobs: Whether the request includes log-probabilities.
    """

    def __init__(self, heading: Heading, prompts: Prompts, *, has_logprobs: bool) -> None:
        self._heading = heading
        self._prompts = prompts
        self._has_logprobs = has_logprobs

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the response with all finished answers."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in answers.choices
        ]
        return {**self._heading.of("chat.completion", choices), "usage": answers.usage}

    def chunks(self, choice: ChoiceSoFar, delta: Delta, answers: Answers) -> Iterable[dict[str, Any]]:
        """Return the chunks of a delta; the first chunk of a choice has the role."""
        if not choice.has_begun:
            choice.has_begun = True
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, None, None)
        if delta.text or delta.logprobs:
            yield self._chunk(choice, {"content": delta.text}, self._logprobs(delta.logprobs or ()), None)
        if delta.finish_reason is not None:
            yield self._chunk(choice, {}, None, delta.finish_reason)

    def last(self, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, if the request includes it."""
        return self._heading.last("chat.completion.chunk", answers)

    def _chunk(self, choice: ChoiceSoFar, delta: Any, logprobs: Any, finish_reason: Any) -> dict[str, Any]:
        said = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._heading.chunk("chat.completion.chunk", [said])

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        content = [
            {
                **self._named(each.token_id, each.logprob),
                "top_logprobs": [self._named(token, logprob) for token, logprob in each.top],
            }
            for each in found
        ]
        return {"content": content}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._prompts.token_text(token),
            "logprob": _clamp_logprob(logprob),
            "bytes": self._prompts.token_bytes(token),
        }


def _clamp_logprob(logprob: float) -> float:
    """Replace -inf, which JSON cannot represent, by OpenAI's value."""
    return max(_IMPOSSIBLE, logprob)


def event(chunk: dict[str, Any]) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
