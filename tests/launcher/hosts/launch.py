"""`colossalai run` on a host of a test network, in the background, with its output in files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launcher.hosts.network import ROOT, Network

START_S = 300.0  # for importing torch on a busy machine
SETTINGS = ("GLOO_", "NCCL_", "OMP_", "SLURM_", "PBS_", "COLOSSALAI_")


@dataclass(frozen=True)
class Launch:
    """A `colossalai run` that was started on host1."""

    process: subprocess.Popen[bytes]
    folder: Path
    network: Network

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def head(self) -> psutil.Process:
        """The process of `colossalai run` itself."""
        return psutil.Process(self.process.pid)

    def wait(self, timeout: float = START_S) -> int:
        """Return its exit code."""
        return self.process.wait(timeout)

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Wait until `count` lines of the ranks match, and return what they match with."""
        deadline = time.monotonic() + START_S
        while len(found := re.findall(pattern, self.out, re.MULTILINE)) < count:
            assert self.process.poll() is None, f"it has ended\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"{pattern!r} does not come\n{self.out}\n{self.err}"
            time.sleep(0.02)
        return found

    def pids(self) -> dict[int, int]:
        """Wait for "rank N: PID" of all ranks of a job on two hosts, and return the processes by rank."""
        return {int(rank): int(pid) for rank, pid in self.wait_for(r"rank (\d+): (\d+)$", 2)}

    def agent(self, host: str) -> psutil.Process:
        """Return the agent on a host."""
        return next(
            process
            for process in map(psutil.Process, self.network.pids(host))
            if "colossalai.launcher._host_agent" in process.cmdline()
            and process.cmdline()[0] == sys.executable
        )

    def ssh_client(self, host: str) -> psutil.Process:
        """Return the ssh client that leads from the head to a host."""
        return next(
            child for child in self.head.children() if child.name() == "ssh" and host in child.cmdline()
        )

    def end(self) -> None:
        """End it, if a test has failed to."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for host in self.network.hosts:
            for pid in self.network.pids(host):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has just ended


def launch(
    network: Network, folder: Path, *args: str, script: str = "", driver: str = "", **variables: str
) -> Launch:
    """Start `colossalai run args...`, or a program, on host1, in `folder`, where job.py is `script`."""
    (folder / "job.py").write_text(script)
    words = ["-c", driver] if driver else ["-m", "colossalai.cli", "run", *args]
    clean = {name: None for name in os.environ if name.startswith(SETTINGS)}
    env = {name: value for name, value in os.environ.items() if name not in clean}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            network.on("host1", [sys.executable, *words]),
            cwd=folder,
            env={**env, "PYTHONPATH": str(ROOT), **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    return Launch(process, folder, network)


def wait_until_empty(network: Network, timeout: float = START_S) -> None:
    """Wait until nothing runs on any host, and fail if something goes on."""
    deadline = time.monotonic() + timeout
    while left := {host: pids for host in network.hosts if (pids := network.pids(host))}:
        if time.monotonic() > deadline:
            commands = [psutil.Process(pid).cmdline() for pids in left.values() for pid in pids]
            raise AssertionError(f"after {timeout} s there are still {left}: {commands}")
        time.sleep(0.02)


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds something takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began
