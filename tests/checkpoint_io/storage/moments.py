"""Moments of a save at which a process dies: before one of its calls that change files.

They are counted, not timed, so that a moment is the same on every machine.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_CALLS = {
    *("open", "write", "pwrite", "truncate", "ftruncate", "fsync", "close"),
    *("mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir"),
}


class FileCalls:
    """Counts calls that change files, of the compiled functions that Python calls; for `sys.setprofile`.

    Args:
        die_at: The process is killed before the call of this number, from 0.
    """

    def __init__(self, die_at: int) -> None:
        self._count = 0
        self._die_at = die_at

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        """Count a call."""
        if event == "c_call" and function.__name__ in _CALLS:
            if self._count >= self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1


def die_at_call(number: int) -> None:
    """Let this process be killed before a call of this thread, or of threads that start from now on."""
    calls = FileCalls(number)
    threading.setprofile(calls)
    sys.setprofile(calls)
