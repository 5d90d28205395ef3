"""Streams: deltas from the engine's thread to the event loop, aborts, and the drain at shutdown.

[Note: thread of the engine]
`submit` and `abort` may wait for a lock that the engine holds during a step, so the event loop must not call
them. One thread makes these calls in order: an abort follows the submission of its request, even if that was
still pending when the client left, and requests enter the queue in the order in which they were tokenized.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from colossalai.inference import Delta, ModelInfo, Request, Service
from colossalai.logging import get_dist_logger
from colossalai.serving._errors import RETRY_AFTER_S, ApiError, failure, refusal
from colossalai.serving._metrics import Metrics
from colossalai.serving._options import ServerOptions
from colossalai.serving._prompts import Prompts
from colossalai.serving._request_record import RequestRecord

ABORT_S = 5.0
"""Seconds for aborted requests to send their last delta at shutdown."""

_LOOK_S = 0.1  # interval at which the drain polls `is_in_a_hurry`

T = TypeVar("T")

IndexedDelta = tuple[int, Delta]
"""Index of a request of a call, and a delta of its answer."""


class Reply:
    """Deltas of the requests of one call, as they arrive; used on the event loop.

    Args:
        service: The engine.
        door: The thread that calls the engine.
        requests: One request for each prompt.
        record: Record of the call, where tokens and times are recorded.
    """

    def __init__(
        self, service: Service, door: ThreadPoolExecutor, requests: Sequence[Request], record: RequestRecord
    ) -> None:
        self._service = service
        self._door = door
        self._requests = requests
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._arrived: list[IndexedDelta] = []
        self._error: BaseException | None = None
        self._wake = asyncio.Event()
        self._open = {index: request.params.n for index, request in enumerate(requests)}  # answers to come
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._submitted: list[str] = []  # used in the engine's calling thread only

    async def submit(self) -> None:
        """Submit the requests; if the engine refuses one, `close` aborts the others.

        Raises:
            RequestRefused: A request cannot be served by this engine.
            QueueFull: The queue is full.
            EngineStopped: The engine has stopped.
        """
        await self._loop.run_in_executor(self._door, self._submit)

    async def next(self) -> list[IndexedDelta] | None:
        """Wait for the next deltas; None after the last one.

        Raises:
            ApiError: An accepted request has failed; its earlier deltas have been returned.
        """
        while not self._arrived:
            if self._error is not None:
                raise failure(self._error) from self._error
            if not self._open:
                return None
            self._wake.clear()
            await self._wake.wait()
        deltas, self._arrived = self._arrived, []
        return deltas

    def abort(self) -> None:
        """Abort the open requests; their last deltas are still delivered."""
        if self._open:
            self._door.submit(self._abort, [self._requests[index].request_id for index in self._open])

    def close(self) -> None:
        """Abort the open requests and drop their remaining deltas."""
        self.abort()
        self._open = {}

    # See [Note: thread of the engine].
    def _submit(self) -> None:
        for index, request in enumerate(self._requests):
            self._service.submit(request, partial(self._forward, index))
            self._submitted.append(request.request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._submitted:
                try:
                    self._service.abort(request_id)
                except Exception as error:  # the other requests must still be aborted
                    get_dist_logger().error(f"{request_id} could not be aborted: {error!r}")

    def _forward(self, index: int, said: Delta | BaseException) -> None:
        """Pass a delta or an error to the event loop, from the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._receive, index, said)

    def _receive(self, index: int, said: Delta | BaseException) -> None:
        if index not in self._open:  # closed or failed before
            return
        if isinstance(said, BaseException):
            del self._open[index]
            self._error = self._error or said
        else:
            self._record_delta(index, said)
            self._arrived.append((index, said))
            if said.is_restart:
                self._open[index] = self._requests[index].params.n
            if said.finish_reason is not None:
                self._open[index] -= 1
                if not self._open[index]:
                    del self._open[index]
        self._wake.set()

    def _record_delta(self, index: int, delta: Delta) -> None:
        if delta.is_restart:
            void = [place for place in self._num_tokens if place[0] == index]
            self._record.generated_tokens -= sum(self._num_tokens.pop(place) for place in void)
        if delta.token_ids:
            record, place = self._record, (index, delta.index)
            record.last_token_at = time.monotonic()
            if record.first_token_at is None:
                record.first_token_at = record.last_token_at
            record.generated_tokens += len(delta.token_ids)
            self._num_tokens[place] = self._num_tokens.get(place, 0) + len(delta.token_ids)
            record.most_tokens = max(record.most_tokens, self._num_tokens[place])


