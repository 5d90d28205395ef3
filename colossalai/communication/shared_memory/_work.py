"""Works of calls over shared memory, with their errors and futures.

A torch work made from a future reports success after an error, and a future whose result is an exception is a
success in C++, at which DDP segfaults. So a work here stores its error, `wait` raises it, and its futures
also fail in C++, because their callback raises it.

[Note: execution of calls]
The calls of a group run one at a time, in the order in which they were issued. A blocking call runs in its
caller's thread if the queue of the group is empty and no call runs. All other calls are queued, and a thread
of the group runs them. A thread that waits for a call which has not started runs the queue up to that call
itself: a switch to another thread and back takes 0.1 to 0.3 ms.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

THREAD_NAME = "colossalai-shared-memory"
_NO_TIMEOUT = timedelta(0)
_NEVER_CONTENDED = threading.Lock()


def check_process(pid: int) -> None:
    """Check that a call is waited for in the process that has issued it.

    Raises:
        RuntimeError: The current process is a forked child of process `pid`.
    """
    if pid != os.getpid():
        raise RuntimeError(f"a forked child cannot wait for a call of its parent, process {pid}")


class SharedWork(dist.Work):
    """Work of a call over shared memory.

    Args:
        tensors: Tensors of the results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._error: BaseException | None = None
        self._is_done = False
        self._latch = threading.Lock()
        self._latch.acquire()
        self._futures: list[Future[Any]] = []
        self._mutex = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the call is complete.

        Raises:
            DistBackendError: The call has failed, or is not complete within `timeout`.
        """
        if not self._is_done:
            self._finish_waiting(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait until the call is complete."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of the results."""
        return self._tensors

    def get_future(self) -> Future[Any]:
        """Return a future of the results, which fails if the call does."""
        base: Future[Any] = Future()
        found = base.then(self._outcome)  # a function that raises makes a future that fails, in C++ as well
        with self._mutex:
            is_open = not self._is_done
            if is_open:
                self._futures.append(base)
        if not is_open:
            base.set_result(None)
        return found

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the work, with an error or without, and release its waiting threads."""
        self._end(error)()

    def _end(self, error: BaseException | None) -> Callable[[], None]:
        """Complete the work; return a function that releases its waiting threads and refers to no tensors."""
        with self._mutex:
            if self._is_done:
                return lambda: None
            self._error, self._is_done = error, True
            futures, self._futures = self._futures, []
        return partial(_release_waiting, self._latch, futures)

    def _finish_waiting(self, timeout: float | None) -> None:
        self._await_latch(timeout)

    def _await_latch(self, timeout: float | None) -> None:
        """Wait until another thread has completed the work."""
        if self._latch.acquire(timeout=-1 if timeout is None else timeout):
            self._latch.release()  # for the next waiting thread
        elif not self._is_done:
            raise dist.DistBackendError(f"{self._described()} was not complete within {timeout:g} s")

    def _described(self) -> str:
        return "a call"

    def _outcome(self, _: Future[Any]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


class EndedWork(SharedWork):
    """Work of a blocking call, which is complete when it is returned and so needs no latch.

    Args:
        tensors: Tensors of the results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        dist.Work.__init__(self)
        self._tensors = list(tensors)
        self._error = None
        self._is_done = True
        self._mutex = _NEVER_CONTENDED
        self._futures = []


