"""`colossalai ...` in a process of its own, with its output in files."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0  # for importing torch on a busy machine


@dataclass(frozen=True)
class Command:
    """A command that was started in a folder of its own."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def out(self) -> str:
        """What it and its ranks have written to stdout so far."""
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        """What it and its ranks have written to stderr so far."""
        return (self.folder / "stderr").read_text()

    def wait(self, timeout: float = START_S) -> int:
        """Return its exit code."""
        return self.process.wait(timeout)

    def wait_for_words(self, count: int) -> list[str]:
        """Wait until the ranks have written `count` words, and return them in sorted order."""
        deadline = time.monotonic() + START_S
        while len(self.out.split()) < count and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        words = sorted(self.out.split())
        assert len(words) == count, f"{self.out}\n{self.err}"
        return words

    def end(self) -> None:
        """End it and what it has started, if a test has failed to."""
        try:
            living = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        except psutil.NoSuchProcess:
            living = []
        for process in living:
            process.kill()
        self.process.wait()


def start(folder: Path, *args: str, script: str = "", stdout: int | None = None, driver: str = "") -> Command:
    """Start `colossalai args...`, or the program `driver`, in `folder`, where job.py is `script`."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, *(("-c", driver) if driver else ("-m", "colossalai.cli")), *args],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else out,
            stderr=err,
        )
    return Command(process, folder)


def path_with_command() -> str:
    """Return a PATH on which `colossalai` is this interpreter's, whose environment need not be active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def wait_until(is_so: Callable[[], bool], timeout: float = START_S) -> None:
    """Wait, and fail if it does not become so."""
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {timeout} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Say whether a process has ended (perhaps without anybody having asked for its exit code)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
