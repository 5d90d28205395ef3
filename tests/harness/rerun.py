"""A run of pytest whose few failures are run again: `python -m tests.harness.rerun ARGUMENTS OF PYTEST`.

With thousands of tests, one that fails once in a thousand runs would make every run fail. So tests that
fail, and those in which a worker crashes, are run once more, one after the other in one process. If all of
them pass, the run passes, and each is named in a line of its own:

    unstable: tests/test_a.py::test_b (AssertionError: 1 != 2)

Such a test is defective and is to be mended; the line says where to begin. Everything else fails as without
this: a test that fails again, more than `MOST_RERUN` failures, an error of collection, an interrupt, a run
that ends before its end. A test that hangs is ended by pytest (`faulthandler_timeout` in pyproject.toml), a
run in which no test reports for `--silence` seconds by this program, both with the stacks of all threads.

pytest runs in a process of its own, with a plugin that records what happens. The record has to be whole:
every test that was collected has ended, and pytest has returned.

After the first run its wall and processor time are printed, by folder (tests/harness/costs.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.costs import Cost, table

MOST_RERUN = 10
SILENCE_S = 1800.0  # longer than pytest lets one test take
STACKS_S = 10.0  # for the processes of a run that hangs to write their stacks
POLL_S = 0.2
HUNG = 124  # the exit status, as that of `timeout`
# Such a failure belongs to a test before the one that reports it, which passes alone.
UNRAISABLE = "pytest.PytestUnraisableExceptionWarning"


class Recorder:
    """A plugin that writes what happens in a run into a file, line by line: what is killed leaves its part.

    It is for the process that controls the workers, not for the workers.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._num_collected = 0

    def write(self, event: str, name: str = "", detail: str = "") -> None:
        """Write a line."""
        self._file.write(json.dumps([event, name, detail]) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the tests that are to run, in a run without workers."""
        self._write_collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Record the tests that are to run; each worker collects the same."""
        self._write_collected(ids)

    def _write_collected(self, names: Iterable[str]) -> None:
        if self._num_collected == 0:
            for name in names:
                self.write("collected", name)
                self._num_collected += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        """Record that a worker has started."""
        self.write("worker up", node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Record a worker that has crashed, in a test or between tests."""
        if error:
            self.write("worker down", node.gateway.id, str(error))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase of a test; xdist reports a crashed worker as a failed phase "???" of its test."""
        if report.failed:
            self.write("crashed" if report.when == "???" else "failed", report.nodeid, _first_line(report))
        elif report.passed and report.when == "call":
            self.write("passed", report.nodeid)
        self.write("spent", report.nodeid, f"{report.duration} {getattr(report, 'processor_s', 0.0)}")
        if report.when in ("teardown", "???"):
            self.write("ended", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record an error of collection."""
        if report.failed:
            self.write("not collected", report.nodeid, _first_line(report))

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record an error of pytest itself, of which a worker's does not end the run."""
        self.write("internal error", detail=excinfo.exconly())


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line of an error's message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def run_recorded(record: Path, arguments: Sequence[str]) -> int:
    """Run pytest in this process and return its exit status, which the record ends with."""
    recorder = Recorder(record)
    status = int(pytest.main(["-p", "tests.harness.processor_time", *arguments], plugins=[recorder]))
    # Not a hook: an exception that leaves pytest ends Python with the status of failed tests.
    recorder.write("finished", str(status))
    return status


@dataclass(frozen=True)
class Run:
    """A run of pytest that has ended.

    Attributes:
        status: The exit status of its process, negative for a signal, `HUNG` for a run that was ended.
        events: Event, name and detail of each line of the record.
    """

    status: int
    events: tuple[tuple[str, str, str], ...]

    def of(self, *kinds: str) -> dict[str, str]:
        """Return the names of events, in their order, with the first detail of each."""
        found: dict[str, str] = {}
        for event, name, detail in self.events:
            if event in kinds:
                found.setdefault(name, detail)
        return found

    def costs(self) -> dict[str, Cost]:
        """Return the cost of each test that ran, all its phases together."""
        costs: dict[str, Cost] = defaultdict(Cost)
        for event, name, detail in self.events:
            if event == "spent":
                wall_s, processor_s = map(float, detail.split())
                costs[name] += Cost(0, wall_s, processor_s)
            elif event == "ended":
                costs[name] += Cost(num_tests=1)
        return dict(costs)

    @property
    def failures(self) -> dict[str, str]:
        """The tests that failed or crashed, with the first line of their first error."""
        return self.of("failed", "crashed")

    def defect(self) -> str | None:
        """Return what is wrong with the run beside failures of tests."""
        kinds = [event for event, *_ in self.events]
        if "finished" not in kinds:
            return f"pytest did not come to its end (exit status {self.status})"
        if self.status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return f"pytest ended with status {self.status}"
        if "not collected" in kinds:
            return f"these were not collected: {', '.join(self.of('not collected'))}"
        if "internal error" in kinds:
            return f"pytest had an error of its own: {', '.join(self.of('internal error').values())}"
        if kinds.count("worker down") > kinds.count("crashed"):
            return "a worker crashed between tests"
        if missing := [name for name in self.of("collected") if name not in self.of("ended")]:
            return f"{len(missing)} tests have not run, the first is {missing[0]}"
        if self.status != pytest.ExitCode.OK and not self.failures:
            return "pytest failed without a test that did"
        return None

    def why_not_rerun(self) -> str | None:
        """Return why the failures of a run are not to be rerun, None if they are."""
        if len(self.failures) > MOST_RERUN:
            return f"{len(self.failures)} tests failed, more than {MOST_RERUN}"
        if any(error.startswith(UNRAISABLE) for error in self.failures.values()):
            return "an unraisable exception is that of an earlier test, which a rerun does not show"
        return None


def main(arguments: Sequence[str]) -> int:
    """Run pytest, run its failures again, and return the exit status.

    Args:
        arguments: Those of pytest, and of this program: `--silence=SECONDS` changes when a run hangs,
            `--costs=FILE` writes the cost of each test as JSON.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--silence", type=float, default=SILENCE_S)
    parser.add_argument("--costs", type=Path)
    options, arguments = parser.parse_known_args(arguments)
    silence_s = options.silence
    # `kill` and `timeout` end the run with this process, by way of the blocks below.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-rerun-") as folder:
        first = run_pytest(arguments, Path(folder, "first"), silence_s)
        _print_costs(first, time.monotonic() - begun, options.costs)
        failures = first.failures
        why_not = first.defect() or first.why_not_rerun()
        if why_not is not None:
            print(f"\nnot run again: {why_not}", flush=True)
            return _exit_status(first.status)
        if not failures:
            return int(pytest.ExitCode.OK)
        print(f"\nrun again, alone, since a test can fail by chance: {len(failures)}", flush=True)
        names = Path(folder, "names")
        names.write_text("".join(f"{name}\n" for name in failures))
        second = run_pytest([f"@{names}"], Path(folder, "second"), silence_s)
    missing = [name for name in failures if name not in second.of("passed")]
    if second.status != pytest.ExitCode.OK or second.defect() is not None or missing:
        if (defect := second.defect()) is not None:
            print(f"failed: {defect}")
        for name in missing:
            print(f"failed: {name} (has not passed when it was run again)")
        return _exit_status(second.status)
    for name, error in failures.items():
        print(f"unstable: {name} ({error})")
    return int(pytest.ExitCode.OK)


def _print_costs(run: Run, wall_s: float, path: Path | None) -> None:
    """Print what a run took, by folder; write what each test took."""
    costs = run.costs()
    # What this process has waited for, with all that was waited for there.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n" + "\n".join(table(costs, Cost(len(costs), wall_s, used.ru_utime + used.ru_stime))), flush=True)
    if path is not None:
        path.write_text(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1))


def run_pytest(arguments: Sequence[str], record: Path, silence_s: float) -> Run:
    """Run pytest to its end, or end it with its stacks when no test has reported for `silence_s` seconds."""
    command = [sys.executable, "-m", "tests.harness.rerun", f"--record={record}", *arguments]
    process = subprocess.Popen(command)
    try:
        status = _wait(process, record, silence_s)
    finally:
        if process.poll() is None:
            _kill(_tree(process.pid))
        process.wait()
    lines = record.read_text().splitlines() if record.exists() else []
    return Run(status, tuple(tuple(json.loads(line)) for line in lines))


def _wait(process: subprocess.Popen[bytes], record: Path, silence_s: float) -> int:
    """Wait for the end of pytest and return its status."""
    silence = Silence(lambda: record.stat().st_size if record.exists() else 0)
    while True:
        try:
            return process.wait(timeout=POLL_S)
        except KeyboardInterrupt:
            continue  # pytest has it, too: it ends its workers, tells what has failed, and returns
        except subprocess.TimeoutExpired:
            pass
        if silence.seconds() > silence_s:
            print(f"\nno test has reported for {silence_s:g} s: the run is ended", flush=True)
            _end_with_stacks(process.pid)
            return HUNG


class Silence:
    """Seconds since a record grew.

    Args:
        size: Returns the size of the record.
        clock: Seconds, monotonic.
    """

    def __init__(self, size: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._clock = size, clock
        self._last_size, self._last, self._seconds = size(), clock(), 0.0

    def seconds(self) -> float:
        """Return the seconds, as of now."""
        size, now = self._size(), self._clock()
        # The clock goes on while a virtual machine is stopped: a pause counts as no more than a second.
        self._seconds = 0.0 if size != self._last_size else self._seconds + min(now - self._last, 1.0)
        self._last_size, self._last = size, now
        return self._seconds


def _end_with_stacks(pid: int) -> None:
    """End a run. pytest and its workers write their stacks, which their fault handlers do when they abort."""
    tree = _tree(pid)  # those whose parent has ended are not found later
    root = tree[-1]
    # The workers first, since they end when pytest does; one after the other, so that lines do not mix.
    for each in (*root.children(), root):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGABRT)
            end = time.monotonic() + STACKS_S
            while each.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
                time.sleep(POLL_S)
    _kill(tree)


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process, last, and its descendants."""
    root = psutil.Process(pid)
    return [*root.children(recursive=True), root]


def _kill(processes: Sequence[psutil.Process]) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _exit_status(status: int) -> int:
    """Return the exit status of a run that has failed: that of pytest, if it tells."""
    return 128 - status if status < 0 else status or int(pytest.ExitCode.TESTS_FAILED)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("--record="):
        sys.exit(run_recorded(Path(sys.argv[1].partition("=")[2]), sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
