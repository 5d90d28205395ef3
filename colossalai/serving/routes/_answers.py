"""Answers in OpenAI's form: what the engine says of each choice, gathered whole or written chunk by chunk."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from colossalai.inference import Delta, FinishReason, TokenLogprobs
from colossalai.serving._prompts import Prompts, Tokens
from colossalai.serving._visit import Visit

_IMPOSSIBLE = -9999.0


class CachedTokens(BaseModel):
    """Tokens of prompts that were not computed again."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Tokens of a call."""

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
    """A token that could have been, its log-probability and its bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A token of a message, and the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """The message that was made."""

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
    """What is known of one answer to one prompt."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    has_begun: bool = False
    offset: int = 0  # of the next token, in characters


class Answers:
    """All choices of a call: those of the first prompt, those of the second, and so on.

    Args:
        prompts: The prompts.
        n: Number of answers to each.
        visit: The call; its tokens are counted there.
    """

    def __init__(self, prompts: Sequence[Tokens], n: int, visit: Visit) -> None:
        self._visit = visit
        self._n = n
        self.choices = [ChoiceSoFar(index) for index in range(len(prompts) * n)]
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._num_cached = dict.fromkeys(range(len(prompts)), 0)
        visit.prompt_tokens = sum(map(len, prompts))

    def add(self, prompt: int, delta: Delta) -> ChoiceSoFar:
        """Note what the engine says, and return the choice that it belongs to."""
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
        self._visit.cached_tokens = sum(self._num_cached.values())
        if delta.finish_reason == "abort":  # by the server's end; a client that has left hears nothing
            self._visit.outcome = "aborted"
        return choice

    def prompt_of(self, choice: ChoiceSoFar) -> int:
        """Return which prompt a choice continues."""
        return choice.index // self._n

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the call so far."""
        visit = self._visit
        return {
            "prompt_tokens": visit.prompt_tokens,
            "completion_tokens": visit.generated_tokens,
            "total_tokens": visit.prompt_tokens + visit.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": visit.cached_tokens},
        }


class Form(Protocol):
    """How answers of a route are written."""

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return all answers, after their ends."""

    def chunks(self, choice: ChoiceSoFar, delta: Delta, answers: Answers) -> Iterable[dict[str, Any]]:
        """Return what is sent of a delta: nothing where it adds no text, or more than one chunk."""

    def last(self, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, where it was asked for."""


@dataclass(frozen=True)
class Heading:
    """What every chunk of a call begins with.

    Attributes:
        request_id: The call.
        model: The model that was asked for.
        shows_usage: Whether the last chunk has the usage, and the others none.
    """

    request_id: str
    model: str
    shows_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer or a chunk with these choices."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk that is not the last one."""
        chunk = self.of(kind, choices)
        return {**chunk, "usage": None} if self.shows_usage else chunk

    def last(self, kind: str, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, where it was asked for."""
        return [{**self.of(kind, []), "usage": answers.usage}] if self.shows_usage else []


class CompletionForm:
    """Answers of /v1/completions.

    Args:
        heading: What they begin with.
        prompts: Texts of tokens.
        echoes: What each text begins with, and its tokens: the prompts, or nothing where they are not asked
            for.
        has_logprobs: Whether log-probabilities were asked for.
        num_top: Of how many of the most likely tokens.
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
        """Return all answers, after their ends."""
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
        """Return what is sent of a delta."""
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
        """Return the chunk with the usage, where it was asked for."""
        return self._heading.last("text_completion", answers)

    def _echo(self, choice: ChoiceSoFar, answers: Answers) -> tuple[str, list[TokenLogprobs | int]]:
        """Return the prompt's text and log-probabilities, the first token alone, since it has none."""
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
            "token_logprobs": [None if isinstance(each, int) else _finite(each.logprob) for each in found],
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens by their texts; of two with one text the likelier one."""
        top: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token_id, found.logprob)):
            top.setdefault(self._prompts.token_text(token), _finite(logprob))
        return top


class ChatForm:
    """Answers of /v1/chat/completions.

    Args:
        heading: What they begin with.
        prompts: Texts of tokens.
        has_logprobs: Whether log-probabilities were asked for.
    """

    def __init__(self, heading: Heading, prompts: Prompts, *, has_logprobs: bool) -> None:
        self._heading = heading
        self._prompts = prompts
        self._has_logprobs = has_logprobs

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return all answers, after their ends."""
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
        """Return what is sent of a delta; the first one of a choice says who speaks."""
        if not choice.has_begun:
            choice.has_begun = True
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, None, None)
        if delta.text or delta.logprobs:
            yield self._chunk(choice, {"content": delta.text}, self._logprobs(delta.logprobs or ()), None)
        if delta.finish_reason is not None:
            yield self._chunk(choice, {}, None, delta.finish_reason)

    def last(self, answers: Answers) -> list[dict[str, Any]]:
        """Return the chunk with the usage, where it was asked for."""
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
            "logprob": _finite(logprob),
            "bytes": self._prompts.token_bytes(token),
        }


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can write: OpenAI's number for what cannot be."""
    return max(_IMPOSSIBLE, logprob)


def event(chunk: dict[str, Any]) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
