"""Calls of a reward function with a time limit each: in processes, or in threads.

The time of a call starts when a process or thread starts it, not when it is queued, so calls are handed out
one at a time. A process that exceeds the limit is killed. A thread cannot be: it is abandoned, as a daemon
that does not keep the program from ending.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from colossalai._clock import Clock

_START_S = 300.0  # for a process to import the function's module, on a busy machine
_END_S = 5.0  # for the exit handlers of the function's module

Call = tuple[str, str, Mapping[str, Any]]
"""Prompt, answer and row, as plain values."""


class RewardCallError(RuntimeError):
    """A failed call of a reward function; the message has its prompt and answer."""


class _Outcome(NamedTuple):
    """Outcome of a call: a reward, or an error with its traceback."""

    number: int
    reward: float
    problem: str | None = None
    trace: str = ""


class TimedCalls(ABC):
    """Abstract: concurrent calls of a function.

    Args:
        seconds: Time limit of each call.
        workers: Number of concurrent calls.
        clock: The clock of the limits.

    Attributes:
        seconds: Time limit of each call from now on.
    """

    def __init__(self, *, seconds: float, workers: int, clock: Clock) -> None:
        self.seconds, self._num_workers, self._clock = seconds, workers, clock

    def rewards(self, calls: Sequence[Call]) -> list[float]:
        """Return the result of each call.

        Raises:
            RewardCallError: A call has raised, ended its process, or exceeded its limit; the others are
                abandoned.
        """
        waiting = deque(range(len(calls)))
        deadlines: dict[int, float] = {}  # of running calls
        found: dict[int, float] = {}
        self._prepare(min(self._num_workers, len(calls)))
        while len(found) < len(calls):
            while waiting and len(deadlines) < self._num_workers:
                number = waiting.popleft()
                self._begin(number, calls[number])
                deadlines[number] = self._clock.now() + self.seconds
            latest = min(deadlines, key=deadlines.__getitem__)
            outcome = self._next(max(deadlines[latest] - self._clock.now(), 0.0))
            if outcome is None:
                raise _error(calls[latest], f"it took longer than seconds={self.seconds}")
            if outcome.problem is not None:
                error = _error(calls[outcome.number], outcome.problem)
                error.add_note(outcome.trace)
                raise error
            found[outcome.number] = outcome.reward
            del deadlines[outcome.number]
        return [found[number] for number in range(len(calls))]

    def _prepare(self, count: int) -> None:  # noqa: B027 - threads need nothing
        """Start `count` workers in advance."""

    @abstractmethod
    def _begin(self, number: int, call: Call) -> None:
        """Start a call; a worker is free."""

    @abstractmethod
    def _next(self, seconds: float) -> _Outcome | None:
        """Return the next outcome; None if there is none within `seconds`."""

    def close(self) -> None:  # noqa: B027 - threads cannot be ended
        """End the workers."""


class ThreadCalls(TimedCalls):
    """Calls in threads of this process.

    Args:
        function: The function.
        seconds: Time limit of each call.
        workers: Number of concurrent calls.
        clock: The clock of the limits. Default: that of this machine.
    """

    def __init__(
        self, function: Callable[..., float], *, seconds: float, workers: int, clock: Clock | None = None
    ) -> None:
        super().__init__(seconds=seconds, workers=workers, clock=clock or Clock())
        self._function = function
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()

    def rewards(self, calls: Sequence[Call]) -> list[float]:
        """Return the result of each call; see `TimedCalls`."""
        self._outcomes = queue.SimpleQueue()  # abandoned threads still put into the earlier queue
        return super().rewards(calls)

    def _begin(self, number: int, call: Call) -> None:
        outcomes = self._outcomes

        def answer() -> None:
            outcomes.put(_outcome(self._function, number, call))

        threading.Thread(target=answer, daemon=True, name=f"reward-{number}").start()

    def _next(self, seconds: float) -> _Outcome | None:
        try:
            return self._outcomes.get(timeout=seconds)
        except queue.Empty:
            return None


class _Worker:
    """A process that calls the function, and its current call.

    Attributes:
        connection: Connection to the process.
        number: Index of its current call; None without one.
        is_ready: Whether it has imported the function.
    """

    def __init__(self, function: bytes) -> None:
        # Not forked: locks held by threads of gloo and torch would never be released in the child.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=serve, args=(theirs, function), daemon=True, name="reward"
        )
        self.process.start()
        theirs.close()  # so that the end of the process closes the connection
        self.number: int | None = None
        self.is_ready = False

    def end(self) -> None:
        """End the process, at once if a call is running."""
        self.connection.close()
        if self.number is not None or not self.is_ready:
            self.process.kill()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class ProcessCalls(TimedCalls):
    """Calls in separate processes, which start with the first calls and run until `close`.

    Args:
        function: The pickled function.
        seconds: Time limit of each call.
        workers: Number of concurrent calls.
    """

    def __init__(self, function: bytes, *, seconds: float, workers: int) -> None:
        super().__init__(seconds=seconds, workers=workers, clock=Clock())
        self._function = function
        self._workers: list[_Worker] = []

    def rewards(self, calls: Sequence[Call]) -> list[float]:
        """Return the result of each call; see `TimedCalls`. After a failure all processes are ended."""
        try:
            return super().rewards(calls)
        except BaseException:
            self.close()
            raise

    def _prepare(self, count: int) -> None:
        self._workers += [_Worker(self._function) for _ in range(count - len(self._workers))]
        deadline = time.monotonic() + _START_S
        while starting := {each.connection: each for each in self._workers if not each.is_ready}:
            ready = wait(list(starting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise RewardCallError(f"a process for the reward has not begun within {_START_S} seconds")
            for connection in ready:
                self._receive_ready(starting[_as_connection(connection)])

    def _receive_ready(self, worker: _Worker) -> None:
        outcome = self._receive_outcome(worker, "a process for the reward ended before it had the function")
        if outcome.problem is not None:
            error = RewardCallError(
                f"a process of its own cannot import the reward function: {outcome.problem}; put it into a "
                "module that can be imported, not a notebook"
            )
            error.add_note(outcome.trace)
            raise error
        worker.is_ready = True

    def _begin(self, number: int, call: Call) -> None:
        worker = next(each for each in self._workers if each.number is None)
        worker.number = number
        worker.connection.send((number, call))

    def _next(self, seconds: float) -> _Outcome | None:
        busy = {each.connection: each for each in self._workers if each.number is not None}
        for connection in wait(list(busy), seconds):
            worker = busy[_as_connection(connection)]
            outcome = self._receive_outcome(worker, "it ended its process")
            worker.number = None
            return outcome
        return None

    def _receive_outcome(self, worker: _Worker, ended: str) -> _Outcome:
        """Return the outcome sent by a worker, or an error for a worker that has ended."""
        try:
            outcome: _Outcome = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(_END_S)
            problem = f"{ended}, with exit code {worker.process.exitcode}"
            return _Outcome(-1 if worker.number is None else worker.number, 0.0, problem)
        return outcome

    def close(self) -> None:
        """End the processes."""
        for each in self._workers:
            each.end()
        self._workers = []


def serve(connection: Connection, function: bytes) -> None:
    """Serve calls of a function: the main loop of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the trainer, which then ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        called = pickle.loads(function)
    except Exception as error:  # any error of its module: the trainer reports it
        connection.send(_failed(error, -1))
        return
    connection.send(_Outcome(-1, 0.0))
    while True:
        try:
            number, call = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(called, number, call))


def _end_with_parent() -> None:
    """End this process after its parent was killed, also during a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a process that somebody has started"
    wait([parent.sentinel])
    os._exit(1)


def _outcome(function: Callable[..., float], number: int, call: Call) -> _Outcome:
    try:
        return _Outcome(number, float(function(*call)))
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        return _failed(error, number)


def _failed(error: BaseException, number: int) -> _Outcome:
    return _Outcome(number, 0.0, f"{type(error).__name__}: {error}", traceback.format_exc())


def _error(call: Call, problem: str) -> RewardCallError:
    prompt, answer, _ = call
    return RewardCallError(f"of the answer {answer!r} to the prompt {prompt!r}: {problem}")


def _as_connection(found: object) -> Connection:
    assert isinstance(found, Connection), "nothing else was waited for"
    return found
