"""Draws: parameters and results of token sampling, as columns that can be sent between ranks.

Each token has one uniform random number, a function of the request's seed, the answer and the position.
"""

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from colossalai.inference._request import SamplingParams, TokenLogprobs

_NONE = np.zeros(0, np.int64)
_MOST_TOP_K = 2**31 - 1  # more than any vocabulary; the column has 64 bits

HAS_NAN, HAS_INFINITY, HAS_NO_TOKEN = -1, -2, -3
"""Returned instead of a token if none can be drawn: a logit is NaN or infinite, or no token is allowed."""


def uniform_of(seed: int, choice: int, position: int) -> float:
    """Return the random number in [0, 1) of one token: a hash of the arguments, the same on every machine.

    Args:
        seed: Seed of the request.
        choice: Index of the answer in the request.
        position: Index of the token in the answer.
    """
    name = (
        seed.to_bytes(16, "little", signed=True)
        + choice.to_bytes(8, "little")
        + position.to_bytes(8, "little")
    )
    number = int.from_bytes(
        hashlib.blake2b(name, digest_size=8, person=b"colossalai-draw").digest(), "little"
    )
    return (number >> 11) * 2.0**-53


def fresh_seed() -> int:
    """Return a random seed for a request without one."""
    return secrets.randbits(63)


def accepted(drafted: Sequence[int], drawn: Sequence[int]) -> int:
    """Return the number of drafted tokens that agree with the drawn ones, up to the first difference.

    Draws use the same uniform numbers with and without a draft, so `drawn[: accepted(...) + 1]` is the same
    text as drawn token by token.
    """
    for number, (draft, draw) in enumerate(zip(drafted, drawn, strict=False)):
        if draft != draw:
            return number
    return min(len(drafted), len(drawn))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Parameters of one draw: the filters of `SamplingParams`, with their tokens.

    Attributes:
        temperature: 0 for the most likely token.
        top_k: 0 for all.
        top_p: 1 for all.
        min_p: 0 for all.
        uniform: The random number in [0, 1).
        num_top: Number of alternatives with log-probabilities; -1 for no log-probabilities at all.
        repetition_penalty: Penalty of the tokens `seen`.
        presence_penalty: Penalty of the tokens `answered`.
        frequency_penalty: Penalty of these for each of `counts`.
        seen: Tokens of the prompt and the answer, each once; empty without such a penalty.
        answered: Tokens of the answer, each once; empty without such a penalty.
        counts: Number of occurrences of each in the answer.
        biased: Tokens with a bias.
        biases: Biases; -inf for tokens that must not be drawn.
        mask: One bit for each allowed token, lowest bit first in 32-bit words; None for all tokens.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    num_top: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seen: np.ndarray
    answered: np.ndarray
    counts: np.ndarray
    biased: np.ndarray
    biases: np.ndarray
    mask: np.ndarray | None


