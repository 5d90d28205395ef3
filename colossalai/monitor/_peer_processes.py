"""Peer processes on the same machine: dead, stopped or stuck, as another rank finds them.

A process whose compiled code never releases Python's lock cannot write a report. Each rank therefore has a
signal at which `faulthandler`, in compiled code and without the lock, writes the stacks to a memory file. A
neighbor can send the signal and read the file.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from colossalai._clock import Clock

STACK_SIGNAL = signal.SIGRTMIN + 7
_STACK_S = 0.4  # for writing the stacks
_POLL_S = 0.05
DIED = "has died"


@dataclass(frozen=True, kw_only=True)
class PeerProcess:
    """Process of a rank, as another process finds it.

    Attributes:
        host: The name of the machine, for people.
        place: The same for two processes that see each other.
        pid: Its number there.
        started: Its start time, which distinguishes it from another one with the same number.
    """

    host: str
    place: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> "PeerProcess":
        """Return this process."""
        import psutil  # here, so that `import colossalai` does not pay for it

        started = psutil.Process().create_time()
        return cls(host=socket.gethostname(), place=_place(), pid=os.getpid(), started=started)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the process of a `to_json` text."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"({self.host}, pid {self.pid})"

    def has_died(self) -> bool:
        """Return whether it has ended. Only for a process of the same place."""
        return self.problem() == DIED

    def problem(self) -> str | None:
        """Describe its visible problem; None without one.

        Only for a process of the same place.
        """
        import psutil

        try:
            process = psutil.Process(self.pid)
            status = process.status()
            is_other = abs(process.create_time() - self.started) > 1.0
        except psutil.NoSuchProcess:
            return DIED
        if is_other or status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return DIED
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "is stopped (SIGSTOP, or a debugger)"
        return None


@dataclass(frozen=True, kw_only=True)
class RankProcess(PeerProcess):
    """Process of a rank that is watched.

    Attributes:
        stack_file: The descriptor of the file for its stacks, -1 without one.
        signature_file: The same of the file with its last collectives.
    """

    stack_file: int
    signature_file: int

    def dump_stacks(self, clock: Clock) -> str:
        """Have it write its stacks, without its help; empty where it cannot be done.

        Args:
            clock: The clock of the wait for them.
        """
        if self.stack_file < 0:
            return ""
        file = Path(f"/proc/{self.pid}/fd/{self.stack_file}")
        try:
            before = stacks = file.read_text(errors="replace")
            os.kill(self.pid, STACK_SIGNAL)
            deadline = clock.now() + _STACK_S
            while clock.now() < deadline:
                clock.sleep(_POLL_S)
                last, stacks = stacks, file.read_text(errors="replace")
                if stacks == last != before:  # it is complete if it does not grow any more
                    break
            return stacks
        except OSError:
            return ""


def innermost_place(stacks: str) -> str:
    """Return the place of the thread that holds the lock, from `faulthandler`'s output: ", at ..."."""
    found = re.search(r'^Current thread.*\n  File "(.*)", line (\d+) in (.*)$', stacks, re.MULTILINE)
    return f", at {Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def register_this_process(signature_file: int) -> RankProcess:
    """Let neighbors have the stacks of this process; return where it runs.

    Args:
        signature_file: The descriptor of the file with its last collectives.
    """
    descriptor = -1
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("colossalai-stacks")
        if threading.current_thread() is threading.main_thread():
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # a neighbor's signal can arrive late
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    here = asdict(PeerProcess.current())
    return RankProcess(**here, stack_file=descriptor, signature_file=signature_file)


def unregister_this_process(process: RankProcess) -> None:
    """Undo `register_this_process`."""
    if process.stack_file >= 0:
        faulthandler.unregister(STACK_SIGNAL)
        os.close(process.stack_file)


def _place() -> str:
    """Return a value shared by all processes with one table of processes."""
    return "/".join([socket.gethostname(), *filter(None, kernel_and_namespace("pid"))])


def kernel_and_namespace(kind: str) -> tuple[str, str]:
    """Return the boot of the kernel under this process and its namespace; empty where they are not known.

    Args:
        kind: "pid" for the table of processes, "net" for the network.
    """
    kernel = namespace = ""
    with contextlib.suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(f"/proc/self/ns/{kind}")
    return kernel, namespace
