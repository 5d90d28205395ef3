"""Works: what a call over shared memory returns, and how it ends, well or not.

torch's own works made from a future say True after an error, and a future whose result is an exception is a
success in C++: DDP ends with a segmentation fault then. So a work here carries its error, `wait` raises it,
and the futures that it gives out fail in C++ as well, because a function of theirs raises it.

[Note: who runs a call]
The calls of a group run in the order in which they were made, one at a time. A blocking call runs in its own
thread when nothing of its group is outstanding. All others are queued, and a thread of the group runs them;
but a thread that comes to wait for one that nobody has begun runs what is queued before it, and it, by
itself: to hand a call over to another thread and back takes 0.1 to 0.3 ms.
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
    """Require of a call under way that it is waited for by the process that has made it.

    Raises:
        RuntimeError: The present process is a forked child of that one.
    """
    if pid != os.getpid():
        raise RuntimeError(f"a forked child cannot wait for a call of its parent, process {pid}")


class SharedWork(dist.Work):
    """A call that is under way or has ended.

    Args:
        tensors: Where its results are.
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
        """Return when it has ended.

        Raises:
            DistBackendError: The call has failed, or has not ended within `timeout`.
        """
        if not self._is_done:
            self._finish_waiting(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return why it has failed, None if it has not."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with its results."""
        return self._tensors

    def get_future(self) -> Future[Any]:
        """Return a future of its tensors, which fails if the call does."""
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
        """End it, with an error or without; whoever waits goes on."""
        self._end(error)()

    def _end(self, error: BaseException | None) -> Callable[[], None]:
        """Note that it has ended; return what lets those go on who wait, and holds no tensors."""
        with self._mutex:
            if self._is_done:
                return lambda: None
            self._error, self._is_done = error, True
            futures, self._futures = self._futures, []
        return partial(_let_go_on, self._latch, futures)

    def _finish_waiting(self, timeout: float | None) -> None:
        self._await_latch(timeout)

    def _await_latch(self, timeout: float | None) -> None:
        """Wait until another thread has ended it."""
        if self._latch.acquire(timeout=-1 if timeout is None else timeout):
            self._latch.release()  # for the next one who waits
        elif not self._is_done:
            raise dist.DistBackendError(f"{self._described()} was not complete within {timeout:g} s")

    def _described(self) -> str:
        return "a call"

    def _outcome(self, _: Future[Any]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


class EndedWork(SharedWork):
    """A call that has ended well before its caller got this; nobody waits, so it needs no latch.

    Args:
        tensors: Where its results are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        dist.Work.__init__(self)
        self._tensors = list(tensors)
        self._error = None
        self._is_done = True
        self._mutex = _NEVER_CONTENDED
        self._futures = []


class QueuedWork(SharedWork):
    """A call in the queue of its group.

    Args:
        calls: The queue.
        run: What it does.
        tensors: Where its results are.
        doing: Names it, and those for whom it waits.
    """

    def __init__(
        self,
        calls: "CallQueue",
        run: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        doing: Callable[[], str],
    ) -> None:
        super().__init__(tensors)
        self._calls: CallQueue | None = calls
        self._run: Callable[[], None] | None = run
        self._doing: Callable[[], str] | None = doing
        self._pid = os.getpid()

    def _end(self, error: BaseException | None) -> Callable[[], None]:
        """See the base class; whoever keeps it does not keep the group."""
        let_go_on = super()._end(error)
        self._doing = None
        return let_go_on

    def _described(self) -> str:
        doing = self._doing
        return doing() if doing is not None else super()._described()

    def execute(self) -> Callable[[], None]:
        """Do it, in whatever thread; return what lets those go on who wait.

        That is to be called when nothing of this thread refers to the call any more: who has waited may drop
        its tensors then, and counts on it that their memory is free.
        """
        run, self._run, self._calls = self._run, None, None
        assert run is not None, "a call runs once"
        try:
            run()
        except BaseException as error:
            let_go_on = self._end(error)
            if isinstance(error, Exception):
                return let_go_on
            let_go_on()
            raise
        return self._end(None)

    def _finish_waiting(self, timeout: float | None) -> None:
        check_process(self._pid)
        calls = self._calls
        if calls is not None and timeout is None:
            calls.run_until(self)
        self._await_latch(timeout)


class CallQueue:
    """The collectives of a group, in the order of their calls; see [Note: who runs a call]."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedWork] = deque()
        self._running = threading.Lock()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ordering = threading.Lock()  # of calls by several threads

    def run(self, run: Callable[[], None]) -> None:
        """Run a call and return when it has ended."""
        with self._ordering:
            is_first = not self._waiting and self._running.acquire(blocking=False)
            work = None if is_first else self._queued(run, (), lambda: "a blocking call")
        if work is not None:
            self._wake()  # whoever is running one now may be through before we look
            work.wait()
            return
        try:
            run()
        finally:
            self._running.release()
            if self._waiting:  # queued meanwhile, by another thread
                self._wake()

    def start(
        self, run: Callable[[], None], tensors: Sequence[torch.Tensor], doing: Callable[[], str]
    ) -> SharedWork:
        """Have a call run, and return at once; the arguments are those of `QueuedWork`."""
        with self._ordering:
            work = self._queued(run, tensors, doing)
        self._wake()
        return work

    def run_until(self, work: SharedWork) -> None:
        """Run queued calls in this thread as long as nobody else does, and `work` has not ended."""
        while not work.is_completed() and self._running.acquire(blocking=False):
            try:
                if not self._waiting:
                    return
                self._waiting.popleft().execute()()
            finally:
                self._running.release()
                if self._waiting:
                    self._wake()

    def stop(self, timeout: float) -> None:
        """End the thread; what is queued is not run any more, and fails."""
        while self._waiting:
            work = self._waiting.popleft()
            work.finish(dist.DistBackendError(f"the group was destroyed before {work._described()}"))
        if self._thread is not None:
            self._tokens.put(False)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout)
            self._thread = None

    def _queued(
        self, run: Callable[[], None], tensors: Sequence[torch.Tensor], doing: Callable[[], str]
    ) -> QueuedWork:
        work = QueuedWork(self, run, tensors, doing)
        self._waiting.append(work)
        return work

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self,), name=THREAD_NAME, daemon=True)
            self._thread.start()
        self._tokens.put(True)

    def _work_off_one(self) -> bool:
        """Run the oldest call that is queued, unless another thread has; return whether to go on."""
        if not self._tokens.get():
            return False
        with self._running:
            if self._waiting:
                self._waiting.popleft().execute()()
        return True


def _let_go_on(latch: threading.Lock, futures: Sequence[Future[Any]]) -> None:
    latch.release()
    for future in futures:
        future.set_result(None)


def _work_off(calls: CallQueue) -> None:
    while calls._work_off_one():
        pass
