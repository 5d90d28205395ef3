"""Store with deadlines: calls with a time limit, since torch's wait for ever for a stopped server.

[Note: server of the store]
A launcher based on torch's agent (`colossalai run`, torchrun) serves it itself, and the ranks are its
clients: a stopped or dead rank 0 does not affect the store. In all other launches rank 0 serves it, in a
compiled thread: it answers while Python's lock is held there, but not while the process is stopped. Few of
torch's calls have a time limit: most would wait for a stopped server as long as its machine keeps the
connection. So a thread makes the calls, and callers wait for that thread.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from colossalai._clock import Clock

T = TypeVar("T")

_JOIN_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.02  # between two checks for keys that are missing
_Request = tuple[Callable[[], Any], "Future[Any]"]


class SilentStoreError(dist.DistError):
    """The server of the store did not answer in time."""


class DeadlineStore:
    """A part of the job's store, over a connection of its own; for several threads, one call at a time.

    Args:
        prefix: The name of the part.
        store: The store of the ranks.
        timeout: Seconds after which a call gives up, but for `wait`.
        clock: The clock of `wait`.

    Attributes:
        launcher: Address of the launcher that serves the store: "127.0.0.1:29500"; empty if rank 0 does.
    """

    def __init__(self, prefix: str, store: dist.Store, *, timeout: float, clock: Clock) -> None:
        self._store = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout))
        self._timeout = timeout
        self._clock = clock
        self.launcher = _launcher_of(store)
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(
            target=_serve_requests, args=(self._requests,), daemon=True, name="colossalai-store"
        )
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._request(lambda: self._store.set(key, value))

    def add(self, key: str, value: int) -> int:
        """Add to a number, and return the sum."""
        return self._request(lambda: self._store.add(key, value))

    def check(self, *keys: str) -> bool:
        """Return whether all keys are there."""
        return self._request(lambda: self._store.check(list(keys)))

    def text(self, key: str) -> str:
        """Return the value of a key, empty without one; does not wait for it."""
        return self._request(lambda: self._store.get(key).decode() if self._store.check([key]) else "")

    def texts(self, keys: list[str]) -> list[str]:
        """Return the values of existing keys."""
        return [value.decode() for value in self._request(lambda: self._store.multi_get(keys))]

    def wait(self, keys: list[str], seconds: float) -> None:
        """Wait until some keys are there.

        Raises:
            DistError: A key is missing after `seconds`.
        """
        deadline, pause = self._clock.now() + seconds, _FIRST_PAUSE_S
        while not self.check(*keys):  # torch's own wait writes warnings when its time is up
            if self._clock.now() >= deadline:
                raise dist.DistStoreError(f"keys are missing after {seconds:g} s: {', '.join(keys)}")
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def delete(self, *keys: str) -> None:
        """Delete keys that may be there."""
        self._request(lambda: [self._store.delete_key(key) for key in keys])

    def close(self) -> None:
        """End the thread, unless it waits for the server: then it ends with the process."""
        self._requests.put(None)
        if self._last is None or self._last.done():
            self._thread.join(_JOIN_S)
        del self._store

    def _request(self, call: Callable[[], T]) -> T:
        """Make a call, and wait for it.

        Raises:
            SilentStoreError: The server does not answer within the time limit.
        """
        with self._lock:
            if self._last is not None and not self._last.done():
                raise SilentStoreError("it has not answered an earlier request yet")
            answer: Future[T] = Future()
            self._last = answer
            self._requests.put((call, answer))
            try:
                return answer.result(self._timeout)
            except TimeoutError:
                raise SilentStoreError(f"it has not answered for {self._timeout:g} s") from None


def agent_serves(host: str, port: int) -> bool:
    """Whether the launcher's agent, not rank 0, listens at this address."""
    address = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (host, str(port))


def _launcher_of(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and agent_serves(store.host, store.port):
        return f"{store.host}:{store.port}"
    return ""


def _serve_requests(requests: "queue.SimpleQueue[_Request | None]") -> None:
    while (request := requests.get()) is not None:
        call, answer = request
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)
        del request, call, answer