class Front:
    """State shared by all routes of an application: the engine, the threads, and the open requests.

    Args:
        service: The engine.
        options: Options of the server.

    Attributes:
        abort_s: Seconds for aborted requests to end.
    """

    def __init__(self, service: Service, options: ServerOptions) -> None:
        self.service = service
        self.options = options
        self.abort_s = ABORT_S
        self.metrics = Metrics(service)
        self.prompts = Prompts(service.tokenizer, service.info, options.num_tokenizer_threads)
        self.is_draining = False
        self.is_updating = False  # weights are being loaded
        self._is_over = False  # the time to drain is over
        self._door = ThreadPoolExecutor(1, thread_name_prefix="colossalai-serving-door")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="colossalai-serving-slow")
        self._records: set[RequestRecord] = set()
        self._replies: set[Reply] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def info(self) -> ModelInfo:
        """Name and limits of the served model."""
        return self.service.info

    async def ask(
        self, requests: Sequence[Request], record: RequestRecord, *, full_status: int = 429
    ) -> Reply:
        """Submit requests to the engine; those still open when the call ends are aborted.

        Args:
            requests: One for each prompt.
            record: Record of the call.
            full_status: HTTP status if the queue is full.

        Raises:
            ApiError: The engine rejects one of `requests`, or the server drains.
        """
        if self._is_over:
            raise ending()
        reply = Reply(self.service, self._door, requests, record)
        self._replies.add(reply)
        record.on_end.callback(self._replies.discard, reply)
        record.on_end.callback(reply.close)
        try:
            await reply.submit()
        except Exception as error:
            raise refusal(error, full_status=full_status) from error
        return reply

    async def run_slow(self, function: Callable[[], T]) -> T:
        """Run a slow or blocking function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._slow, function)

    def enter(self, record: RequestRecord) -> None:
        """Record a new generating request.

        Raises:
            ApiError: The server drains (503).
        """
        if self.is_draining:
            raise ending()
        self._records.add(record)
        self._is_empty.clear()

    def leave(self, record: RequestRecord) -> None:
        """Record the end of a request."""
        self._records.discard(record)
        if not self._records:
            self._is_empty.set()

    async def drain(self, seconds: float, is_in_a_hurry: Callable[[], bool]) -> None:
        """Reject new requests, wait for running ones, and abort those that remain.

        Args:
            seconds: Seconds for running requests.
            is_in_a_hurry: Returns True to end the wait at once.
        """
        self.is_draining = True
        end = time.monotonic() + seconds
        while self._records and time.monotonic() < end and not is_in_a_hurry():
            await self._wait_until_empty(min(_LOOK_S, end - time.monotonic()))
        if self._records:
            self._is_over = True
            why = f"{seconds:g} s were not enough for them"
            if time.monotonic() < end:
                why = "a second signal asked for the end at once"
            get_dist_logger().warning(f"{len(self._records)} requests are aborted: {why}")
            for reply in self._replies:
                reply.abort()
            await self._wait_until_empty(self.abort_s)

    async def close(self) -> None:
        """End the threads after the last request; the server cancels open requests without waiting."""
        self.is_draining = self._is_over = True
        await self._wait_until_empty(self.abort_s)
        self._door.shutdown()
        self._slow.shutdown()
        self.prompts.close()

    async def _wait_until_empty(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self._records


def ending() -> ApiError:
    """Return the error of a request that arrives during shutdown."""
    headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
    return ApiError(503, "the server is ending and takes nothing new", code="draining", headers=headers)
