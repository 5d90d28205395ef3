"""A save that goes on in a thread while training does.

[Note: no collectives in the background]
The thread writes while the main thread communicates over the same process groups, where the order of
collectives must be the same on all ranks. So the threads of the ranks agree over the job's key-value store,
under keys of their own. That a rank is gone is noticed by the others' deadline, or with the end of the job.
"""

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from colossalai.checkpoint_io._agreement import Agreement, global_rank, num_ranks

_POLL_S = 0.01
_DEADLINE_S = 1800.0
_DEADLINE_AT_EXIT_S = 60.0


class BackgroundSave:
    """A save in a thread.

    Args:
        write: Writes, and agrees with the other ranks by what it is given.
        number: Counts the saves of a job; the same on all ranks.
    """

    def __init__(self, write: Callable[[Agreement], object], *, number: int) -> None:
        self._error: Exception | None = None
        exchange: Callable[[Any], list[Any]] = _alone if num_ranks() == 1 else _StoreExchange(number)
        own_rank = global_rank()  # asked now: the group may be gone when the thread gets there
        agreement = Agreement(exchange, lambda: own_rank)
        # Not a daemon: Python waits for it at exit, or the last save of a run would be lost.
        self._thread = threading.Thread(
            target=self._run, args=(write, agreement), name="checkpoint", daemon=False
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end, and raise what went wrong; it is raised once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[Agreement], object], agreement: Agreement) -> None:
        try:
            write(agreement)
        except Exception as error:  # raised by `wait`, in the main thread
            self._error = error


def _alone(value: Any) -> list[Any]:
    return [value]


class _StoreExchange:
    """Exchanges values over the store of the default process group.

    Args:
        number: Counts the saves of a job.
    """

    def __init__(self, number: int) -> None:
        self._store = _get_default_store()
        self._prefix = f"colossalai/checkpoint/{number}"
        self._round = 0
        # Asked now: the group may be gone when the thread gets there.
        self._rank = global_rank()
        self._num_ranks = num_ranks()

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks.

        Raises:
            RuntimeError: A rank did not answer before the deadline.
        """
        keys = [self._key(self._round, rank) for rank in range(self._num_ranks)]
        own = self._rank
        self._store.set(keys[own], pickle.dumps(value))  # type: ignore[arg-type]
        begin = time.monotonic()
        for rank, key in enumerate(keys):
            while not self._store.check([key]):
                _refuse_to_wait_longer(rank, since=begin)
                time.sleep(_POLL_S)
        values = [pickle.loads(self._store.get(key)) for key in keys]
        if self._round > 0:  # whoever has written in this round has read the one before
            self._store.delete_key(self._key(self._round - 1, own))
        self._round += 1
        return values

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


def _refuse_to_wait_longer(rank: int, *, since: float) -> None:
    is_exiting = not threading.main_thread().is_alive()
    deadline = _DEADLINE_AT_EXIT_S if is_exiting else _DEADLINE_S
    if time.monotonic() - since > deadline:
        raise RuntimeError(
            f"a checkpoint that is saved in the background was given up: rank {rank} did not answer for "
            f"{deadline:.0f} s; the checkpoints before it are as they were"
        )
