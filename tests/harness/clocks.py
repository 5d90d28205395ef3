"""Clocks of tests: time passes when a test, or what it tests, says so."""

from __future__ import annotations

import threading
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
