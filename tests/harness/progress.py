"""Progress of processes: what tells a hang from a busy machine.

A process that hangs neither computes nor waits for a processor. On a busy machine a healthy one computes
little, but the kernel counts how long its threads were ready and had to wait (`/proc/PID/task/*/schedstat`:
nanoseconds of run time, then of run-queue wait). Ranks that wait for one another poll now and then, so a
hang is not all quiet: the limit is a share of the time that has passed. Linux only, as the ranks of tests
are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

IDLE_S = 60.0  # without progress for so long, a job hangs
IDLE_SHARE = 0.02  # of the time, at which a waiting rank still polls
SAMPLE_S = 1.0

HAS_SCHEDSTAT = Path("/proc/self/schedstat").exists()  # a kernel without it does not count queue waits

Times = Mapping[tuple[str, int], int]
"""Nanoseconds of run time and run-queue wait: of live threads by id, of ended children by parent id."""


def process_times(pid: int) -> Times:
    """Return the times of a process and its descendants."""
    processes = [pid]
    with contextlib.suppress(psutil.Error):
        processes += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    times: dict[tuple[str, int], int] = {}
    for process in processes:
        # A thread or a process can end between the listing and the reading.
        with contextlib.suppress(OSError, psutil.Error):
            spent = psutil.Process(process).cpu_times()
            times["children", process] = int(1e9 * (spent.children_user + spent.children_system))
            if not HAS_SCHEDSTAT:
                times["process", process] = int(1e9 * (spent.user + spent.system))
                continue
            for task in Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(OSError):
                    run, wait, _ = (task / "schedstat").read_text().split()
                    times["thread", int(task.name)] = int(run) + int(wait)
    return times


class Progress:
    """Whether any of several processes makes progress.

    Progress is more output, or run time and run-queue wait of `IDLE_SHARE` of the window, in one process with
    its descendants.

    Args:
        window_s: Seconds without progress after which the processes hang.
        clock: Seconds, monotonic.
        sample: Returns the times of a process, see `process_times`.
    """

    def __init__(
        self,
        window_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        sample: Callable[[int], Times] = process_times,
    ) -> None:
        self.window_s = window_s
        self._clock, self._sample = clock, sample
        self._interval_s = min(SAMPLE_S, window_s / 10)
        self._last = clock()
        self._idle_s = 0.0
        self._before: dict[int, Times] = {}
        self._gained: dict[int, int] = {}  # nanoseconds since the last progress, by process
        self._output = 0  # bytes

    def has_ended(self, pids: Iterable[int], outputs: Iterable[Path] = ()) -> bool:
        """Return whether there has been no progress for the window; a tenth of it or a second is a sample.

        Args:
            pids: Processes, each with its descendants.
            outputs: Files that they write.
        """
        now = self._clock()
        passed = now - self._last
        if passed < self._interval_s:
            return False
        self._last = now
        output = _total_size(outputs)
        times = {pid: self._sample(pid) for pid in pids}
        for pid, after in times.items():
            # From sample to sample, since what ends takes its time along.
            gained = _difference(self._before.get(pid, {}), after)
            self._gained[pid] = self._gained.get(pid, 0) + gained
        self._before = times
        if output > self._output or max(self._gained.values(), default=0) >= 1e9 * IDLE_SHARE * self.window_s:
            self._idle_s, self._gained, self._output = 0.0, {}, output
        else:
            # The clock goes on while a virtual machine is stopped, or while this process gets no processor:
            # a pause of the observer counts as no more than two samples.
            self._idle_s += min(passed, 2 * self._interval_s)
        return self._idle_s >= self.window_s


def _difference(before: Times, after: Times) -> int:
    """Return the nanoseconds that have been gained; a thread id that was given again begins at 0."""
    return sum(max(0, value - before.get(key, 0)) for key, value in after.items())


def _total_size(paths: Iterable[Path]) -> int:
    """Return the bytes of files, of which some may not exist yet."""
    return sum(path.stat().st_size for path in paths if path.exists())
