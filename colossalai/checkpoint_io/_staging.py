"""A file or a folder that is written by the writer, or by all ranks, and put in place at the end."""

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from colossalai.checkpoint_io._agreement import Agreement, is_writer, on_every_rank, on_writer
from colossalai.checkpoint_io._atomic import atomic_folder, clear_os_errors


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
    """Open something to write to on the writer, and close it there at the end.

    The body runs on every rank. It may use collectives, and hands what is to be written to the `write` it is
    given.

    Args:
        open_target: `atomic_file` or `atomic_folder`.
        path: What to give to it.
        num_bytes: About how much will be written.
    """
    path = Path(path).resolve()
    with ExitStack() as stack:
        target = on_writer(lambda: stack.enter_context(open_target(path, num_bytes=num_bytes)))

        def write(
            action: Callable[[Path], object], *, elsewhere: Callable[[], object] = lambda: None
        ) -> None:
            def act() -> None:
                assert target is not None, "only the writer has a path"
                # Here, and not only in open_target: it is this error that the other ranks are told.
                with clear_os_errors(path, num_bytes):
                    action(target)

            on_every_rank(act if is_writer() else elsewhere)

        yield write
        on_writer(stack.close)


@contextmanager
def shared_folder(
    path: Path, *, num_bytes: int, agreement: Agreement, keep: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Give all ranks an empty folder to write to; it takes the place of `path` when the block ends well.

    Args:
        path: The folder, on a file system that all ranks see.
        num_bytes: About how much all ranks will write.
        agreement: How the ranks agree.
        keep: Whether an entry of the existing folder, by name, is carried over to the new one.

    Raises:
        OSError: The folder cannot be written, or a rank does not see it.
    """
    path = Path(path).resolve()
    with ExitStack() as stack:
        own = agreement.on_writer(
            lambda: stack.enter_context(atomic_folder(path, num_bytes=num_bytes, keep=keep))
        )
        target = Path(agreement.gather(str(own))[0])
        agreement.on_every_rank(lambda: _see(target, path))
        yield target
        agreement.on_writer(stack.close)


def _see(target: Path, path: Path) -> None:
    if not target.is_dir():
        raise OSError(
            errno.ENOENT,
            f"{target.parent} as rank 0 sees it is not there: every rank writes its own part of {path}, so "
            f"give a folder on a file system that all ranks share",
        )
