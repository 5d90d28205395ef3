"""The process from which the ranks of `dist` tests are forked, and the keeper of those ranks.

It is a fresh interpreter, not a fork of pytest: it has imported everything heavy and has run nothing, so
no OpenMP, autograd or gloo thread exists in it, and a rank that is forked from it is as good as new, in
0.05 s and not in 3 s. It forks the ranks of one job, watches them, and answers with one `Report` per rank.
The door to it is tests/ranks.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import faulthandler
import gc
import importlib
import math
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

import numpy
import torch

from tests.harness.ports import reserved_port
from tests.harness.progress import Progress

HEAVY_MODULES = (
    "psutil",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.profiler._cupti_monitor",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.checkpoint",
    "torch.utils.data",
)
TRANSFORMERS_MODULES = (
    "transformers.models.albert.modeling_albert",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
)
"""Four seconds of imports in each rank that needs them, and few tests do: imported if one was collected."""
EXAMPLE_MODULES = ("matplotlib.pyplot", "sklearn.datasets", "tokenizers", "torch.utils.tensorboard")
"""The same for the scripts of examples/: two seconds."""
INFERENCE_MODULES = (
    "colossalai.inference",
    "transformers.models.llama.modeling_llama",
    "transformers.models.opt.modeling_opt",
)
CHAT_MODULES = ("colossalai.chat", "peft", "tests.chat.tiny")
COMMAND_MODULES = ("colossalai.cli._memory._trace_worker",)
MODULES_OF_WORDS = {
    b"transformers": TRANSFORMERS_MODULES,
    b"tests.examples": EXAMPLE_MODULES,
    b"tests.inference": INFERENCE_MODULES,
    b"tests.chat": (*INFERENCE_MODULES, *CHAT_MODULES),
    b"colossalai.cli": COMMAND_MODULES,
    b"lora": ("peft",),
}
"""What the zygote imports if a file of tests of ranks has a word."""
PACKAGE_MODULES = (
    "colossalai",
    "colossalai.core",
    "colossalai.booster.plugin",
    "colossalai.builder",
    "colossalai.initialize",
    "colossalai.kernel",
    "colossalai.model_zoo.bert",
    "colossalai.model_zoo.gpt",
    "colossalai.model_zoo.resnet",
    "colossalai.model_zoo.vit",
    "colossalai.trainer.hooks",
    "colossalai.testing",
    "colossalai.zero.gemini",
    "colossalai.compat._gemini_wrappers",
    "encodings.idna",
    "numpy.ma",
)

GRACE_S = 1.0  # without progress for so long after the first failure, the other ranks have no report to make
LONGEST_GRACE_S = 60.0  # for ranks that compute for ever
STACK_DUMP_S = 30.0  # how long hanging ranks have for writing their stacks; the test process waits longer
LEAVE_S = 1.0  # after the gate; a rank that takes longer is killed, which is no difference to any other
NUM_PORT_TRIES = 3  # other programs than tests can take a port between the probe and its use
POLL_S = 0.02
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the test process asks for."""

    call: bytes  # the pickled (fn, args); by reference, so that only the rank imports the test's module
    world_size: int
    timeout: float  # seconds after which ranks that have not returned are a failure, whatever they do
    idle_s: float  # seconds without progress after which they are one
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    output_dir: str


