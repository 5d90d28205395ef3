"""Asynchronous save: in a thread, while training continues.

[Note: no collectives in the background]
The thread writes while the main thread communicates over the same process groups, where the order of
collectives must be the same on all ranks. So the threads of the ranks agree over the job's key-value store,
under keys of their own. If a rank does not arrive at a round, since it or its file server is gone, the
watchdog reports the wait of the others; without a watchdog their deadline ends it.

[Note: the step at which an error is raised]
An error must be raised at the same step on all ranks: a rank that raised a step earlier would leave the
others waiting in a collective. The main threads count their checks, and their counts differ when the
threads get the error. So the threads propose the count after the highest of all. A main thread that reaches
it waits until all threads have reported whether their main thread is past it. If one is, they propose again,
twice
as far ahead: steps can be shorter than the agreement of the threads.
"""

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io._collective import Agreement, global_rank, num_ranks
from colossalai.checkpoint_io.storage._folder_lock import FolderLocks
from colossalai.cluster import PlainCodec
from colossalai.context import before_end, fail_at_end, is_in_job
from colossalai.monitor import meeting, section

_PLAIN = PlainCodec()
_CHANNEL = "saves in the background"
_MOST_ROUNDS = 100  # of one save
_POLL_S = 0.01
_DEADLINE_S = 1800.0
_DEADLINE_AT_END_S = 300.0
_LEAVING_S = 10.0
_GONE_AHEAD = 1 << 40  # more than there are ranks


