"""End what an agent that is gone or stuck has left on its node.

    python -m colossalai.cli._sweep MARK

Every process below an agent has the agent's mark in its environment, whatever session it is in and whoever
its parent is now.
"""

import os
import signal
import sys

import psutil

from colossalai.cli._private_folder import remove_abandoned_folders
from colossalai.cli._processes import end_processes

GRACE_S = 3.0
MARK_VARIABLE = "COLOSSALAI_NODE"


def main() -> None:
    """End the processes with the mark that is given, and remove the folder of the agent that has died."""
    sweep(sys.argv[1])
    remove_abandoned_folders()


def sweep(mark: str) -> None:
    """End all processes with this mark but this one: ask them first, and kill what is left."""
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