def draw_of(
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int],
    answer_token_ids: Sequence[int],
    uniform: float,
    banned: Collection[int] = (),
    mask: np.ndarray | None = None,
) -> Draw:
    """Return the parameters of an answer's next draw.

    Args:
        params: Sampling parameters of the request.
        prompt_token_ids: The prompt.
        answer_token_ids: The answer so far, drafted tokens included.
        uniform: `uniform_of` the position.
        banned: Tokens that must not be drawn: end tokens before `params.min_tokens`.
        mask: Bits of the tokens that the structure allows.
    """
    seen, answered, counts = _NONE, _NONE, _NONE
    if params.repetition_penalty != 1:
        seen = np.unique(np.array((*prompt_token_ids, *answer_token_ids), np.int64))
    if (params.presence_penalty or params.frequency_penalty) and answer_token_ids:
        answered, counts = np.unique(np.array(answer_token_ids, np.int64), return_counts=True)
    biases = {**params.logit_bias, **dict.fromkeys(banned, -np.inf)}
    return Draw(
        temperature=params.temperature,
        top_k=min(max(params.top_k, 0), _MOST_TOP_K),
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=uniform,
        num_top=-1 if params.logprobs is None else params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seen=seen,
        answered=answered,
        counts=counts,
        biased=np.array(list(biases), np.int64) if biases else _NONE,
        biases=np.array(list(biases.values()), np.float64),
        mask=mask,
    )


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Parameters of the draws of many rows, in columns; lists of tokens are flattened with their rows.

    Attributes:
        temperature: (rows,) float64; the next five have the same shape.
        top_k: int64.
        top_p: float64.
        min_p: float64.
        uniform: float64.
        num_top: int64.
        seen_rows: (all seen tokens,) int64, like all columns of tokens and rows.
        seen: The tokens.
        seen_penalties: float64, repetition penalty of the row.
        answered_rows: Row of each token in an answer.
        answered: The tokens.
        answered_penalties: float64, sum of the presence penalty and the frequency penalty times the count.
        biased_rows: Row of each token with a bias.
        biased: The tokens.
        biases: float64, the biases.
        masked_rows: (masked rows,).
        masks: (masked rows, words) int32.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    num_top: np.ndarray
    seen_rows: np.ndarray
    seen: np.ndarray
    seen_penalties: np.ndarray
    answered_rows: np.ndarray
    answered: np.ndarray
    answered_penalties: np.ndarray
    biased_rows: np.ndarray
    biased: np.ndarray
    biases: np.ndarray
    masked_rows: np.ndarray
    masks: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Draw]) -> Self:
        """Concatenate draws."""
        columns: dict[str, np.ndarray] = {
            name: np.array(
                [getattr(row, name) for row in rows], np.int64 if name in ("top_k", "num_top") else np.float64
            )
            for name in ("temperature", "top_k", "top_p", "min_p", "uniform", "num_top")
        }
        numbers = np.arange(len(rows))
        for name in ("seen", "answered", "biased"):
            parts = [getattr(row, name) for row in rows]
            columns[name] = np.concatenate([_NONE, *parts])
            columns[f"{name}_rows"] = np.repeat(numbers, [len(part) for part in parts])
        columns["seen_penalties"] = np.repeat(
            [row.repetition_penalty for row in rows], [len(row.seen) for row in rows]
        ).astype(np.float64)
        columns["answered_penalties"] = np.concatenate(
            [np.zeros(0), *(row.presence_penalty + row.frequency_penalty * row.counts for row in rows)]
        )
        columns["biases"] = np.concatenate([np.zeros(0), *(row.biases for row in rows)])
        masked = [number for number, row in enumerate(rows) if row.mask is not None]
        columns["masked_rows"] = np.array(masked, np.int64)
        masks = [row.mask for row in rows if row.mask is not None]
        columns["masks"] = np.stack(masks) if masks else np.zeros((0, 0), np.int32)
        return cls(**columns)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns by name, to be sent."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """Rebuild from the output of `arrays`."""
        return cls(**arrays)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Drawn tokens, and log-probabilities of the model if requested.

    Attributes:
        token_ids: (rows,) int64; negative for a failed draw, see `failure_at`.
        num_top: (rows,) int64, number of requested alternatives.
        logprobs: (rows,) float32, of the tokens; NaN where `num_top` is -1.
        top_ids: (rows, largest `num_top`) int64, most likely first.
        top_logprobs: The same shape, float32.
    """

    token_ids: np.ndarray
    num_top: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns by name, to be sent."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """Rebuild from the output of `arrays`."""
        return cls(**arrays)

    def failure_at(self, row: int) -> int | None:
        """Return the failure of a row: HAS_NAN, HAS_INFINITY or HAS_NO_TOKEN; None if a token was drawn."""
        token = int(self.token_ids[row])
        return token if token < 0 else None

    def logprobs_at(self, row: int) -> TokenLogprobs | None:
        """Return the log-probabilities of a row; None if not requested."""
        count = int(self.num_top[row])
        if count < 0:
            return None
        top = zip(self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist(), strict=True)
        return TokenLogprobs(
            token_id=int(self.token_ids[row]), logprob=float(self.logprobs[row]), top=tuple(top)
        )
