"""From the engine's thread to the event loop: replies of the engine, their abort, and the drain at the end.

[Note: one thread at the engine's door]
`submit` and `abort` may wait for a lock that the engine holds during a step, and the event loop must not. So
they are called in one thread of their own, in the order in which they were asked for: the abort of a request
whose client has left comes after its submission, even if that was still under way, and requests enter in the
order in which they were tokenized.
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
from colossalai.serving._visit import Visit

ABORT_S = 5.0
"""Seconds that aborted requests have to say their last word when the server ends."""

_LOOK_S = 0.1  # how often the drain looks whether it is in a hurry

T = TypeVar("T")

Heard = tuple[int, Delta]
"""Which of the requests of a call, and what the engine says of it."""


class Reply:
    """What the engine says of the requests of one call, as it comes; used on the event loop.

    Args:
        service: The engine.
        door: The thread that talks to it.
        requests: What is asked, one request for each prompt.
        visit: The call that it belongs to; tokens and times are noted there.
    """

    def __init__(
        self, service: Service, door: ThreadPoolExecutor, requests: Sequence[Request], visit: Visit
    ) -> None:
        self._service = service
        self._door = door
        self._requests = requests
        self._visit = visit
        self._loop = asyncio.get_running_loop()
        self._arrived: list[Heard] = []
        self._error: BaseException | None = None
        self._wake = asyncio.Event()
        self._open = {index: request.params.n for index, request in enumerate(requests)}  # answers to come
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._submitted: list[str] = []  # in the thread of the door only

    async def submit(self) -> None:
        """Ask the engine; if it refuses one of the requests, the others are aborted by `close`.

        Raises:
            RequestRefused: A request can never be answered.
            QueueFull: The engine has no room.
            EngineStopped: The engine takes nothing.
        """
        await self._loop.run_in_executor(self._door, self._submit)

    async def next(self) -> list[Heard] | None:
        """Wait for what the engine says next; None after the last of it.

        Raises:
            ApiError: A request that the engine had taken has failed; what came before has been returned.
        """
        while not self._arrived:
            if self._error is not None:
                raise failure(self._error) from self._error
            if not self._open:
                return None
            self._wake.clear()
            await self._wake.wait()
        heard, self._arrived = self._arrived, []
        return heard

    def abort(self) -> None:
        """End the requests that have not ended; what the engine still says of them is heard."""
        if self._open:
            self._door.submit(self._abort, [self._requests[index].request_id for index in self._open])

    def close(self) -> None:
        """End the requests that have not ended, and hear no more of them."""
        self.abort()
        self._open = {}

    # See [Note: one thread at the engine's door].
    def _submit(self) -> None:
        for index, request in enumerate(self._requests):
            self._service.submit(request, partial(self._listen, index))
            self._submitted.append(request.request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._submitted:
                try:
                    self._service.abort(request_id)
                except Exception as error:  # the others are to be aborted as well
                    get_dist_logger().error(f"{request_id} could not be aborted: {error!r}")

    def _listen(self, index: int, said: Delta | BaseException) -> None:
        """Hand on what the engine says, in the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended, and nobody listens any more
            self._loop.call_soon_threadsafe(self._hear, index, said)

    def _hear(self, index: int, said: Delta | BaseException) -> None:
        if index not in self._open:  # it was closed, or has failed
            return
        if isinstance(said, BaseException):
            del self._open[index]
            self._error = self._error or said
        else:
            self._note(index, said)
            self._arrived.append((index, said))
            if said.is_restart:
                self._open[index] = self._requests[index].params.n
            if said.finish_reason is not None:
                self._open[index] -= 1
                if not self._open[index]:
                    del self._open[index]
        self._wake.set()

    def _note(self, index: int, delta: Delta) -> None:
        if delta.is_restart:
            void = [place for place in self._num_tokens if place[0] == index]
            self._visit.generated_tokens -= sum(self._num_tokens.pop(place) for place in void)
        if delta.token_ids:
            visit, place = self._visit, (index, delta.index)
            visit.last_token_at = time.monotonic()
            if visit.first_token_at is None:
                visit.first_token_at = visit.last_token_at
            visit.generated_tokens += len(delta.token_ids)
            self._num_tokens[place] = self._num_tokens.get(place, 0) + len(delta.token_ids)
            visit.most_tokens = max(visit.most_tokens, self._num_tokens[place])


class Front:
    """What all routes of an application share: the engine, the threads, and the requests under way.

    Args:
        service: The engine.
        options: How it is served.
    """

    def __init__(self, service: Service, options: ServerOptions) -> None:
        self.service = service
        self.options = options
        self.metrics = Metrics(service)
        self.prompts = Prompts(service.tokenizer, service.info, options.num_tokenizer_threads)
        self.is_draining = False
        self.is_updating = False  # weights are being loaded
        self._is_over = False  # the time to drain is over
        self._door = ThreadPoolExecutor(1, thread_name_prefix="colossalai-serving-door")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="colossalai-serving-slow")
        self._visits: set[Visit] = set()
        self._replies: set[Reply] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self.service.info

    async def ask(self, requests: Sequence[Request], visit: Visit, *, full_status: int = 429) -> Reply:
        """Give requests to the engine; they are aborted when the visit ends, if they have not ended.

        Args:
            requests: One for each prompt.
            visit: The call that they belong to.
            full_status: The HTTP status where the queue is full.

        Raises:
            ApiError: The engine does not take one of `requests`, or the server ends.
        """
        if self._is_over:
            raise ending()
        reply = Reply(self.service, self._door, requests, visit)
        self._replies.add(reply)
        visit.on_end.callback(self._replies.discard, reply)
        visit.on_end.callback(reply.close)
        try:
            await reply.submit()
        except Exception as error:
            raise refusal(error, full_status=full_status) from error
        return reply

    async def run_slow(self, function: Callable[[], T]) -> T:
        """Run what may wait or take long in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._slow, function)

    def enter(self, visit: Visit) -> None:
        """Note that a request that generates has come.

        Raises:
            ApiError: The server ends: a 503.
        """
        if self.is_draining:
            raise ending()
        self._visits.add(visit)
        self._is_empty.clear()

    def leave(self, visit: Visit) -> None:
        """Note that it has ended."""
        self._visits.discard(visit)
        if not self._visits:
            self._is_empty.set()

    async def drain(self, seconds: float, is_in_a_hurry: Callable[[], bool]) -> None:
        """Take nothing new, wait for what runs, and abort what then still does.

        Args:
            seconds: How long running requests have.
            is_in_a_hurry: Is asked whether to wait no longer.
        """
        self.is_draining = True
        end = time.monotonic() + seconds
        while self._visits and time.monotonic() < end and not is_in_a_hurry():
            await self._is_empty_within(min(_LOOK_S, end - time.monotonic()))
        if self._visits:
            self._is_over = True
            why = f"{seconds:g} s were not enough for them"
            if time.monotonic() < end:
                why = "a second signal asked for the end at once"
            get_dist_logger().warning(f"{len(self._visits)} requests are aborted: {why}")
            for reply in self._replies:
                reply.abort()
            await self._is_empty_within(ABORT_S)

    async def close(self) -> None:
        """End the threads, after the last request: a server cancels those that are left, and may not wait."""
        self.is_draining = self._is_over = True
        await self._is_empty_within(ABORT_S)
        self._door.shutdown()
        self._slow.shutdown()
        self.prompts.close()

    async def _is_empty_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self._visits


def ending() -> ApiError:
    """Return the answer to what comes while the server ends."""
    headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
    return ApiError(503, "the server is ending and takes nothing new", code="draining", headers=headers)
