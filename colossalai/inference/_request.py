"""Requests of an inference engine: what is asked for, what a step adds to an answer, and the whole answer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "timeout", "abort", "content_filter"]
"""Why an answer ended: a stop string or token; its length; the request's time; its client; or that it has
words which a server does not say, and then its last text stands in the place of all before."""

MAX_LOGPROBS = 20
"""Most alternatives of a token whose log-probabilities can be asked for, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A language that an answer has to be in.

    Attributes:
        kind: Whether `source` is a JSON schema or a regular expression.
        source: The schema as JSON text, or the expression.
    """

    kind: Literal["json", "regex"]
    source: str


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn from the model's probabilities, and where it ends.

    The logits of a token go through, in this order: `logit_bias`, `structure` and `min_tokens`; the
    repetition penalty (1909.05858) and the additive penalties; the temperature; `top_k`; `top_p` (nucleus
    sampling, 1904.09751); `min_p` (2407.01082). Then one token is drawn.

    Attributes:
        n: Number of answers to one prompt.
        max_tokens: Most tokens of an answer; None for as many as the model's window allows.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: The most likely tokens are kept whose probabilities sum up to this much; in (0, 1].
        top_k: The most likely tokens are kept, this many; 0 or -1 for all.
        min_p: Tokens are kept that are at least this much as likely as the most likely one; in [0, 1].
        stop: Strings that end an answer; they are not part of it.
        stop_token_ids: Tokens that end an answer, beside the model's own end tokens.
        ignore_eos: Whether the model's own end tokens do not end an answer.
        min_tokens: Tokens before which no end token and no stop token can be drawn.
        seed: Makes the draws repeatable; None draws others in each request.
        logprobs: For each token its log-probability and those of so many most likely ones; None for neither.
            They are those of the model, before temperature and filters.
        prompt_logprobs: The same for the tokens of the prompt, but for the first.
        presence_penalty: Is subtracted from the logits of tokens that the answer has already; in [-2, 2].
        frequency_penalty: The same for each time that the answer has it; in [-2, 2].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens that the prompt
            or the answer has; from 0.01 to 100, 1 for none.
        logit_bias: Is added to the logits of tokens, by their ids; in [-100, 100].
        structure: What language the answer is in; None for any.

    Raises:
        ValueError: A field is out of its range; the message names it, its value and what is allowed.
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
            raise ValueError("max_tokens=0; it must be at least 1, unless prompt_logprobs are asked for")
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
        """Whether the most likely token is taken each time."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that are there already are drawn less."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_deterministic(self) -> bool:
        """Whether the same request has the same answer again."""
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
    ("repetition_penalty", 0.01, 100),  # divides logits, which stay finite
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
    """Return sampling parameters from their fields, as `dataclasses.asdict` and JSON have them."""
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
    """A prompt and how it is to be answered.

    Attributes:
        request_id: Names it; no two requests that are under way have the same.
        prompt_token_ids: The prompt, at least one token.
        params: How the answers are drawn.
        priority: Requests of a smaller number go first; among equals the first that came.
        timeout_s: Seconds from its arrival after which it ends with what it has; None for no limit.
        adapter: Name of the adapter that it asks for, None for the model itself.
        is_streamed: Whether the text comes with the steps; if not, all of it comes with the last one.
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
        token_id: The token that is there.
        logprob: Its log-probability, natural logarithm, in float32.
        top: The most likely tokens there, most likely first, as (token, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a step adds to one answer of a request.

    Attributes:
        request_id: The request.
        index: The answer, from 0 to n - 1.
        token_ids: New tokens; a stop token is one of them.
        text: New text; it lags behind the tokens where a character or a stop string may still be growing.
        logprobs: Those of `token_ids`, where they were asked for.
        prompt_logprobs: Of the tokens of the prompt but the first, once, with the first delta of answer 0.
        finish_reason: Why the answer has ended; None while it goes on.
        stop_reason: The stop string or stop token that ended it; None for another reason.
        cached_tokens: Tokens of the prompt whose keys and values came from the prefix cache.
        is_restart: Whether all that was heard of the request before is void: it begins again with new
            weights. Nothing else is said then; a streamed request hears of none.
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
    """Tokens of a request: of its prompt, of all its answers, and of the prompt from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One whole answer; the fields are those of `Delta`, put together."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt; `text` and its like are those of the first answer.

    Attributes:
        request_id: The request.
        prompt: The prompt as text; None where tokens were given.
        prompt_token_ids: The prompt.
        outputs: The answers.
        usage: Tokens that were read and made.
        prompt_logprobs: Of the tokens of the prompt but the first, where they were asked for.
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
        """Why the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the first answer, where they were asked for."""
        return self.outputs[0].logprobs


class RequestRefused(ValueError):
    """A request that can never be answered: too long, an unknown adapter, a wrong language."""


class RequestFailed(RuntimeError):
    """A request that was taken and cannot be answered, while the engine and all other requests go on."""


REQUEST_ERRORS: Mapping[str, type[Exception]] = {
    each.__name__: each for each in (RequestFailed, RequestRefused)
}
"""What ends one request, by name; any other error is the end of the engine."""


class QueueFull(RuntimeError):
    """More requests wait than the engine takes; another try later may find room."""


class EngineStopped(RuntimeError):
    """The engine has ended, or is ending and takes nothing new; the message says why."""
