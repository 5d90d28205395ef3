"""A folder for the pipes and error files of a job, which is removed even if its process is killed.

[Note: whose folder is abandoned]
Each process holds a lock on a file in its folder, which the kernel takes away when the process ends, whatever
ends it. The processes that it starts do not get the lock. So a folder with such a file that can be locked
belongs to nobody any more; no process number is asked for, which in a container would be another's. Whoever
starts next on the machine, and whoever ends what a killed agent has left, removes those of the same user.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "colossalai_"
_LOCK = ".colossalai-lock"


class PrivateFolder:
    """A new folder that only this user may enter.

    Args:
        kind: Part of its name.
    """

    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}_"))
        part = self.path / f"{_LOCK}.part"
        self._lock = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody will take it for abandoned
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