class QueuedWork(SharedWork):
    """Work of a call in the queue of its group.

    Args:
        calls: Queue of the group.
        run: Function that executes the call.
        tensors: Tensors of the results.
        describe: Returns the name of the call and the ranks that it waits for.
    """

    def __init__(
        self,
        calls: "CallQueue",
        run: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        describe: Callable[[], str],
    ) -> None:
        super().__init__(tensors)
        self._calls: CallQueue | None = calls
        self._run: Callable[[], None] | None = run
        self._describe: Callable[[], str] | None = describe
        self._pid = os.getpid()

    def _end(self, error: BaseException | None) -> Callable[[], None]:
        """See the base class. The returned function does not refer to the group."""
        release = super()._end(error)
        self._describe = None
        return release

    def _described(self) -> str:
        describe = self._describe
        return describe() if describe is not None else super()._described()

    def execute(self) -> Callable[[], None]:
        """Run the call in the current thread; return the function that releases its waiting threads.

        Call that function when this thread has no reference to the call any more: a released thread may drop
        its tensors, and relies on their memory being freed then.
        """
        run, self._run, self._calls = self._run, None, None
        assert run is not None, "a call runs once"
        try:
            run()
        except BaseException as error:
            release = self._end(error)
            if isinstance(error, Exception):
                return release
            release()
            raise
        return self._end(None)

    def _finish_waiting(self, timeout: float | None) -> None:
        check_process(self._pid)
        calls = self._calls
        if calls is not None and timeout is None:
            # Runs this call here if no other thread has begun it; then the latch is open already.
            calls.run_until(self)
        self._await_latch(timeout)


class CallQueue:
    """Queue of the collectives of a group, in issue order; see [Note: execution of calls]."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedWork] = deque()
        self._running = threading.Lock()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ordering = threading.Lock()  # of calls by several threads

    def run(self, run: Callable[[], None]) -> None:
        """Run a blocking call."""
        with self._ordering:
            is_first = not self._waiting and self._running.acquire(blocking=False)
            work = None if is_first else self._queued(run, (), lambda: "a blocking call")
        if work is not None:
            self._wake()  # the running thread may have finished before the call was queued
            work.wait()
            return
        try:
            run()
        finally:
            self._running.release()
            if self._waiting:  # queued meanwhile, by another thread
                self._wake()

    def start(
        self, run: Callable[[], None], tensors: Sequence[torch.Tensor], describe: Callable[[], str]
    ) -> SharedWork:
        """Queue a call and return its work; see `QueuedWork` for the arguments."""
        with self._ordering:
            work = self._queued(run, tensors, describe)
        self._wake()
        return work

    def run_until(self, work: SharedWork) -> None:
        """Run queued calls in this thread until `work` is complete or another thread runs one."""
        while not work.is_completed() and self._running.acquire(blocking=False):
            try:
                if not self._waiting:
                    return
                # The returned function releases the waiting threads when no local refers to the call.
                self._waiting.popleft().execute()()
            finally:
                self._running.release()
                if self._waiting:
                    self._wake()

    def stop(self, timeout: float) -> None:
        """End the thread and fail the queued calls."""
        while self._waiting:
            work = self._waiting.popleft()
            # Never issued: the other ranks see this rank as departed.
            work.finish(dist.DistBackendError(f"the group was destroyed before {work._described()}"))
        if self._thread is not None:
            # Behind the tokens of earlier calls, which the thread finds gone.
            self._tokens.put(False)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout)
            self._thread = None

    def _queued(
        self, run: Callable[[], None], tensors: Sequence[torch.Tensor], describe: Callable[[], str]
    ) -> QueuedWork:
        work = QueuedWork(self, run, tensors, describe)
        self._waiting.append(work)
        return work

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_run_queue, args=(self,), name=THREAD_NAME, daemon=True)
            self._thread.start()
        self._tokens.put(True)

    def _run_oldest(self) -> bool:
        """Run the oldest queued call, if another thread has not; return whether to continue."""
        if not self._tokens.get():
            return False
        with self._running:
            if self._waiting:
                self._waiting.popleft().execute()()
        return True


def _release_waiting(latch: threading.Lock, futures: Sequence[Future[Any]]) -> None:
    # After the result or error is stored, so that released threads and callbacks find it.
    latch.release()
    for future in futures:
        future.set_result(None)


def _run_queue(calls: CallQueue) -> None:
    while calls._run_oldest():
        pass
