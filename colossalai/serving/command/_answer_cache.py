"""Answer cache: repeated deterministic requests are served from stored answers.

It wraps an engine as another `Service`. Only deterministic requests (temperature 0, or a seed) are looked up
and stored. The key is everything that affects the answer: prompt, adapter and every sampling parameter. A
request without a seed is never served from the cache.
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

_WHOLE = ("stop", "length")  # finish reasons that the same request has again


class AnswerCache(ServiceInFront):
    """An engine with a cache of answers.

    Args:
        service: The engine.
        num_requests: Capacity in requests, apart from pinned ones; the least recently used is evicted first.
        most_answers: Largest `n` of a request that is stored.
        fixed: Pinned requests as (prompt, max_tokens): the first stored answers of each stay in the cache
            until the weights change.

    Raises:
        ValueError: `fixed` contains prompts, and `service` has no tokenizer.
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
        """Serve a request from the cache (at once, in this thread, one delta per answer), or forward it.

        Raises:
            RequestRefused: `request` cannot be served by this engine.
            QueueFull: The queue is full.
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
            self._service.submit(request, _CachingListener(self, request, key, version, listener).on_delta)
            return
        for delta in found:
            listener(
                replace(delta, request_id=request.request_id, cached_tokens=len(request.prompt_token_ids))
            )

    def stats(self) -> EngineStats:
        """Return the state of the engine, with the number of cache hits."""
        return replace(self._service.stats(), answer_cache_hits=self._num_hits)

    def update_weights(self, path: str, *, in_flight: str) -> None:
        """Load new values and clear the cache; see `Service.update_weights`."""
        try:
            self._service.update_weights(path, in_flight=in_flight)
        finally:  # requests accepted before this point carry an older version and are not stored
            with self._lock:
                self._version += 1
                self._kept.clear()
                self._pinned.clear()
                self._pinned_keys.clear()

    def keep(self, request: Request, key: Hashable, version: int, answers: tuple[Delta, ...]) -> None:
        """Store complete answers, unless the weights have changed since the request arrived."""
        params = request.params
        fixed = (request.prompt_token_ids, -1 if params.max_tokens is None else params.max_tokens)
        with self._lock:
            if version != self._version or self._find(key) is not None:
                return
            # Pin the first request of a fixed prompt only: later ones may differ in any number of seeds.
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


class _CachingListener:
    """Listener that forwards the deltas of a request and stores its complete answers.

    Args:
        cache: The cache.
        request: The request.
        key: Cache key of the request.
        version: Version of the weights when the request arrived.
        listener: Listener of the request.
    """

    def __init__(
        self, cache: AnswerCache, request: Request, key: Hashable, version: int, listener: Listener
    ) -> None:
        self._cache, self._request, self._key, self._version = cache, request, key, version
        self._listener = listener
        self._deltas: list[list[Delta]] = [[] for _ in range(request.params.n)]

    def on_delta(self, received: Delta | BaseException) -> None:
        """Forward a delta; complete answers are stored before the last delta is forwarded."""
        if isinstance(received, Delta) and received.is_restart:
            self._deltas = [[] for _ in self._deltas]
        elif isinstance(received, Delta):
            self._deltas[received.index].append(received)
            ends = [deltas[-1].finish_reason if deltas else None for deltas in self._deltas]
            if received.finish_reason is not None and all(reason in _WHOLE for reason in ends):
                answers = tuple(map(_concatenate, self._deltas))
                self._cache.keep(self._request, self._key, self._version, answers)
        self._listener(received)


def key_of(request: Request) -> Hashable:
    """Return the cache key of a request: everything that affects its answer."""
    params = request.params
    if params.is_greedy and params.seed is not None:
        params = replace(params, seed=None)  # greedy decoding draws no random number
    shaping = tuple(_hashable(params, field.name) for field in fields(SamplingParams))
    return (request.prompt_token_ids, request.adapter, shaping)


def _hashable(params: SamplingParams, name: str) -> Hashable:
    if name == "logit_bias":
        return tuple(sorted(params.logit_bias.items()))
    value: Hashable = getattr(params, name)
    return value


def _concatenate(deltas: Sequence[Delta]) -> Delta:
    """Concatenate the deltas of an answer."""
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