class Outcome(enum.Enum):
    """How a rank ended."""

    OK = "returned"
    ERROR = "raised"
    DIED = "died"
    HUNG = "hung"
    STOPPED = "was stopped because another rank had failed"


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one rank ended: `payload` is the pickled result, the traceback, or why it died or hung."""

    rank: int
    outcome: Outcome
    payload: bytes
    order: int  # 0 for the rank that ended first


@dataclass
class _Rank:
    rank: int
    pid: int
    connection: Connection
    stacks: int  # the pipe with the signals that the rank has handled
    outcome: Outcome | None = None
    payload: bytes = b""
    order: int = -1
    reaped: bool = False


@dataclass
class _Watch:
    ranks: list[_Rank]
    job: Job
    deadline: float
    progress: Progress
    num_ended: int = 0
    grace: Progress | None = None  # of the ranks that run after the first failure
    grace_end: float = math.inf

    @property
    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.outcome is None]

    def end(self, rank: _Rank, outcome: Outcome, payload: bytes = b"") -> None:
        rank.outcome, rank.payload, rank.order = outcome, payload, self.num_ended
        self.num_ended += 1
        if outcome is not Outcome.OK and self.grace is None:
            self.grace, self.grace_end = Progress(GRACE_S), time.monotonic() + LONGEST_GRACE_S

    def hang(self) -> str | None:
        """Return how the running ranks hang, None while they make progress."""
        if self._is_idle(self.progress):
            return f"no progress for {self.job.idle_s:g} s"
        if time.monotonic() > self.deadline:
            return f"not returned after {self.job.timeout:g} s"
        return None

    def is_over(self) -> bool:
        """Return whether no rank runs, or one has failed and the others make no progress any more."""
        if not self.running or time.monotonic() > self.grace_end:
            return True
        return self.grace is not None and self._is_idle(self.grace)

    def _is_idle(self, progress: Progress) -> bool:
        outputs = (output_path(self.job.output_dir, rank.rank) for rank in self.ranks)
        return progress.has_ended([rank.pid for rank in self.running], outputs)


def output_path(output_dir: str, rank: int) -> Path:
    """Return the file that takes stdout and stderr of a rank."""
    return Path(output_dir) / f"rank{rank}.txt"


def serve(control_fd: int, *modules: str) -> None:
    """Fork and watch the ranks of one job after the other until the test process closes its end.

    Args:
        control_fd: The pipe to the test process.
        *modules: What to import beside the modules that all ranks need.
    """
    control = Connection(control_fd)
    _import_all(HEAVY_MODULES)
    _import_all(PACKAGE_MODULES)
    _import_all(modules)
    torch.set_num_threads(1)
    if "TESTS_MATMUL" in os.environ:
        importlib.import_module("tests.forced").force_choices()
    gc.collect()
    gc.freeze()  # the collector of a rank must not touch, and so copy, the pages that all ranks share
    while True:
        try:
            job = pickle.loads(control.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        for _ in range(NUM_PORT_TRIES):
            with reserved_port() as port:
                reports = _run(job, control, port)
            if reports is None:
                return
            if not any(_port_was_taken(report, port) for report in reports):
                break
        control.send_bytes(pickle.dumps(reports))


def _port_was_taken(report: Report, port: int) -> bool:
    """Return whether a rank failed because another program listens on the job's port."""
    is_in_use = b"EADDRINUSE" in report.payload or b" is held by " in report.payload
    return report.outcome is Outcome.ERROR and is_in_use and b"%d" % port in report.payload


