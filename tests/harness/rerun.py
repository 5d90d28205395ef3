"""A run of pytest whose few failures are run again: `python -m tests.harness.rerun ARGUMENTS OF PYTEST`.

With thousands of tests, one that fails once in a thousand runs would make every run fail. So tests that
fail, and those in which a worker crashes, are run once more, one after the other in one process. If all of
them pass, the run passes, and each is named in a line of its own:

    unstable: tests/test_a.py::test_b (AssertionError: 1 != 2)

Such a test is defective and is to be mended; the line says where to begin. Everything else fails as without
this: a test that fails again, more than `MOST_RERUN` failures, an error of collection, an interrupt, a run
that ends before its end. A test that hangs is ended by pytest (`faulthandler_timeout` in pyproject.toml), a
run in which no test reports for `--silence` seconds by this program, both with the stacks of all threads.

This file is both the program and the plugin that records what happens, in the process that controls the
workers.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

MOST_RERUN = 10
SILENCE_S = 1800.0  # longer than pytest lets one test take
STACKS_S = 10.0  # for the processes of a run that hangs to write their stacks
POLL_S = 0.2
HUNG = 124  # the exit status, as that of `timeout`


# The plugin.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write a line of JSON for each report into FILE")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)), "tests-recorder")


class Recorder:
    """Writes what happens in a run into a file, line by line, so that a run that is ended leaves its part.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def _write(self, event: str, name: str = "", error: str = "") -> None:
        self._file.write(json.dumps([event, name, error]) + "\n")
        self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase of a test; xdist reports a crashed worker as a failed phase "???" of its test."""
        if report.failed:
            self._write("crashed" if report.when == "???" else "failed", report.nodeid, _first_line(report))
        else:
            self._write("passed" if report.passed and report.when == "call" else "went on", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record an error of collection."""
        if report.failed:
            self._write("not collected", report.nodeid, _first_line(report))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Record a worker that has crashed, in a test or between tests."""
        if error:
            self._write("worker down", node.gateway.id, str(error))

    def pytest_sessionfinish(self) -> None:
        """Record that the run has come to its end."""
        self._write("finished")


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line of an error's message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


# The program.


@dataclass(frozen=True)
class Run:
    """A run of pytest that has ended.

    Attributes:
        status: The exit status of pytest, negative for a signal, `HUNG` for a run that was ended.
        events: Pairs of an event and a name, with the first line of an error.
    """

    status: int
    events: tuple[tuple[str, str, str], ...]

    def of(self, *kinds: str) -> dict[str, str]:
        """Return the names of events with the first error of each."""
        return {name: error for event, name, error in reversed(self.events) if event in kinds}

    def failures(self) -> dict[str, str]:
        """Return the tests that failed, in their order, with the first line of their first error."""
        return dict(reversed(self.of("failed", "crashed").items()))

    def why_not_rerun(self) -> str | None:
        """Return why a run that failed is not to be rerun, None if it is."""
        kinds = [event for event, *_ in self.events]
        if kinds.count("worker down") > kinds.count("crashed"):
            return "a worker crashed between tests"
        if self.status != pytest.ExitCode.TESTS_FAILED:
            return f"pytest ended with status {self.status}"
        if "not collected" in kinds:
            return f"these were not collected: {', '.join(self.of('not collected'))}"
        if "finished" not in kinds:
            return "pytest was ended within a test"
        if not self.failures():
            return "pytest failed without a test that did"
        if len(self.failures()) > MOST_RERUN:
            return f"{len(self.failures())} tests failed, more than {MOST_RERUN}"
        return None


def main(arguments: Sequence[str]) -> int:
    """Run pytest, run its failures again, and return the exit status.

    Args:
        arguments: Those of pytest. `--silence=SECONDS` before them changes when a run hangs.
    """
    silence_s = SILENCE_S
    if arguments and arguments[0].startswith("--silence="):
        silence_s, arguments = float(arguments[0].partition("=")[2]), arguments[1:]
    # `kill` and `timeout` end the run with this process, by way of the blocks below.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="tests-rerun-") as folder:
        first = run_pytest(arguments, Path(folder, "first"), silence_s)
        if first.status == pytest.ExitCode.OK and not first.of("worker down"):
            return first.status
        why_not = first.why_not_rerun()
        failures = first.failures()
        if why_not is not None:
            print(f"\nnot run again: {why_not}", flush=True)
            return _exit_status(first.status or pytest.ExitCode.TESTS_FAILED)
        print(f"\nrun again, alone, since a test can fail by chance: {len(failures)}", flush=True)
        names = Path(folder, "names")
        names.write_text("".join(f"{name}\n" for name in failures))
        second = run_pytest([f"@{names}"], Path(folder, "second"), silence_s)
    missing = failures.keys() - second.of("passed").keys()
    if second.status != pytest.ExitCode.OK or missing:
        for name in sorted(missing):
            print(f"failed: {name} (has not passed when it was run again)")
        return _exit_status(second.status or pytest.ExitCode.TESTS_FAILED)
    for name, error in failures.items():
        print(f"unstable: {name} ({error})")
    return pytest.ExitCode.OK


def run_pytest(arguments: Sequence[str], record: Path, silence_s: float) -> Run:
    """Run pytest to its end, or end it with its stacks when no test has reported for `silence_s` seconds."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.harness.rerun", f"--record={record}", *arguments]
    process = subprocess.Popen(command)
    try:
        status = _wait(process, record, silence_s)
    finally:
        if process.poll() is None:
            _kill_tree(process.pid)
            process.wait()
    lines = record.read_text().splitlines() if record.exists() else []
    return Run(status, tuple(tuple(json.loads(line)) for line in lines))


def _wait(process: subprocess.Popen[bytes], record: Path, silence_s: float) -> int:
    """Wait for the end of pytest and return its status."""
    size, since = 0, time.monotonic()
    while True:
        try:
            return process.wait(timeout=POLL_S)
        except KeyboardInterrupt:
            continue  # pytest has it, too: it ends its workers, tells what has failed, and returns
        except subprocess.TimeoutExpired:
            pass
        now = record.stat().st_size if record.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() > since + silence_s:
            print(f"\nno test has reported for {silence_s:g} s: the run is ended", flush=True)
            _dump_stacks(process.pid)
            return HUNG


def _dump_stacks(pid: int) -> None:
    """Have pytest and its workers write their stacks, which their fault handlers do when they abort."""
    root = psutil.Process(pid)
    processes = [*root.children(), root]  # the workers first: they end when pytest does
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGABRT)
    psutil.wait_procs(processes, timeout=STACKS_S)


def _kill_tree(pid: int) -> None:
    root = psutil.Process(pid)
    for each in (*root.children(recursive=True), root):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _exit_status(status: int) -> int:
    return 128 - status if status < 0 else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
