"""The save that is going on in the background, of which there is at most one.

An error in it is raised where training passes by next: the optimizer's step, or the next save.
"""

import atexit
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io._agreement import Agreement, on_writer
from colossalai.checkpoint_io._background import BackgroundSave
from colossalai.checkpoint_io._folder_lock import FolderLocks
from colossalai.checkpoint_io._host_copies import HostCopies
from colossalai.context import before_end, fail_at_end, is_in_job


class _Pending:
    """The save that is going on, if there is one."""

    def __init__(self) -> None:
        self.save: BackgroundSave | None = None
        self.watch: RemovableHandle | None = None
        self.numbers = itertools.count()
        self.copies = HostCopies()
        self.locks = FolderLocks()

    def forget(self) -> None:
        """Stop looking at it."""
        if self.watch is not None:
            self.watch.remove()
        self.save = self.watch = None
        self.unlock_unless_in_job()

    def unlock_unless_in_job(self) -> None:
        """Give locks back that nobody will give back later: at the end of a job that is done."""
        if self.save is None and not is_in_job():
            self.locks.release()


_pending = _Pending()


def host_copies() -> HostCopies:
    """Return the memory for the copies of a save in the background."""
    assert _pending.save is None, "the memory is in use"
    return _pending.copies


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have the writer hold the lock of a folder that the block saves into, or starts to; collective.

    It is held to the end of the job that was launched; where none was, to the end of the save.

    Raises:
        ValueError: Another job holds it; on all ranks.
    """
    on_writer(lambda: _pending.locks.take(folder))
    before_end(_finish_saves)
    try:
        yield
    finally:
        _pending.unlock_unless_in_job()


def start_save(write: Callable[[Agreement], object], *, name: str, watch: Optimizer | None) -> None:
    """Start to save in the background; every rank does so at the same place.

    Args:
        write: Writes, and agrees with the other ranks by what it is given.
        name: What is saved.
        watch: An optimizer whose steps raise what went wrong.
    """
    assert _pending.save is None, "a save waits for the one before"
    _pending.save = BackgroundSave(write, number=next(_pending.numbers), name=name)
    raw = watch.optim if isinstance(watch, OptimizerWrapper) else watch
    if raw is not None:
        _pending.watch = raw.register_step_pre_hook(lambda *_: check_saves())


def check_saves() -> None:
    """Raise what went wrong in the background, if a save has ended so; else go on.

    Every rank calls it at the same places; an error is raised at the same one on all of them.
    """
    save = _pending.save
    if save is None:
        return
    try:
        save.pass_by()
    except Exception:
        _pending.forget()
        raise
    if save.is_done and save.error is None:
        _pending.forget()


def wait_for_saves() -> None:
    """Wait until what is saved in the background is on disk, and raise what went wrong."""
    save = _pending.save
    if save is None:
        return
    try:
        save.wait()
    finally:
        _pending.forget()


def _finish_saves() -> None:
    """Wait before the job ends here: with it goes the store over which the ranks agree."""
    try:
        if _pending.save is not None:
            _pending.save.hurry()
            wait_for_saves()
    finally:
        _pending.locks.release()


@atexit.register
def _tell_at_exit() -> None:
    """Tell what went wrong after the last step; Python has waited for the thread by now."""
    try:
        wait_for_saves()
    except Exception as error:
        fail_at_end(error)
