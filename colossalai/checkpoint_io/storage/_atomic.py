"""Atomic files and folders: replaced as a whole or not at all.

New content is written under a temporary name in the same directory, synced to disk and then renamed into
place. A reader of the path, at any moment and after any crash, finds the old content or the new one,
complete.

Leftovers of a killed writer are removed by the next writer of the same path.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from colossalai.checkpoint_io._collective import Agreement, FullDiskError, on_every_rank, on_writer
from colossalai.checkpoint_io.storage._untrusted import resolved
from colossalai.logging import get_dist_logger
from colossalai.monitor import still_moving

T = TypeVar("T")
U = TypeVar("U")

_AT_CURRENT_FOLDER = -100
_RENAME_EXCHANGE = 2
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
# A file system (or a libc) that cannot exchange two names, or make hard links, answers with one of these.
_NOT_ABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV, errno.EMLINK)


@contextmanager
def atomic_file(path: str | Path, *, num_bytes: int = 0) -> Iterator[Path]:
    """Give a path to write a file to; it takes the place of `path` when the block ends without an error.

    Args:
        path: The file. Missing parent folders are made.
        num_bytes: Approximate size, to refuse before a disk is full, and for the error.

    Raises:
        ValueError: `path` is a folder, a device, a FIFO, a socket or a loop of links.
        OSError: The file cannot be written; the message names the path, the bytes needed and the bytes free.
    """
    path = resolved(Path(path))
    if path.is_dir():
        raise ValueError(f"{path} is a folder, a file is to be written: give a file name (or shard=True)")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, and would be replaced by one: give another name")
    with clear_os_errors(path, num_bytes):
        temporary = _prepare(path, num_bytes)
        try:
            yield temporary
            sync(temporary)  # before it gets its name: after a crash the name must not stand for half of it
            os.replace(temporary, path)
            sync(path.parent)  # the name itself
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(
    path: str | Path, *, num_bytes: int = 0, keep: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Give an empty folder to write to; it takes the place of `path` when the block ends without an error.

    An existing folder and the new one exchange their names in one step, if the file system supports it.
    Otherwise there is an instant without a folder at `path`; a crash in it leaves the old one under another
    name, and the next `atomic_folder` restores it.

    Args:
        path: The folder. Missing parent folders are made.
        num_bytes: Approximate size, to refuse before a disk is full, and for the error.
        keep: Whether an entry of the existing folder, by name, is carried over to the new one.

    Raises:
        ValueError: `path` is a file, a loop of links, or the current folder or above it.
        OSError: The folder cannot be written; the message names the path, the bytes needed and the bytes
            free.
    """
    path = resolved(Path(path))
    if path.is_file():
        raise ValueError(f"{path} is a file, a folder is to be written: give another name (or shard=False)")
    if Path.cwd().is_relative_to(path):
        raise ValueError(
            f"{path} is the current folder or above it and cannot be replaced: give a sub-folder"
        )
    with clear_os_errors(path, num_bytes):
        _put_back(path)
        temporary = _prepare(path, num_bytes)
        try:
            temporary.mkdir()
            yield temporary
            if path.is_dir():
                _carry_over(path, temporary, keep)
            sync_tree(temporary)  # before it gets its name, as in atomic_file
            _put_in_place(temporary, path)
            sync(path.parent)  # the name itself
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # leftovers are removed by the next writer


