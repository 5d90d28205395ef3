"""Requests of an inference engine, with their sampling parameters, deltas and completions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "timeout", "abort", "content_filter"]
"""Reason of an answer's end: a stop string or token; its length; the request's timeout; an abort; or
forbidden words, in which case the last text replaces all earlier ones."""

MAX_LOGPROBS = 20
"""Maximum number of alternatives of a token with log-probabilities, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Grammar of an answer.

    Attributes:
        kind: Whether `source` is a JSON schema or a regular expression.
        source: The schema as JSON text, or the expression.
    """

    kind: Literal["json", "regex"]
    source: str


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters: filters of the distribution, and conditions that end an answer.

    The logits of a token go through, in this order: `logit_bias`, `structure` and `min_tokens`; the
    repetition penalty (1909.05858) and the additive penalties; the temperature; `top_k`; `top_p` (nucleus
    sampling, 1904.09751); `min_p` (2407.01082). Then one token is drawn.

    Attributes:
        n: Number of answers to one prompt.
        max_tokens: Maximum number of tokens of an answer; None for as many as the model's window allows.
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_p: Nucleus sampling: the most likely tokens with this total probability are kept; in (0, 1].
        top_k: Number of most likely tokens to keep; 0 or -1 for all.
        min_p: Minimum probability of a token, relative to the most likely one; in [0, 1].
        stop: Strings that end an answer; they are not part of it.
        stop_token_ids: Tokens that end an answer, in addition to the model's own end tokens.
        ignore_eos: Whether an answer continues after the model's own end tokens.
        min_tokens: Number of tokens before which no end token and no stop token can be drawn.
        seed: Seed of the draws, which makes them repeatable; None for a fresh one in each request.
        logprobs: Number of most likely alternatives of each token with log-probabilities; None for no
            log-probabilities. They are those of the model, before temperature and filters.
        prompt_logprobs: The same for the tokens of the prompt, except the first.
        presence_penalty: Subtracted from the logits of tokens in the answer; in [-2, 2].
        frequency_penalty: The same for each occurrence in the answer; in [-2, 2].
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens in the prompt
            or the answer; from 0.01 to 100, 1 for none.
        logit_bias: Additions to logits, by token id; in [-100, 100].
        structure: Grammar of the answer; None for any text.

    Raises:
        ValueError: A field is out of range; the message has its name, its value and the allowed range.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structure: Structure | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _check_number(name, value, low, high)
        if self.top_p == 0:
            raise ValueError("top_p=0; it must be more than 0 (temperature=0 takes the most likely token)")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens=0; it must be at least 1, unless prompt_logprobs are requested")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop={self.stop!r}; it must be texts that are not empty")
        for token in (*self.logit_bias, *self.stop_token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                name = "logit_bias" if token in self.logit_bias else "stop_token_ids"
                raise ValueError(f"{name} names the token {token!r}; tokens are whole numbers from 0")
        for token, bias in self.logit_bias.items():
            _check_number(f"logit_bias[{token}]", bias, -100, 100)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is selected each time."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before are penalized."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_deterministic(self) -> bool:
        """Whether a repeated request has the same answer."""
        return self.is_greedy or self.seed is not None


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("stop", Iterable, "a text or several"),
    ("stop_token_ids", Iterable, "tokens"),
    ("logit_bias", Mapping, "numbers by token"),
    ("ignore_eos", bool, "True or False"),
    ("structure", Structure | None, "a Structure, or None for any text"),
)
_RANGES = (
    ("n", 1, 128),
    ("max_tokens", 0, math.inf),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", -1, math.inf),
    ("min_p", 0, 1),
    ("min_tokens", 0, math.inf),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),  # bounded, so that logits stay finite
)
_MAY_BE_NONE = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs"})
_WHOLE = frozenset({"n", "max_tokens", "top_k", "min_tokens", "seed", "logprobs", "prompt_logprobs"})


def _check_kinds(params: SamplingParams) -> None:
    for name, kind, wanted in _KINDS:
        value = getattr(params, name)
        if not isinstance(value, kind):
            raise ValueError(f"{name}={value!r}; it must be {wanted}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    kind = "a whole number" if name in _WHOLE else "a number"
    is_fit = isinstance(value, int if name in _WHOLE else int | float) and not isinstance(value, bool)
    if not is_fit or not low <= value <= high:  # type: ignore[operator]  # NaN is in no range
        raise ValueError(f"{name}={value!r}; it must be {kind} from {low:g} to {high:g}")


def sampling_params_of(fields: Mapping[str, Any]) -> SamplingParams:
    """Build sampling parameters from their fields, as returned by `dataclasses.asdict` or JSON."""
    structure, bias = fields["structure"], fields["logit_bias"]
    return SamplingParams(
        **{
            **fields,
            "logit_bias": {int(token): value for token, value in bias.items()},  # keys of JSON are texts
            "structure": None if structure is None else Structure(**structure),
        }
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt with its sampling parameters.

    Attributes:
        request_id: Id, unique among the requests in flight.
        prompt_token_ids: The prompt, at least one token.
        params: Sampling parameters of the answers.
        priority: Smaller numbers are scheduled first; equal ones in order of arrival.
        timeout_s: Seconds from arrival until the request ends with its answers so far; None for no limit.
        adapter: Name of the adapter, None for the model itself.
        is_streamed: Whether text is returned with every step; if not, with the last one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    timeout_s: float | None = None
    adapter: str | None = None
    is_streamed: bool = True


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: The token at the position.
        logprob: Its log-probability, natural logarithm, in float32.
        top: The most likely tokens at the position, most likely first, as (token, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Increment of one answer of a request, after a step.

    Attributes:
        request_id: The request.
        index: The answer, from 0 to n - 1.
        token_ids: New tokens; a stop token is one of them.
        text: New text; it lags behind the tokens while a character or a stop string may be incomplete.
        logprobs: Log-probabilities of `token_ids`; None if not requested.
        prompt_logprobs: Log-probabilities of the prompt's tokens except the first; once, with the first delta
            of answer 0.
        finish_reason: Reason of the answer's end; None while it is open.
        stop_reason: The stop string or stop token that ended it; None for another reason.
        cached_tokens: Number of prompt tokens whose keys and values came from the prefix cache.
        is_restart: Whether all earlier deltas of the request are void because it starts over with new
            weights. All other fields are empty; streamed requests do not receive such a delta.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    is_restart: bool = False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of a request: its prompt, all its answers, and the cached part of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Number of tokens of the prompt and the answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One complete answer: the concatenation of its deltas."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt; `text`, `token_ids` and so on are those of the first answer.

    Attributes:
        request_id: The request.
        prompt: The prompt as text; None for a prompt of tokens.
        prompt_token_ids: The prompt.
        outputs: The answers.
        usage: Token counts.
        prompt_logprobs: Log-probabilities of the prompt's tokens except the first; None if not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Reason of the first answer's end."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the first answer; None if not requested."""
        return self.outputs[0].logprobs


class RequestRefused(ValueError):
    """A request that the engine cannot serve: too long, an unknown adapter, an invalid grammar."""


class RequestFailed(RuntimeError):
    """An accepted request that failed, while the engine and all other requests continue."""


REQUEST_ERRORS: Mapping[str, type[Exception]] = {
    each.__name__: each for each in (RequestFailed, RequestRefused)
}
"""Errors that end one request, by name; any other error ends the engine."""


class QueueFull(RuntimeError):
    """The queue is full; a later attempt may succeed."""


class EngineStopped(RuntimeError):
    """The engine has ended or is ending; the message has the reason."""
