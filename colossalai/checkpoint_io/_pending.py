"""The save that is going on in the background, of which there is at most one.

An error in it is raised where training passes by next: the optimizer's step, or the next save.
"""

import itertools
from collections.abc import Callable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io._agreement import Agreement
from colossalai.checkpoint_io._background import BackgroundSave


class _Pending:
    """The save that is going on, if there is one."""

    def __init__(self) -> None:
        self.save: BackgroundSave | None = None
        self.watch: RemovableHandle | None = None
        self.numbers = itertools.count()

    def forget(self) -> None:
        """Stop looking at it."""
        if self.watch is not None:
            self.watch.remove()
        self.save = self.watch = None


_pending = _Pending()


def start_save(write: Callable[[Agreement], object], *, watch: Optimizer | None) -> None:
    """Start to save in the background; every rank does so at the same place.

    Args:
        write: Writes, and agrees with the other ranks by what it is given.
        watch: An optimizer whose steps raise what went wrong.
    """
    assert _pending.save is None, "a save waits for the one before"
    _pending.save = BackgroundSave(write, number=next(_pending.numbers))
    raw = watch.optim if isinstance(watch, OptimizerWrapper) else watch
    if raw is not None:
        _pending.watch = raw.register_step_pre_hook(lambda *_: check_saves())


def check_saves() -> None:
    """Raise what went wrong in the background, if a save has ended so; else go on."""
    if _pending.save is not None and _pending.save.is_done:
        wait_for_saves()


def wait_for_saves() -> None:
    """Wait until what is saved in the background is on disk, and raise what went wrong."""
    save = _pending.save
    if save is None:
        return
    try:
        save.wait()
    finally:
        _pending.forget()
