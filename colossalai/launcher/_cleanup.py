"""Cleanup of a host: processes and folders left by a lost or stuck agent.

    python -m colossalai.launcher._cleanup MARK

Every process below an agent has the agent's mark in its environment, in any session and after any change of
its parent.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import psutil

from colossalai.launcher._processes import GRACE_S, end_processes

_PREFIX = "colossalai_"
_LOCK = ".colossalai-lock"


class JobFolder:
    """A new folder that only this user may enter.

    Args:
        kind: Part of its name.
    """

    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}_"))
        part = self.path / f"{_LOCK}.part"
        self._lock = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: the folder never counts as abandoned
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            part.rename(self.path / _LOCK)  # from now on it is seen, and held

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Remove the folders of this user whose processes have ended without doing so."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # it is held, another user's, or has just been removed
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


MARK_VARIABLE = "COLOSSALAI_NODE"


def main() -> None:
    """End the processes with the mark that is given, and remove the folder of the agent that has died."""
    sweep(sys.argv[1])
    remove_abandoned_folders()


def sweep(mark: str) -> None:
    """End all other processes with this mark: SIGTERM first, then SIGKILL for the rest."""
    own = os.getpid()
    end_processes(
        lambda: [process for process in psutil.process_iter() if process.pid != own and _has(process, mark)],
        signal.SIGTERM,
        grace_s=GRACE_S,
    )


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK_VARIABLE) == mark
    except (psutil.Error, OSError):
        return False  # it has ended, or is another user's and so not of our job


if __name__ == "__main__":
    main()
