"""A file or a folder that the writer writes piece by piece while all ranks gather the pieces."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from colossalai.checkpoint_io._agreement import on_writer
from colossalai.checkpoint_io._atomic import clear_os_errors

Write = Callable[[Callable[[Path], object]], None]
"""Has an action done by the writer, on the path that is being written; raises on all ranks if it fails."""


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

        def write(action: Callable[[Path], object]) -> None:
            def act() -> None:
                assert target is not None, "only the writer has a path"
                # Here, and not only in open_target: it is this error that the other ranks are told.
                with clear_os_errors(path, num_bytes):
                    action(target)

            on_writer(act)

        yield write
        on_writer(stack.close)
