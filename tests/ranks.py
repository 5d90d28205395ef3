"""`run_ranks`: run a function on several fresh ranks, in a twentieth of a second.

The ranks are forked from a zygote (tests/_zygote.py), a process that has imported torch and the package
and has run nothing. It is started once per test session, in the background, and lives as long as the tests.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from tests._zygote import Job, Outcome, Report, output_path
from tests.harness.processor_time import count_process
from tests.harness.progress import IDLE_S, SAMPLE_S, Progress

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 900.0  # for a job that makes progress: some hangs look like it
MARGIN_S = 60.0  # the zygote reports a hang; without an answer for so much longer, it hangs itself
START_S = 300.0  # for its imports, on a busy machine
OUTPUT_LIMIT = 20_000  # characters of a rank's output that an error shows


class RanksError(AssertionError):
    """A rank raised, died or hung; the message tells the first failing rank's story first."""


class RanksTimeoutError(RanksError):
    """A rank hung; the message holds the Python stacks of those that did."""


class Zygote:
    """The handle of the zygote process.

    Args:
        modules: What it imports beside the modules that all ranks need.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self.connection, theirs = Pipe()
        call = f"serve({', '.join(map(repr, (theirs.fileno(), *modules)))})"
        # No pipe for its output: nobody would read it, and a full pipe blocks. The file is read if it dies.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from tests._zygote import serve; {call}"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, which then closes our end
            )

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and can take a job."""
        return not self.connection.closed and self.process.poll() is None

    def ask(self, job: Job) -> list[Report]:
        """Have a job done.

        Raises:
            RanksError: The zygote died, or neither it nor a rank makes progress.
        """
        progress, end = Progress(job.idle_s + MARGIN_S), time.monotonic() + job.timeout + START_S
        try:
            self.connection.send_bytes(pickle.dumps(job))
            while not self.connection.poll(SAMPLE_S):
                # Ranks can poll without an end, so there is a limit of time as well; imports are part of it.
                if progress.has_ended([self.process.pid]) or time.monotonic() > end:
                    raise RanksError(f"the zygote does not answer\n{self.log()}")
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise RanksError(f"the zygote died\n{self.log()}") from None

    def log(self) -> str:
        """Return what the process has written."""
        self._log.seek(0)
        return self._log.read()[-OUTPUT_LIMIT:]

    def close(self) -> None:
        """End the process and whatever it has forked."""
        self.connection.close()  # the zygote sees the end of file and ends its ranks, then itself
        try:
            self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


_zygotes: list[Zygote] = []
_modules: dict[str, None] = {}


def start_zygote(*modules: str) -> Zygote:
    """Return the session's zygote, started if there is none; the imports go on in the background.

    Args:
        *modules: What it imports when it starts, now or after it has died, beside what all ranks need.
    """
    _modules.update(dict.fromkeys(modules))
    if _zygotes and not _zygotes[0].is_alive:
        stop_zygote()
    if not _zygotes:
        _zygotes.append(Zygote(_modules))
        count_process(_zygotes[0].process.pid)
    return _zygotes[0]


@atexit.register
def stop_zygote() -> None:
    """End the session's zygote, if there is one."""
    while _zygotes:
        _zygotes.pop().close()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LONGEST_S, idle_s: float = IDLE_S
) -> list[Any]:
    """Run `fn(*args)` on `world_size` fresh ranks of this machine and return what they return, by rank.

    Each rank has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT in its
    environment (the rest is this process's), the working directory and `sys.path` of this process, and one
    thread. No process group exists yet. What the ranks print is printed here, rank by rank, once they ended.

    Args:
        fn: a function of a module (it is pickled by reference).
        world_size: number of ranks.
        *args: picklable arguments, the same for every rank.
        timeout: seconds after which a rank that has not returned is a failure, whatever it does.
        idle_s: seconds after which ranks are a failure that neither compute, nor wait for a processor, nor
            write, see tests/harness/progress.py.

    Returns:
        The (picklable) results, by rank.

    Raises:
        RanksError: a rank raised or died. The others are ended once they have made no progress for a second.
        RanksTimeoutError: the ranks that have not returned hang.
    """
    __tracebackhide__ = True
    zygote = start_zygote()
    with tempfile.TemporaryDirectory(prefix="ranks-") as output_dir:
        job = Job(
            call=pickle.dumps((fn, args)),
            world_size=world_size,
            timeout=timeout,
            idle_s=idle_s,
            env=dict(os.environ),
            cwd=os.getcwd(),
            sys_path=list(sys.path),
            output_dir=output_dir,
        )
        try:
            reports = zygote.ask(job)
        except BaseException:  # Ctrl-C, a test's own timeout: the job must not outlive the call
            stop_zygote()
            raise
        outputs = [_output(output_dir, rank) for rank in range(world_size)]
    if all(report.outcome is Outcome.OK for report in reports):
        print("".join(outputs), end="")
        return [pickle.loads(report.payload) for report in reports]
    hung = any(report.outcome is Outcome.HUNG for report in reports)
    error = RanksTimeoutError if hung else RanksError
    raise error(_story(fn, reports, outputs))


def _output(output_dir: str, rank: int) -> str:
    path = output_path(output_dir, rank)
    return path.read_text(errors="replace")[-OUTPUT_LIMIT:] if path.exists() else ""


def _story(fn: Callable[..., Any], reports: list[Report], outputs: list[str]) -> str:
    """Tell how the ranks ended: the first failing one first, those that returned last."""
    lines = [f"{fn.__module__}.{fn.__qualname__} on {len(reports)} ranks"]
    for report in sorted(reports, key=_by_blame):
        text = "" if report.outcome is Outcome.OK else report.payload.decode().rstrip()
        lines.append(f"rank {report.rank}: {report.outcome.value}{': ' if text else ''}{text}")
        if outputs[report.rank]:
            lines.append(f"rank {report.rank} wrote:\n{outputs[report.rank].rstrip()}")
    return "\n".join(lines)


def _by_blame(report: Report) -> tuple[int, int]:
    blame = {Outcome.OK: 2, Outcome.STOPPED: 1}
    return blame.get(report.outcome, 0), report.order