class BackgroundSave:
    """A save in a thread.

    Args:
        write: Writes, with an `Agreement` as its argument.
        number: Number of the save in the job; the same on all ranks.
        name: Name of the saved object.
    """

    def __init__(self, write: Callable[[Agreement], object], *, number: int, name: str) -> None:
        self.error: Exception | None = None
        name = f"the save of {name} in the background"
        self._writing = section(name, is_wait=True)
        self._raising = _CommonCount()
        self._at_end = threading.Event()
        # Keys of the job's store, not a process group: see [Note: no collectives in the background].
        exchange = _Alone() if num_ranks() == 1 else _StoreExchange(number, self._at_end, name)
        own_rank = global_rank()  # asked now: the group may be gone when the thread gets there
        agreement = Agreement(lambda value: _exchanged(value, exchange), lambda: own_rank)
        # Not a daemon: Python waits for it at exit, or the last save of a run would be lost.
        self._thread = threading.Thread(
            target=self._run, args=(write, agreement, exchange), name="checkpoint", daemon=False
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def pass_by(self) -> None:
        """Raise the error of the save, if there is one; at the same call on all ranks."""
        if self._raising.reached():
            # All ranks have agreed on this call, so all of them raise here.
            self.wait()

    def hurry(self) -> None:
        """Wait less long for other ranks: they too are at the end, or will never answer."""
        self._at_end.set()

    def wait(self) -> None:
        """Wait for the end, and raise the error of the save, once."""
        self._thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _run(
        self, write: Callable[[Agreement], object], agreement: Agreement, exchange: "_Alone | _StoreExchange"
    ) -> None:
        try:
            with self._writing:
                write(agreement)
        except Exception as error:  # raised by `wait`, in the main thread
            self.error = error
            # All threads are here: `write` ends with the same outcome on all ranks.
            # See [Note: the step at which an error is raised].
            self._raising.agree(agreement)
        exchange.close()


def _exchanged(value: Any, exchange: Callable[[bytes], list[bytes]]) -> list[Any]:
    """Return the plain values of all ranks; nothing that comes from another rank is unpickled."""
    return [_PLAIN.decode(data) for data in exchange(_PLAIN.encode(value))]


class _CommonCount:
    """A count of calls at which something happens on all ranks; see the note above."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._proposed: int | None = None
        self._is_agreed = False

    def reached(self) -> bool:
        """Count a call, and return whether it is the one; wait if that is about to be decided."""
        with self._changed:
            self._calls += 1
            # The only wait of a training step: from the proposal to the agreement of the threads.
            self._changed.wait_for(lambda: self._is_agreed or not self._is_reached())
            return self._is_reached()

    def agree(self, agreement: Agreement) -> None:
        """Fix the count with the other ranks, in threads of theirs."""
        # See [Note: the step at which an error is raised].
        ahead = 1
        try:
            while not all(agreement.gather(self._propose(ahead + max(agreement.gather(self._calls))))):
                self._set(None, is_agreed=False)
                ahead *= 2
        except Exception:  # the others are gone: the error that is to be raised is not this one
            self._set(0, is_agreed=True)
        else:
            self._set(self._proposed, is_agreed=True)

    def _propose(self, count: int) -> bool:
        with self._changed:
            if self._calls >= count:
                return False
            self._proposed = count
            return True

    def _set(self, proposed: int | None, *, is_agreed: bool) -> None:
        with self._changed:
            self._proposed, self._is_agreed = proposed, is_agreed
            self._changed.notify_all()

    def _is_reached(self) -> bool:
        return self._proposed is not None and self._calls >= self._proposed


class _Alone:
    """The exchange of a single rank."""

    def __call__(self, data: bytes) -> list[bytes]:
        """Return the only ones."""
        return [data]

    def close(self) -> None:
        """There is nothing to close."""


class _StoreExchange:
    """Exchanges bytes over the store of the default process group, and leaves none of them there.

    Args:
        number: Counts the saves of a job.
        at_end: Set when this process is about to leave the job.
        name: Name of the saved object.
    """

    def __init__(self, number: int, at_end: threading.Event, name: str) -> None:
        self._store = _get_default_store()
        self._number = number
        self._name = name
        self._at_end = at_end
        self._prefix = f"colossalai/checkpoint/{number}"
        self._round = 0
        # Asked now: the group may be gone when the thread gets there.
        self._rank = global_rank()
        self._num_ranks = num_ranks()

    def __call__(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks.

        Raises:
            RuntimeError: A rank did not answer before the deadline.
        """
        keys = [self._key(self._round, rank) for rank in range(self._num_ranks)]
        own = self._rank
        # Each rank writes before it waits, so no two ranks wait for each other.
        self._store.set(keys[own], data)  # type: ignore[arg-type]
        begin = time.monotonic()
        step = self._number * _MOST_ROUNDS + self._round + 1
        with meeting(self._name, channel=_CHANNEL, number=step, partners=range(self._num_ranks)):
            for rank, key in enumerate(keys):
                while not self._store.check([key]):
                    self._refuse_to_wait_longer(rank, since=begin)
                    time.sleep(_POLL_S)
        found = [bytes(self._store.get(key)) for key in keys]
        if self._round > 0:  # a rank that has written in this round has read the one before
            self._store.delete_key(self._key(self._round - 1, own))
        self._round += 1
        return found

    def close(self) -> None:
        """Let rank 0, whose process may hold the store, go last, so that all get their last values.

        The agreement is complete: a store that is gone by now is not an error.
        """
        left = f"{self._prefix}/left"
        with contextlib.suppress(RuntimeError):
            count = self._store.add(left, 1)
            end = time.monotonic() + _LEAVING_S
            while self._rank == 0 and count < self._num_ranks and time.monotonic() < end:
                time.sleep(_POLL_S)
                count = self._store.add(left, 0)
            if self._rank == 0 and count < self._num_ranks:  # it waits no longer, and the last one tidies up
                count = self._store.add(left, _GONE_AHEAD)
            if count == self._num_ranks + (_GONE_AHEAD if self._rank else 0):
                # The count is not read any more: reading would create it again.
                for key in (left, *(self._key(self._round - 1, rank) for rank in range(self._num_ranks))):
                    self._store.delete_key(key)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _refuse_to_wait_longer(self, rank: int, *, since: float) -> None:
        is_at_end = self._at_end.is_set() or not threading.main_thread().is_alive()
        deadline = _DEADLINE_AT_END_S if is_at_end else _DEADLINE_S
        if time.monotonic() - since > deadline:
            raise RuntimeError(
                f"a checkpoint that is saved in the background was given up: rank {rank} did not answer for "
                f"{deadline:.0f} s; the checkpoints before it are as they were"
            )


class HostCopies:
    """Copies of tensors in host memory; those of the save before give their memory to the next.

    Only one save at a time uses it: `begin` is called when the one before has ended.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._used: dict[Hashable, torch.Tensor] = {}

    def begin(self) -> None:
        """Start the copies of a save; memory that the one before did not use is given back."""
        self._kept, self._used = self._used, {}

    def copy_of(self, tensor: torch.Tensor, key: Hashable) -> torch.Tensor:
        """Return a contiguous copy, in memory that is this object's and is used again by the next save.

        Args:
            tensor: The tensor, on any device.
            key: Its identity, the same in each save.
        """
        copy = self._kept.pop(key, None)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy.copy_(tensor)  # waits for the device: the training step may change the tensor at once
        self._used[key] = copy
        return copy

    def clear(self) -> None:
        """Give all memory back."""
        self._kept, self._used = {}, {}


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
def folder_lock() -> Iterator[Callable[[Path], None]]:
    """Yield the function by which the writer takes the lock of a folder that the block saves into.

    It raises a ValueError where another job holds the lock. The lock is held to the end of the job that was
    launched; where none was, to the end of the save.
    """
    try:
        before_end(_finish_saves)
        yield _pending.locks.take
    finally:
        _pending.unlock_unless_in_job()


def start_save(write: Callable[[Agreement], object], *, name: str, watch: Optimizer | None) -> None:
    """Start to save in the background; every rank does so at the same place.

    Args:
        write: Writes, with an `Agreement` as its argument.
        name: Name of the saved object.
        watch: An optimizer whose steps raise an error of the save.
    """
    assert _pending.save is None, "a save waits for the one before"
    _pending.save = BackgroundSave(write, number=next(_pending.numbers), name=name)
    raw = watch.optim if isinstance(watch, OptimizerWrapper) else watch
    if raw is not None:
        _pending.watch = raw.register_step_pre_hook(lambda *_: check_saves())


def check_saves() -> None:
    """Raise the error of a background save that has failed, if any.

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
    """Wait until background saves are on disk, and raise their error."""
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
    """Log an error that occurred after the last step; Python has waited for the thread by now."""
    try:
        wait_for_saves()
    except Exception as error:
        fail_at_end(error)