def _import_all(names: Iterable[str]) -> None:
    """Import what ranks will need; what does not import here fails again in the rank that needs it."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()


def _run(job: Job, control: Connection, port: int) -> list[Report] | None:
    """Run one job to its end; None if the test process went away in the meantime."""
    ranks: list[_Rank] = []
    try:
        for rank in range(job.world_size):
            ranks.append(_fork_rank(job, rank, port, inherited=[control, *(r.connection for r in ranks)]))
        watch = _Watch(ranks, job, time.monotonic() + job.timeout, Progress(job.idle_s))
        while not watch.is_over():
            ready = wait([control, *(rank.connection for rank in watch.running)], timeout=POLL_S)
            if control in ready:  # nothing is sent during a job: this is the end of the test process
                return None
            _collect(watch)
            if (hang := watch.hang()) is not None:
                _dump_stacks(watch.running)
                for rank in watch.running:
                    watch.end(rank, Outcome.HUNG, hang.encode())
        for rank in watch.running:
            watch.end(rank, Outcome.STOPPED)
    finally:
        _end_all(ranks)
    return [
        Report(rank=r.rank, outcome=r.outcome or Outcome.DIED, payload=r.payload, order=r.order)
        for r in ranks
    ]


def _collect(watch: _Watch) -> None:
    """Note which ranks have answered or died."""
    for rank in watch.ranks:
        if rank.outcome is Outcome.ERROR and not rank.reaped:
            _reap(rank)
    for rank in watch.running:
        died_of = _reap(rank)  # before the read: what a dead rank had sent before is still in the pipe
        try:
            message = rank.connection.recv_bytes() if rank.connection.poll() else None
        except (EOFError, ConnectionResetError):
            message = None
        if message is not None:
            watch.end(rank, Outcome.OK if message[:1] == b"+" else Outcome.ERROR, message[1:])
        elif died_of is not None:
            watch.end(rank, Outcome.DIED, died_of.encode())


def _reap(rank: _Rank) -> str | None:
    """Return why the process of a rank has ended, None while it lives."""
    pid, status = os.waitpid(rank.pid, os.WNOHANG)
    if pid == 0:
        return None
    rank.reaped = True
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code} before it returned"


def _dump_stacks(ranks: list[_Rank]) -> None:
    """Have ranks write their stacks, and wait until they have."""
    for rank in ranks:
        os.kill(rank.pid, signal.SIGUSR1)
    writing, end = {rank.stacks for rank in ranks}, time.monotonic() + STACK_DUMP_S
    while writing and time.monotonic() < end:
        for pipe in wait(writing, timeout=POLL_S):
            signals = os.read(pipe, 4096)
            if not signals or signal.SIGUSR1 in signals:  # it has ended, or it has written
                writing.discard(pipe)


def _end_all(ranks: list[_Rank]) -> None:
    """Let the ranks that wait at the gate leave, and end the rest with all their children."""
    for rank in ranks:
        if rank.outcome is Outcome.OK:
            rank.connection.close()
    leaving_until = time.monotonic() + LEAVE_S
    for rank in ranks:
        while rank.outcome is Outcome.OK and not rank.reaped and time.monotonic() < leaving_until:
            if _reap(rank) is None:
                time.sleep(0.002)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # a rank leads its own process group
        if not rank.reaped:
            os.waitpid(rank.pid, 0)
        rank.connection.close()
        os.close(rank.stacks)


def _fork_rank(job: Job, rank: int, port: int, *, inherited: list[Connection]) -> _Rank:
    ours, theirs = Pipe()
    stacks, has_written = os.pipe()
    zygote_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_rank(job, rank, port, theirs, has_written, [*inherited, ours], zygote_pid)
    os.setpgid(pid, pid)  # done on both sides of the fork: neither has to wait for the other
    theirs.close()
    os.close(has_written)
    return _Rank(rank, pid, ours, stacks)


def _be_rank(
    job: Job,
    rank: int,
    port: int,
    connection: Connection,
    has_written: int,
    inherited: list[Connection],
    zygote_pid: int,
) -> NoReturn:
    try:
        _prepare(job, rank, port, inherited, zygote_pid)
        _dump_stacks_on_signal(has_written)
        fn, args = pickle.loads(job.call)
        message = b"+" + pickle.dumps(fn(*args))
    except BaseException:
        message = b"-" + traceback.format_exc().encode()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(message)
    if message[:1] == b"+":
        # The gate: no rank leaves before all have returned. Rank 0 hosts the store, and a peer that is still
        # in its last collective would take a closed connection for a failure.
        with contextlib.suppress(EOFError, ConnectionResetError):
            connection.recv_bytes()
    os._exit(0)


def _prepare(job: Job, rank: int, port: int, inherited: list[Connection], zygote_pid: int) -> None:
    """Make the fork a rank: its process group, files, environment, random state."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote_pid:  # it ended before the line above took effect
        os._exit(1)
    for connection in inherited:
        connection.close()
    fd = os.open(
        output_path(job.output_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600
    )
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    os.environ.clear()
    os.environ.update(job.env, **_rank_env(job, rank, port))
    random.seed(rank)
    numpy.random.seed(rank)


def _dump_stacks_on_signal(has_written: int) -> None:
    """Write the stacks of all threads on SIGUSR1, then its number into a pipe.

    The handler of `faulthandler` calls the one before it, which is Python's: it writes the number of its
    signal into the wakeup descriptor, whatever the main thread does.
    """
    os.set_blocking(has_written, False)
    signal.set_wakeup_fd(has_written, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)


def _rank_env(job: Job, rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
