"""Engine in a thread of its own: requests from any thread, and steps in the engine's thread."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from colossalai.inference._engine import InferenceEngine
from colossalai.inference._request import Delta, EngineStopped, QueueFull, Request, RequestFailed
from colossalai.inference._service import EngineStats, Listener, ModelInfo
from colossalai.inference.loading import WeightSource
from colossalai.logging import get_dist_logger

# Interval between heartbeats of an idle engine; a new request wakes it at once.
_IDLE_S = 5.0
FINISH_LIMIT_S = 300.0
"""Default limit of the wait for running requests before an update of weights, during which others queue."""


@dataclass(frozen=True)
class _Update:
    """A pending update of the weights."""

    source: WeightSource
    in_flight: str
    give_up_at: float
    done: "Future[None]" = field(default_factory=Future)


class ThreadedEngine:
    """An engine as a `Service`.

    `run` is called in the engine's thread; all other methods can be called in any thread.

    Args:
        engine: The engine.
        info: Name and limits of the model.
        finish_limit_s: Maximum wait for running requests before an update of weights, in seconds.
    """

    def __init__(
        self, engine: InferenceEngine, info: ModelInfo, *, finish_limit_s: float = FINISH_LIMIT_S
    ) -> None:
        self._engine = engine
        self._info = info
        self._finish_limit_s = finish_limit_s
        self._updates: deque[_Update] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0  # accepted requests without a delta
        self._stopped: str | None = None
        self._error: BaseException | None = None
        self._on_end: list[Callable[[], None]] = []
        self._stats = engine.stats()

    @property
    def info(self) -> ModelInfo:
        """Name and limits of the served model."""
        return self._info

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None if only tokens are exchanged."""
        return self._engine.tokenizer

    @property
    def error(self) -> BaseException | None:
        """Error of the step that failed; None if none has."""
        return self._error

    def on_end(self, call: Callable[[], None]) -> None:
        """Register a callback for the end of the engine, in its thread; called at once if it has ended."""
        with self._lock:
            if self._stopped is None:
                self._on_end.append(call)
                return
        call()

    def check(self, request: Request) -> None:
        """Check that a request can be served.

        Raises:
            RequestRefused: `request` cannot be served.
        """
        self._engine.check(request)

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; see `Service.submit`.

        Raises:
            RequestRefused: `request` cannot be served.
            QueueFull: The queue is full.
            EngineStopped: The engine has ended.
        """
        self._engine.check(request)
        limit = self._engine.limits.max_queue
        with self._lock:
            if self._stopped is not None:
                raise EngineStopped(self._stopped)
            if limit is not None and self._num_waiting >= limit:
                raise QueueFull(f"{self._num_waiting} requests wait, as many as may; try again later")
            self._num_waiting += 1
            self._inbox.put(lambda: self._begin(request, listener))

    def abort(self, request_id: str) -> None:
        """Abort a request; does nothing if it has ended."""
        self._inbox.put(lambda: self._engine.abort(request_id))

    def stats(self) -> EngineStats:
        """Return the state of the engine after its last step."""
        return self._stats

    def update_weights(self, path: WeightSource, *, in_flight: str) -> None:
        """Load new values from a checkpoint; see `Service.update_weights`.

        Args:
            path: The checkpoint; or values in memory, as for `InferenceEngine.update_weights`.
            in_flight: "finish" or "restart".
        """
        update = _Update(path, in_flight, time.monotonic() + self._finish_limit_s)
        with self._lock:
            if self._stopped is not None:
                raise EngineStopped(self._stopped)
            self._inbox.put(lambda: self._updates.append(update))
        update.done.result()  # blocks until the engine's thread has applied the update, or has ended

    def stop(self, reason: str = "the engine has ended") -> None:
        """Make `run` return; requests in flight fail with the reason."""
        with self._lock:
            self._stopped = self._stopped or reason
        self._inbox.put(lambda: None)

    def run(self) -> None:
        """Run steps until `stop` is called or a step fails, which ends all open requests; see `error`."""
        try:
            while self._stopped is None:
                if self._engine.has_work:
                    self._take_messages(wait_s=0)
                    self._engine.step()
                elif not self._take_messages(wait_s=_IDLE_S):
                    self._engine.executor.keep_alive()
                if self._updates:
                    self._update(self._updates[0])
                self._stats = self._engine.stats()
            self._engine.executor.close()
        except Exception as error:
            self._error = error
            get_dist_logger("colossalai.inference").error(f"the engine has failed: {error}")
        self._end()

    def _update(self, update: _Update) -> None:
        """Run an update of weights once it is due."""
        if update.in_flight == "finish":
            self._engine.hold()
            if self._engine.has_begun and time.monotonic() < update.give_up_at:
                return
        try:
            if update.in_flight == "finish" and self._engine.has_begun:
                self._engine.release()
                raise TimeoutError(
                    f"{len(self._engine.scheduler.running)} requests still run after "
                    f"{self._finish_limit_s:g} s, and nothing has changed; in_flight='restart' waits for none"
                )
            self._engine.update_weights(update.source, in_flight=update.in_flight)
        except (ValueError, OSError, RequestFailed) as error:
            self._updates.popleft().done.set_exception(error)
        else:
            self._stats = self._engine.stats()  # before the waiting caller resumes and may read them
            self._updates.popleft().done.set_result(None)

    def _take_messages(self, *, wait_s: float) -> bool:
        """Run the messages of other threads; return whether there were any."""
        num_taken = 0
        while True:
            waits = wait_s > 0 and not num_taken
            try:
                message = self._inbox.get(block=waits, timeout=wait_s if waits else None)
            except queue.Empty:
                return num_taken > 0
            message()
            num_taken += 1

    def _begin(self, request: Request, listener: Listener) -> None:
        has_begun = False

        def on_delta(received: Delta | BaseException) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self._leave_queue()
            listener(received)

        try:
            self._engine.submit(request, on_delta)
        except Exception as error:  # the request was checked: its id is in use
            self._leave_queue()
            listener(error)

    def _leave_queue(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _end(self) -> None:
        """Report the end to the listeners of all open requests and to pending updates."""
        with self._lock:
            self._stopped = self._stopped or f"the engine has failed: {self._error}"
            calls, self._on_end = self._on_end, []
        self._take_messages(wait_s=0)  # begins requests that are still in the inbox, so that they fail, too
        self._engine.fail(self._error or EngineStopped(self._stopped))
        for update in self._updates:
            update.done.set_exception(EngineStopped(self._stopped))
        self._stats = self._engine.stats()
        for call in calls:
            call()
