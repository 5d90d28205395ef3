"""Clocks of tests: time passes when a test, or what it tests, says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from colossalai._clock import Clock as Clock
from colossalai.context._process import process as process  # `process.clock` is that of a launch


class FakeClock:
    """A clock that goes on when somebody waits, and does not wait.

    Attributes:
        seconds: The time.
        clock: What is given to what waits.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(now=lambda: self.seconds, sleep=self.sleep, wait=self.wait)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Let time pass unless the event is set; return whether it is."""
        if not event.is_set():
            self.seconds += seconds
        return event.is_set()


def clock_of_file(path: Path) -> Clock:
    """Return a clock that stands still; when there is a file, it is an hour later at each look."""
    hours = count()
    return Clock(now=lambda: 3600.0 * next(hours) if path.exists() else 0.0)


class ReadClock(FakeClock):
    """A fake clock that is seen to be read: a wait for another rank reads it again and again.

    Attributes:
        step: Seconds that pass at each reading; 0: time stands still.
    """

    def __init__(self, step: float = 0.0) -> None:
        super().__init__()
        self.step = step
        self.clock = replace(self.clock, now=self._read)
        self._num_readings = 0
        self._actions: dict[int, Callable[[], object]] = {}

    def after(self, num_readings: int, action: Callable[[], object]) -> None:
        """Call a function at a later reading, in the thread that reads."""
        self._actions[self._num_readings + num_readings] = action

    def _read(self) -> float:
        self._num_readings += 1
        self.seconds += self.step
        self._actions.pop(self._num_readings, bool)()
        return self.seconds
