"""Lock of a folder of training states: two jobs that save into one would remove each other's states.

A job takes it with its first save and keeps it to its end; outside of a job it is held during a
save. It is a lock of the operating system on a file, which ends with the process in any case, and which
network file systems share with other machines. The file's content is for people, and for file systems without
locks: there a running process of this machine counts.
"""

import atexit
import errno
import fcntl
import json
import os
import platform
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io.storage._untrusted import resolved
from colossalai.logging import get_dist_logger

LOCK = ".writer.lock"
_IS_HELD = (errno.EACCES, errno.EAGAIN)
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NOT_OURS = "{} is no regular file: remove it, this is the name of the lock of the folder"
_MOST_READ = 4096


class FolderLocks:
    """The locks that this process holds, by folder."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}  # an open file each
        self._pid = os.getpid()

    def take(self, folder: Path) -> None:
        """Take the lock of a folder, which is made if it is not there; it may be held already.

        A folder that cannot be written is not locked: the writer raises the reason.

        Raises:
            ValueError: Another process, which is named, holds the lock, its file is not a regular one, or
                `folder` is a loop of links.
        """
        folder = resolved(folder)
        self._forget_those_of_the_parent()
        if folder in self._held:
            if _is_in_place(self._held[folder], folder / LOCK):
                return
            os.close(self._held.pop(folder))  # the folder was removed, and with it the lock
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._held[folder] = _locked(folder / LOCK)
        atexit.unregister(self.release)
        atexit.register(self.release)

    def release(self) -> None:
        """Give all of them back."""
        self._forget_those_of_the_parent()
        while self._held:
            folder, file = self._held.popitem()
            if _is_in_place(file, folder / LOCK):
                (folder / LOCK).unlink(missing_ok=True)
            os.close(file)

    def _forget_those_of_the_parent(self) -> None:
        """In a process that was forked: the locks did not come along, and are not its to give back."""
        if self._pid != os.getpid():
            while self._held:
                os.close(self._held.popitem()[1])
            self._pid = os.getpid()


def _locked(path: Path) -> int:
    """Return the file, locked, with this process in it."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise ValueError(_NOT_OURS.format(path)) from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(_NOT_OURS.format(path))
            _lock(file, path)
            if _is_in_place(file, path):  # otherwise its owner has just removed it
                with suppress(OSError):  # the disk is full: it is a lock all the same
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps(_this_process()).encode(), 0)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, path: Path) -> None:
    # lockf, not flock: it is not inherited by forked processes (loaders' workers), which may live longer.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (*_IS_HELD, *_HAS_NO_LOCKS):
            raise
        holder = _holder(file)
        if error.errno in _IS_HELD or _is_alive_here(holder):
            raise ValueError(
                f"another job saves its training states into {path.parent}: process {holder['pid']} on "
                f"{holder['host']}, since {holder['since']}. Two jobs would remove each other's: give each a "
                f"folder of its own (if that process is gone and its machine is lost, remove {path})"
            ) from error
        get_dist_logger().log_once(
            f"the file system of {path.parent} has no locks: that another machine saves there goes unnoticed"
        )


def _is_in_place(file: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def _this_process() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": platform.node(), "pid": os.getpid(), "since": since}


def _holder(file: int) -> dict[str, Any]:
    """Return the content of the file; the owner can be about to write it."""
    unknown = dict.fromkeys(("host", "pid", "since"), "(unknown)")
    try:
        content = json.loads(os.pread(file, _MOST_READ, 0))
    except (ValueError, RecursionError):
        return unknown
    return unknown | content if isinstance(content, dict) else unknown


def _is_alive_here(holder: dict[str, Any]) -> bool:
    pid = holder["pid"]
    if holder["host"] != platform.node() or not isinstance(pid, int) or pid < 1 or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True
