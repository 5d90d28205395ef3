"""When processes hang: what counts as progress, with a clock and samples of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.harness.progress import IDLE_SHARE, Progress, process_times

pytestmark = pytest.mark.unit
WINDOW_S = 60.0
ENOUGH_NS = int(1e9 * IDLE_SHARE * WINDOW_S)


class Processes:
    """Processes without a process: their times, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.times: dict[int, dict[int, int]] = {1: {10: 5 * ENOUGH_NS}, 2: {20: 0}}
        self.progress = Progress(WINDOW_S, clock=lambda: self.now, sample=self.sample)

    def sample(self, pid: int) -> dict[tuple[str, int], int]:
        return {("thread", thread): time for thread, time in self.times[pid].items()}

    def has_ended(self, seconds: float, *paths: Path, step_s: float = 1.0) -> bool:
        """Let time pass, with a look at each step."""
        found = False
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            found = self.progress.has_ended(self.times, paths)
        return found


def test_without_progress_it_ends_after_the_window() -> None:
    processes = Processes()
    assert not processes.has_ended(WINDOW_S)  # the first sample shows what was there before
    assert processes.has_ended(1)


@pytest.mark.parametrize("pid", [1, 2])
def test_one_process_is_enough(pid: int) -> None:
    processes = Processes()
    processes.has_ended(50)
    processes.times[pid][10 * pid] += ENOUGH_NS
    assert not processes.has_ended(50)
    assert processes.has_ended(20)


def test_what_polls_makes_no_progress() -> None:
    processes = Processes()
    processes.has_ended(1)
    for _ in range(59):
        processes.times[1][10] += ENOUGH_NS // 61
        assert not processes.has_ended(1)
    assert processes.has_ended(1)


def test_progress_in_small_portions_is_progress() -> None:
    processes = Processes()
    for _ in range(300):
        processes.times[2][20] += ENOUGH_NS // 50
        assert not processes.has_ended(1)


def test_a_new_thread_counts_and_one_that_ends_takes_nothing_away() -> None:
    processes = Processes()
    processes.has_ended(50)
    processes.times[1] = {11: ENOUGH_NS}
    assert not processes.has_ended(50)
    processes.times[1] = {}
    assert processes.has_ended(20)


def test_what_ends_has_made_progress_before() -> None:
    processes = Processes()
    processes.has_ended(50)
    for number in range(2):  # each alone is too little
        processes.times[1][30 + number] = ENOUGH_NS * 2 // 3
        processes.has_ended(1)
        del processes.times[1][30 + number]
    assert not processes.has_ended(50)
    assert processes.has_ended(20)


def test_a_child_that_has_ended_counts() -> None:
    before = process_times(os.getpid())["children", os.getpid()]
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert process_times(os.getpid())["children", os.getpid()] - before >= 0.4e9


def test_output_is_progress(tmp_path: Path) -> None:
    processes = Processes()
    processes.has_ended(50, tmp_path / "output")
    (tmp_path / "output").write_text("a line")
    assert not processes.has_ended(50, tmp_path / "output")
    assert processes.has_ended(20, tmp_path / "output")


def test_an_observer_that_did_not_run_for_an_hour_has_seen_nothing() -> None:
    processes = Processes()
    processes.has_ended(1)
    assert not processes.has_ended(3600, step_s=3600)
    assert not processes.has_ended(50)


def test_a_thread_that_computes_or_is_ready_to_is_seen() -> None:
    before = sum(process_times(os.getpid()).values())
    end = threading.Event()
    threads = [threading.Thread(target=lambda: [None for _ in iter(end.is_set, True)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    while sum(process_times(os.getpid()).values()) < before + ENOUGH_NS // 10:
        pass
    end.set()
    for thread in threads:
        thread.join()
    assert process_times(2**22 + 1) == {}  # no such process
