"""Inference service: the interface between front ends in any thread and one engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from colossalai.inference._request import Delta, Request

Listener = Callable[[Delta | BaseException], None]
"""Called with each `Delta` of a request in order, or at last, once, with the error that ended it. It is
called in the engine's thread, so it must return at once."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Name and limits of the served model.

    Attributes:
        name: Name of the model in requests.
        max_length: Maximum number of tokens of a prompt and its answer together.
        vocab_size: Number of tokens of the vocabulary.
        created: Unix time of the loading, in whole seconds.
        adapters: Names of adapters, which requests can select instead of the model.
        facts: Further facts for display: class, parameters, dtype, ranks, blocks.
    """

    name: str
    max_length: int
    vocab_size: int
    created: int
    adapters: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Current state of an engine, and totals since its start.

    Attributes:
        running: Number of requests with blocks.
        queued: Number of requests that wait for blocks.
        blocks: Number of blocks by state: "used" by requests, "cached" for prefixes, "free".
        prefix_hit_tokens: Number of prompt tokens from the prefix cache.
        prompt_tokens: Number of prompt tokens read.
        generated_tokens: Number of tokens generated.
        preemptions: Number of preempted requests.
        steps: Number of steps.
        draft_tokens: Number of drafted tokens that steps computed.
        accepted_draft_tokens: Number of these that were accepted into answers.
        answer_cache_hits: Number of requests served from the answer cache.
        weight_updates: Number of weight updates.
        weights_version: Version of the weights, which grows with every change.
    """

    running: int = 0
    queued: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    answer_cache_hits: int = 0
    weight_updates: int = 0
    weights_version: int = 0


class Service(Protocol):
    """Interface of an engine for front ends (HTTP, or a list of prompts); safe in any thread."""

    @property
    def info(self) -> ModelInfo:
        """Name and limits of the served model."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers; None if only tokens are exchanged."""

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; `listener` is called until every answer has a `finish_reason`, or with an error.

        Raises:
            RequestRefused: `request` cannot be served.
            QueueFull: The queue is full.
            EngineStopped: The engine has ended, or accepts no new requests.
        """

    def abort(self, request_id: str) -> None:
        """Abort a request; its listener receives a last delta with "abort". Does nothing if it has ended."""

    def stats(self) -> EngineStats:
        """Return the current state of the engine."""

    def update_weights(self, path: str, *, in_flight: str) -> None:
        """Load new values from a checkpoint; blocks until they are in effect.

        Args:
            path: The checkpoint.
            in_flight: "finish" lets running requests finish first; "restart" starts them over afterwards.

        Raises:
            ValueError: `path` does not contain the values of this model; nothing has changed.
            OSError: `path` cannot be read; nothing has changed.
            TimeoutError: Running requests did not end in time; nothing has changed.
            RequestFailed: `path` could not be read to its end; requests fail until an update succeeds.
            EngineStopped: The engine has ended.
        """


class ServiceInFront:
    """Abstract: a service that wraps another one and serves the same model.

    Args:
        service: The wrapped service.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def info(self) -> ModelInfo:
        """Name and limits of the served model."""
        return self._service.info

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None if only tokens are exchanged."""
        return self._service.tokenizer

    def abort(self, request_id: str) -> None:
        """Abort a request; does nothing if it has ended."""
        self._service.abort(request_id)
