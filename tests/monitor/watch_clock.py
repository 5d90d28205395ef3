"""Clock of the watchdogs of a test: their seconds pass when the ranks are where the test has them.

A watchdog takes ten looks for its timeout. Here a look takes a moment, and its seconds count only while time
passes: after `let_time_pass`, while all ranks wait that a test wants to wait, or as far as `pass_time` says.
So no rank is late because its machine is busy. The deadlines of an alarm, within which the other ranks
answer, are minutes, but where the test names silent ranks: then they end when all others have answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tests.harness.clocks import Clock, process

LOOK_S = 0.02
SLOWNESS = 300  # of deadlines: real seconds for each
JUMP_S = 3600.0  # beyond all deadlines


class WatchClock:
    """The clock of one rank.

    Args:
        folder: The files by which the ranks know of each other.
        rank: Rank of this process.
        num_answers: Number of ranks after whose answers the deadlines of an alarm end; 0: they do not.
        is_patient: Whether deadlines are minutes.
    """

    def __init__(self, folder: Path, rank: int, *, num_answers: int, is_patient: bool) -> None:
        self._folder, self._rank, self._num_answers = folder, rank, num_answers
        self._slowness = SLOWNESS if is_patient else 1
        self._seconds = 0.0
        self._awaited: tuple[int, ...] | None = None
        self._has_jumped = False
        folder.mkdir(exist_ok=True)
        self.clock = Clock(now=lambda: self._seconds, sleep=self._sleep, wait=self._wait)

    def begin(self, waiting: Iterable[int]) -> None:
        """From now on let time pass as the module says.

        Args:
            waiting: The ranks that must wait for it.
        """
        self._awaited = tuple(waiting)

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait between two looks of the watchdog; in other threads, as long as is said."""
        if not _is_watchdog():
            return event.wait(seconds)
        self._note("waits", is_so=self._awaited is not None and _has_waits())
        is_set = event.wait(min(seconds, LOOK_S))
        if self._passes(seconds):
            self._seconds += seconds
            write(self._folder / f"seconds-{self._rank}", str(self._seconds))
        return is_set

    def _sleep(self, seconds: float) -> None:
        """Wait between two polls for answers of other ranks."""
        time.sleep(min(seconds, LOOK_S))
        self._seconds += seconds / self._slowness
        if self._num_answers and _is_watchdog():
            self._note("answers", is_so=True)
            if not self._has_jumped and len(list(self._folder.glob("answers-*"))) >= self._num_answers:
                self._has_jumped = True
                self._seconds += JUMP_S

    def _passes(self, seconds: float) -> bool:
        if self._awaited is None:
            return False
        if self._seconds + seconds <= _granted(self._folder):
            return True
        waits = all((self._folder / f"waits-{rank}").exists() for rank in self._awaited)
        return waits and (self._folder / "late").exists()

    def _note(self, what: str, *, is_so: bool) -> None:
        path = self._folder / f"{what}-{self._rank}"
        if is_so:
            path.touch()
        else:
            path.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a file that other processes read, whole."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)


def _granted(folder: Path) -> float:
    return max((float(path.read_text()) for path in folder.glob("granted-*")), default=0.0)


def _is_watchdog() -> bool:
    return threading.current_thread().name == "colossalai-watchdog"


def _has_waits() -> bool:
    watchdog = process.watching[-1][0] if process.watching else None
    return watchdog is not None and bool(watchdog._timer._waits)
