"""Answer cache: requests that would be answered the same again are answered from what was said before.

It stands before an engine as another `Service`. Only requests whose answer is determined (temperature 0, or a
seed) are looked up and kept, by all that shapes the answer: prompt, adapter and every field of the sampling
parameters. A request without a seed is never given somebody's sample.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace

from colossalai.inference import (
    Delta,
    EngineStats,
    Listener,
    Request,
    SamplingParams,
    Service,
    ServiceInFront,
    TokenLogprobs,
)

_WHOLE = ("stop", "length")  # reasons of an end that the same request has again: not its time, nor its client


class AnswerCache(ServiceInFront):
    """An engine that remembers.

    Args:
        service: The engine.
        num_requests: Most requests whose answers are kept, beside the fixed ones; the least recently used
            goes first.
        most_answers: Most answers of one request; one with a larger `n` is not kept.
        fixed: Requests whose answers stay, as (prompt, max_tokens): the first answers that are kept of each.
            They go when weights change, as all do.

    Raises:
        ValueError: `fixed` names prompts, and `service` has no tokenizer.
    """

    def __init__(
        self,
        service: Service,
        *,
        num_requests: int,
        most_answers: int = 1,
        fixed: Sequence[tuple[str, int]] = (),
    ) -> None:
        if fixed and service.tokenizer is None:
            raise ValueError("fixed_cache_keys are prompts, and the model has no tokenizer: leave them out")
        super().__init__(service)
        self._num_requests = num_requests
        self._most_answers = most_answers
        self._fixed = {(tuple(service.tokenizer(text)["input_ids"]), number) for text, number in fixed}
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Delta, ...]] = OrderedDict()  # least recently used first
        self._pinned: dict[Hashable, tuple[Delta, ...]] = {}
        self._pinned_keys: dict[tuple[tuple[int, ...], int], Hashable] = {}
        self._version = 0  # of the weights
        self._num_hits = 0

    def submit(self, request: Request, listener: Listener) -> None:
        """Answer at once, in this thread and with one delta for each answer, or hand the request on.

        Raises:
            RequestRefused: `request` can never be answered.
            QueueFull: The queue has no room.
            EngineStopped: The engine has ended.
        """
        if not request.params.is_deterministic or request.params.n > self._most_answers:
            self._service.submit(request, listener)
            return
        key = key_of(request)
        with self._lock:
            found = self._find(key)
            version = self._version
            self._num_hits += found is not None
        if found is None:
            self._service.submit(request, _Recorder(self, request, key, version, listener).hear)
            return
        for delta in found:
            listener(
                replace(delta, request_id=request.request_id, cached_tokens=len(request.prompt_token_ids))
            )

    def stats(self) -> EngineStats:
        """Return the state of the engine, with the number of requests that were answered from here."""
        return replace(self._service.stats(), answer_cache_hits=self._num_hits)

    def update_weights(self, path: str, *, in_flight: str) -> None:
        """Take new values, and forget what was said with the old ones; see `Service.update_weights`."""
        try:
            self._service.update_weights(path, in_flight=in_flight)
        finally:  # a request that was taken with the old ones, or meanwhile, is not kept when it ends
            with self._lock:
                self._version += 1
                self._kept.clear()
                self._pinned.clear()
                self._pinned_keys.clear()

    def keep(self, request: Request, key: Hashable, version: int, answers: tuple[Delta, ...]) -> None:
        """Keep whole answers, unless weights have changed since the request came."""
        params = request.params
        fixed = (request.prompt_token_ids, -1 if params.max_tokens is None else params.max_tokens)
        with self._lock:
            if version != self._version or self._find(key) is not None:
                return
            # Of a fixed prompt the first request stays: others may differ in as many seeds as somebody likes.
            if fixed in self._fixed and fixed not in self._pinned_keys:
                self._pinned_keys[fixed] = key
                self._pinned[key] = answers
                return
            self._kept[key] = answers
            while len(self._kept) > self._num_requests:
                self._kept.popitem(last=False)

    def _find(self, key: Hashable) -> tuple[Delta, ...] | None:
        if key in self._pinned:
            return self._pinned[key]
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)


class _Recorder:
    """Hears a request for its listener, and has whole answers kept.

    Args:
        cache: Where.
        request: The request.
        key: Its key.
        version: That of the weights when it came.
        listener: Who hears of it.
    """

    def __init__(
        self, cache: AnswerCache, request: Request, key: Hashable, version: int, listener: Listener
    ) -> None:
        self._cache, self._request, self._key, self._version = cache, request, key, version
        self._listener = listener
        self._heard: list[list[Delta]] = [[] for _ in range(request.params.n)]

    def hear(self, heard: Delta | BaseException) -> None:
        """Hand on what the engine says; keep it before its last word is handed on."""
        if isinstance(heard, Delta) and heard.is_restart:
            self._heard = [[] for _ in self._heard]
        elif isinstance(heard, Delta):
            self._heard[heard.index].append(heard)
            ends = [deltas[-1].finish_reason if deltas else None for deltas in self._heard]
            if heard.finish_reason is not None and all(reason in _WHOLE for reason in ends):
                answers = tuple(map(_joined, self._heard))
                self._cache.keep(self._request, self._key, self._version, answers)
        self._listener(heard)


def key_of(request: Request) -> Hashable:
    """Return all of a request that shapes its answer."""
    params = request.params
    if params.is_greedy and params.seed is not None:
        params = replace(params, seed=None)  # there is nothing to draw
    shaping = tuple(_hashable(params, field.name) for field in fields(SamplingParams))
    return (request.prompt_token_ids, request.adapter, shaping)


def _hashable(params: SamplingParams, name: str) -> Hashable:
    if name == "logit_bias":
        return tuple(sorted(params.logit_bias.items()))
    value: Hashable = getattr(params, name)
    return value


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Return one delta that says what several have said."""
    last = deltas[-1]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(found for delta in deltas for found in delta.logprobs or ())
    return replace(
        last,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=logprobs,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )
