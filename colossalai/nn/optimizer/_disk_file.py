"""Files for states and tables: positioned reads and writes, and tensors whose memory is the file.

[Note: private folders]
Each offload has a folder of its own, with a file `owner` that the process keeps locked. The kernel releases
the lock when the process ends, even by a signal: a folder whose `owner` can be locked is a leftover. A
process identifier in the name would not do: it may be reused, in another container too.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from colossalai.logging import get_dist_logger

PAGE = 4096
"""Offsets and lengths of reads and writes are multiples of it, as `O_DIRECT` requires."""

_PREFIX = "colossalai-states-"
_OWNER = "owner"


class PrivateFolder:
    """A folder that is removed with this object, with the process, or, after a crash, at the next start.

    See [Note: private folders].

    Args:
        parent: Parent folder, made if it does not exist. None for the system's temporary folder.

    Raises:
        OSError: `parent` is not a folder, or the private folder cannot be made.

    Attributes:
        path: The folder.
    """

    def __init__(self, parent: str | Path | None) -> None:
        root = Path(tempfile.gettempdir() if parent is None else parent).absolute()
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "nvme_offload_dir is not a folder", str(root))
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            # Until it is locked, under a name that is not removed as a leftover.
            new = Path(tempfile.mkdtemp(prefix=f".new-{_PREFIX}{os.getpid()}-", dir=root))
            owner = os.open(new / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = new.rename(root / new.name.removeprefix(".new-"))
        except OSError as error:
            raise explained(error, root, needed=0) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, owner, os.getpid())


class StateFile:
    """A file of a fixed size, full of zeros at first.

    Args:
        path: Its path.
        size: Its bytes, a multiple of `PAGE` for `read` and `write`. The disk's space is taken at once.
        direct: Whether to go past the page cache, if the file system can.
        is_new: Whether it is made; else it is there, and keeps its contents.
        mode: Permissions of a new file, less those of the process's umask.
        is_named: Whether it keeps its name; else it ends with its last reader, also if that is by a signal.

    Raises:
        OSError: The file cannot be made or opened; with the path, the bytes needed and the bytes free.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        direct: bool,
        is_new: bool = True,
        mode: int = 0o600,
        is_named: bool = True,
    ) -> None:
        self.path = path
        self.size = size
        try:
            self._fd = _open(path, direct=direct, mode=mode) if is_new else os.open(path, os.O_RDWR)
        except OSError as error:
            raise explained(error, path, needed=size) from error
        self._finalizer: weakref.finalize[..., StateFile] = weakref.finalize(self, os.close, self._fd)
        self._finalizer.atexit = False  # others may write to it then
        try:
            if not is_named:
                path.unlink()
            if is_new:
                os.posix_fallocate(self._fd, 0, size)
            self._mapping = self.new_mapping()
        except OSError as error:
            if is_new:
                path.unlink(missing_ok=True)
            raise explained(error, path, needed=size) from error

    def lock(self) -> None:
        """Lock the file until this object ends, or this process with its forks, also if that is by a signal.

        Raises:
            BlockingIOError: The file is locked, by this process or another.
        """
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _unlock_and_close, self._fd, os.getpid())
        self._finalizer.atexit = False

    def unlock(self) -> None:
        """Undo `lock`, which forks of this process share."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more: it was deleted, or another one has its name."""
        return os.fstat(self._fd).st_nlink == 0

    def new_mapping(self) -> mmap.mmap:
        """Return the file as shared memory of its own, for advice of its own to the system."""
        return mmap.mmap(self._fd, self.size)

    def check(self) -> None:
        """Raise an OSError if the file is no longer as large as it was."""
        size = os.fstat(self._fd).st_size
        if size < self.size:
            self._raise_shrunk(size)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a part of the file as a tensor in shared memory: it reads and writes the file itself."""
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)

    def forget_pages(self) -> None:
        """Release the memory of pages read through `tensor`; nothing is lost."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer; both are aligned to pages."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise explained(error, self.path, needed=len(buffer)) from error
            if count == 0:
                self._raise_shrunk(offset + done)
            done += count

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write a buffer; both are aligned to pages."""
        done = 0
        while done < len(buffer):
            try:
                done += os.pwritev(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise explained(error, self.path, needed=len(buffer) - done) from error

    def _raise_shrunk(self, size: int) -> None:
        error = OSError(errno.EIO, f"the file ends after {size} bytes: it was cut from outside")
        raise explained(error, self.path, needed=self.size)


def explained(error: OSError, path: Path, *, needed: int) -> OSError:
    """Return an error of the same type whose message has the file, the bytes needed and the bytes free."""
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    free = shutil.disk_usage(folder).free
    what = f"{needed} bytes needed" if needed else "a folder cannot be made"
    return OSError(
        error.errno,
        f"{error.strerror} ({what}, {free} bytes free in {folder})",
        str(path),
    )


def _open(path: Path, *, direct: bool, mode: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    if direct:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), mode)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems make the file before they refuse
            get_dist_logger().info(
                f"{path.parent} is on a file system without O_DIRECT: states pass the page cache", ranks=[0]
            )
    return os.open(path, flags, mode)


def _unlock_and_close(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork shares the lock, and keeps it when this process has closed the file
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _remove_leftovers(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            owner = os.open(folder / _OWNER, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # being removed by another process, or another user's
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # in use
            os.close(owner)
            continue
        shutil.rmtree(folder, ignore_errors=True)  # another process may be at it as well
        os.close(owner)


def _remove(path: Path, owner: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork, which ends earlier than its parent
        shutil.rmtree(path, ignore_errors=True)
    os.close(owner)
