"""Figures of a load: throughput and latencies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from colossalai.cli._load._client import RequestOutcome
from colossalai.cli._load._load import LoadResult


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and percentiles of times in seconds; None without times."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, times: Sequence[float]) -> "Spread":
        """Return the mean and the percentiles of some times."""
        if not times:
            return cls(mean=None, p50=None, p90=None, p99=None)
        p50, p90, p99 = (float(value) for value in np.percentile(times, (50, 90, 99)))
        return cls(mean=float(np.mean(times)), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """The figures of a load.

    Attributes:
        finished: Number of successful requests.
        failed: Number of failed requests by kind.
        elapsed_s: Seconds from the first request to the last end.
        requests_per_s: Successful requests per second.
        output_tokens_per_s: Output tokens of successful requests per second.
        prompt_tokens: Prompt tokens of successful requests; None if the server sends no counts.
        output_tokens: Output tokens of successful requests.
        first_token_s: Times from the due time of a request to its first token.
        per_token_s: Mean times between tokens, per request.
        whole_s: Times from the due time of a request to its end.
        is_whole: Whether the load was not interrupted.
    """

    finished: int
    failed: dict[str, int]
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int | None
    output_tokens: int
    first_token_s: Spread
    per_token_s: Spread
    whole_s: Spread
    is_whole: bool

    def as_dict(self) -> dict[str, object]:
        """Return the figures as a dict."""
        return asdict(self)


def first_token_times(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return the times to the first token of successful requests."""
    return [
        each.first_s - each.began_s for each in outcomes if each.error is None and each.first_s is not None
    ]


def per_token_times(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return the mean times between tokens of successful requests with more than one token."""
    return [
        (each.last_s - each.first_s) / (each.output_tokens - 1)
        for each in outcomes
        if each.error is None
        and each.output_tokens > 1
        and each.first_s is not None
        and each.last_s is not None
    ]


def whole_times(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return the times to the end of successful requests."""
    return [each.ended_s - each.began_s for each in outcomes if each.error is None]


def figures_of(result: LoadResult) -> LoadFigures:
    """Return the figures of a load."""
    outcomes = result.outcomes
    finished = [each for each in outcomes if each.error is None]
    prompts = [each.prompt_tokens for each in finished if each.prompt_tokens is not None]
    num_tokens = sum(each.output_tokens for each in finished)
    elapsed = result.elapsed_s or float("inf")  # no request has ended: the rates are 0
    return LoadFigures(
        finished=len(finished),
        failed=dict(Counter(each.error for each in outcomes if each.error is not None).most_common()),
        elapsed_s=result.elapsed_s,
        requests_per_s=len(finished) / elapsed,
        output_tokens_per_s=num_tokens / elapsed,
        prompt_tokens=sum(prompts) if len(prompts) == len(finished) else None,
        output_tokens=num_tokens,
        first_token_s=Spread.of(first_token_times(outcomes)),
        per_token_s=Spread.of(per_token_times(outcomes)),
        whole_s=Spread.of(whole_times(outcomes)),
        is_whole=result.is_whole,
    )
