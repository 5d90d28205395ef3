"""Inference service: requests from any thread to one engine, and what its steps add to their answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from colossalai.inference._request import Delta, Request

Listener = Callable[[Delta | BaseException], None]
"""Hears each `Delta` of a request in order, or, once and at last, the error that ended it. It is called in
the thread of the engine: it hands on and returns at once."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is served.

    Attributes:
        name: The name that requests ask for it by.
        max_length: Most tokens of a prompt and its answer together.
        vocab_size: Number of tokens.
        created: Unix time of the loading, whole seconds.
        adapters: Names of adapters, which requests can ask for instead.
        facts: Further facts for people: class, parameters, dtype, ranks, blocks.
    """

    name: str
    max_length: int
    vocab_size: int
    created: int
    adapters: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The state of an engine at one time, and its totals since the start.

    Attributes:
        running: Requests that have blocks.
        queued: Requests that wait for some.
        blocks: Blocks of the pool by state: "used" by requests, "cached" for prefixes, "free".
        prefix_hit_tokens: Tokens of prompts that came from the prefix cache.
        prompt_tokens: Tokens of prompts that were read.
        generated_tokens: Tokens that were made.
        preemptions: Times that a request gave its blocks back.
        steps: Steps that were run.
        draft_tokens: Guessed tokens that steps computed.
        accepted_draft_tokens: Those of them that were taken into answers.
        answer_cache_hits: Requests that were answered without the engine.
        weight_updates: Times that the model was given new values.
        weights_version: A number that grows whenever values of the model have changed.
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
    """What a front end (HTTP, or a list of prompts) needs of an engine; safe to call from any thread."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers; None where only tokens are exchanged."""

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; `listener` hears of it until every answer has a `finish_reason`, or of its error.

        Raises:
            RequestRefused: `request` can never be answered.
            QueueFull: The queue has no room.
            EngineStopped: The engine has ended, or takes nothing new.
        """

    def abort(self, request_id: str) -> None:
        """End a request; its listener hears a last delta with "abort". Nothing happens if it has ended."""

    def stats(self) -> EngineStats:
        """Return the state of the engine now."""

    def update_weights(self, path: str, *, in_flight: str) -> None:
        """Take new values from a checkpoint; blocks until they are in force.

        Args:
            path: The checkpoint.
            in_flight: "finish" lets running requests end before, "restart" lets them begin again after it.

        Raises:
            ValueError: `path` does not hold the values of this model; nothing has changed then.
            OSError: `path` cannot be read; nothing has changed then.
            TimeoutError: Running requests did not end in time; nothing has changed then.
            RequestFailed: `path` could not be read to its end: requests fail until an update succeeds.
            EngineStopped: The engine has ended.
        """


class ServiceInFront:
    """Abstract: a service in front of another one, whose model it serves.

    Args:
        service: The other one.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._service.info

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None where only tokens are exchanged."""
        return self._service.tokenizer

    def abort(self, request_id: str) -> None:
        """End a request; nothing happens if it has ended."""
        self._service.abort(request_id)