def sync(*paths: Path) -> None:
    """Have the operating system put the content of files, and the lists of names of folders, on disk.

    Returns when the disk has them: for large files this is where a save waits.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    still_moving()


def sync_tree(folder: Path) -> None:
    """Put every file and folder below `folder` on disk, and `folder` itself."""
    paths: list[Path] = []
    for parent, _, names in os.walk(folder):
        # No link is followed, and no FIFO opened, which would wait: those are carried over, and not ours.
        paths += (path for name in names if stat.S_ISREG((path := Path(parent, name)).lstat().st_mode))
        paths.append(Path(parent))
    sync(*paths)


def _prepare(path: Path, num_bytes: int) -> Path:
    """Make room for new content: parent folder there, leftovers gone, disk large enough; return its name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from error
    for leftover in _beside(path, "new"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    if num_bytes > shutil.disk_usage(path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a folder to `path`; a folder that was there takes the temporary name."""
    if not path.exists():
        temporary.rename(path)
        return
    if _exchange(temporary, path):
        return
    get_dist_logger().log_once(
        f"the file system of {path.parent} cannot exchange two folders in one step: two renames replace one"
    )
    aside = path.with_name(f".{path.name}.old-{secrets.token_hex(4)}")
    path.rename(aside)
    temporary.rename(path)  # a crash just before this line leaves no `path`: `_put_back` undoes it
    shutil.rmtree(aside)


def _put_back(path: Path) -> None:
    """Undo the first of two renames of a killed writer, or remove the folder that it moved aside."""
    for aside in filter(Path.is_dir, _beside(path, "old")):
        if path.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(path)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step; return False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = (_AT_CURRENT_FOLDER, os.fsencode(first), _AT_CURRENT_FOLDER, os.fsencode(second))
    if renameat2(*names, _RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in _NOT_ABLE:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _carry_over(old: Path, new: Path, keep: Callable[[str], bool]) -> None:
    for entry in old.iterdir():
        target = new / entry.name
        if not keep(entry.name) or target.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(entry, target)


def _link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NOT_ABLE:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def clear_os_errors(path: Path, num_bytes: int) -> Iterator[None]:
    """Add path, size and free room to an OSError."""
    begin = f"cannot write {path}: "
    try:
        yield
    except OSError as error:
        if begin in str(error):
            raise
        number = error.errno or errno.EIO
        where = f" ({error.filename})" if error.filename else ""
        kind = FullDiskError if number in _IS_FULL else OSError
        raise kind(
            number,
            f"{begin}{error.strerror or error}{where}; "
            f"{num_bytes} bytes needed, {_free_bytes(path)} bytes free",
        ) from error


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(next(parent for parent in path.parents if parent.is_dir())).free


def _beside(path: Path, kind: str) -> list[Path]:
    """Return what writers of `path` have left beside it: real files and folders of a name as they give it."""
    form = re.compile(rf"\.{re.escape(path.name)}\.{kind}-[0-9a-f]+")
    entries = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(
        entry
        for entry in entries
        if form.fullmatch(entry.name) and (entry.is_dir() or entry.is_file()) and not entry.is_symlink()
    )


class Write(Protocol):
    """Has an action done by the writer on the path that is being written; a failure is one on all ranks."""

    def __call__(
        self, action: Callable[[Path], object], *, elsewhere: Callable[[], object] = lambda: None
    ) -> None:
        """Do `action` on the writer, and `elsewhere` on the other ranks meanwhile."""
        ...


@contextmanager
def staged(
    open_target: Callable[..., AbstractContextManager[Path]], path: str | Path, *, num_bytes: int = 0
) -> Iterator[Write]:
    """Open a target on the writer, and close it there at the end.

    The body runs on every rank. It can use collectives, and passes writes to the yielded `write`.

    Args:
        open_target: `atomic_file` or `atomic_folder`.
        path: Its argument.
        num_bytes: About how much will be written.
    """
    path = resolved(Path(path))
    with ExitStack() as stack:
        # Entered on the writer alone: on the other ranks the stack is empty, and there is no target.
        target = on_writer(lambda: stack.enter_context(open_target(path, num_bytes=num_bytes)))

        def write(
            action: Callable[[Path], object], *, elsewhere: Callable[[], object] = lambda: None
        ) -> None:
            def act() -> None:
                assert target is not None, "only the writer has a path"
                # Here, and not only in open_target: this error is sent to the other ranks.
                with clear_os_errors(path, num_bytes):
                    action(target)

            on_every_rank(elsewhere if target is None else act)

        yield write
        # The rename: the other ranks leave when the writer has done it. After an error in the block it does
        # not get here: the stack removes the new content.
        on_writer(stack.close)


def write_shared_folder(
    path: Path,
    *,
    num_bytes: int,
    agreement: Agreement,
    write: Callable[[Path], T],
    finish: Callable[[Path, list[T]], U],
    keep: Callable[[str], bool] = lambda name: False,
    after: Callable[[U], Any] = lambda finished: None,
) -> Any:
    """Have all ranks write to an empty folder, which takes the place of `path` when all have; collective.

    Args:
        path: The folder, on a file system that all ranks see.
        num_bytes: About how much all ranks will write.
        agreement: Exchange of the ranks; three exchanges.
        write: Writes this rank's files into the folder; returns a plain value.
        finish: Writes on the writer, when all ranks have written, the files that no single rank has; takes
            the values of all ranks.
        keep: Whether an entry of the existing folder, by name, is carried over to the new one.
        after: Is called on the writer when the folder is in place, with the result of `finish`; returns a
            plain value.

    Returns:
        The result of `after`, on every rank.

    Raises:
        FullDiskError: The disk is full; on all ranks.
        OSError: The folder cannot be written, or a rank does not see it; on all ranks.
    """
    path = resolved(Path(path))
    with ExitStack() as stack:
        # The writer makes the folder, and sends its hidden name to the other ranks.
        target = Path(
            agreement.from_writer(
                lambda: str(stack.enter_context(atomic_folder(path, num_bytes=num_bytes, keep=keep)))
            )
        )

        def write_here() -> T:
            # Here, and not only in atomic_folder: this error is sent to the other ranks.
            with clear_os_errors(path, num_bytes):
                if not target.is_dir():
                    raise OSError(
                        errno.ENOENT,
                        f"{target.parent} as rank 0 sees it is not there: every rank writes its own part of "
                        f"{path}, so give a folder on a file system that all ranks share",
                    )
                return write(target)

        # No rank goes on before all have written: the wait is for the last rank's result.
        told = agreement.results(write_here)

        def finish_here() -> Any:
            with clear_os_errors(path, num_bytes):
                finished = finish(target, told)
            stack.close()  # synced to disk, and renamed into place
            return after(finished)

        return agreement.from_writer(finish_here)
