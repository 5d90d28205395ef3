"""Collectives of outcomes: all ranks succeed or all ranks raise.

Files are written by one rank while the others wait, and read by every rank on its own. An error on one rank
alone would leave the others waiting in their next collective until it times out. So every step that can fail
on some ranks only ends with an exchange of outcomes and results, and a failure on one rank is an exception on
all.

In a process without a process group these functions just call their argument.

[Note: a save on one rank]
Users of DDP often save on rank 0 only. Here every rank holds a part, so the other ranks continue with the
collectives of the next step, which would be matched with those of the save: a hang, or an error on an
innocent rank. So the ranks first count themselves in the job's key-value store, in a meeting with a patience:
the watchdog finds that the missing ranks wait for the present ones, or have left, and ends the job with one
sentence. A rank that arrives later is waited for.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from colossalai.cluster import gather_values
from colossalai.context import is_in_job, is_watched
from colossalai.monitor import meeting

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 10.0
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_ADVICE = (
    "Saves and loads are collective: all ranks call them, also where only rank 0 writes. Take the call out "
    "of `if rank == 0:`"
)


class FullDiskError(OSError):
    """A write failed since the disk, or the user's quota, is full."""


_KINDS = {
    "FullDiskError": FullDiskError,  # before the kind that it is one of
    "OSError": OSError,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}


def global_rank() -> int:
    """Return the rank in the default process group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the size of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class GatherValues(Protocol):
    """Takes this rank's plain value and returns those of all ranks, by rank."""

    def __call__(self, value: T, /) -> list[T]:
        """Send a value to the other ranks, and wait for theirs."""
        ...


class Agreement:
    """All ranks succeed or all ranks raise; every method is called by all of them, in the same order.

    Each method is one exchange. All ranks raise an error of one kind, so that they can handle it alike: if
    several fail in different ways, the kind of the first of them.

    Args:
        exchange: Sends this rank's plain value, and returns the values of all ranks.
        rank: Returns the rank of this process.
    """

    def __init__(self, exchange: GatherValues, rank: Callable[[], int]) -> None:
        self._exchange = exchange
        self._rank = rank

    @property
    def rank(self) -> int:
        """The rank of this process among those that agree; 0 is the writer."""
        return self._rank()

    def on_every_rank(self, action: Callable[[], T]) -> T:
        """Run `action`, which takes no part in collectives, on every rank.

        Returns:
            The result of `action` on this rank only.

        Raises:
            Exception: `action` failed on this rank, with its own error; or on another one, with an error of
                the kind and text of the first failing rank's. A rank that failed in another way raises that
                one from its own.
        """
        returned: T = self._run(action, is_told=False)[0]
        return returned

    def on_writer(self, action: Callable[[], T]) -> T | None:
        """Run `action` on the writer while the others wait.

        Returns:
            The result of `action` on the writer, None on the other ranks.

        Raises:
            Exception: `action` failed on the writer: there its own error, on the others one of the same kind
                with its message.
        """
        returned: T | None = self._run(action if self._rank() == 0 else _nothing, is_told=False)[0]
        return returned

    def results(self, action: Callable[[], T]) -> list[T]:
        """Run `action`, which returns a plain value, on every rank.

        Returns:
            The results of `action`, by rank.

        Raises:
            Exception: `action` failed on some rank; see `on_every_rank`.
        """
        return self._run(action, is_told=True)[1]

    def from_writer(self, action: Callable[[], T]) -> T:
        """Run `action`, which returns a plain value, on the writer while the others wait.

        Returns:
            The writer's result of `action`, on every rank.

        Raises:
            Exception: `action` failed on the writer; see `on_writer`.
        """
        returned: T = self._run(action if self._rank() == 0 else _nothing, is_told=True)[1][0]
        return returned

    def gather(self, value: T) -> list[T]:
        """Return all ranks' plain values, by rank."""
        return self._exchange(value)

    def _run(self, action: Callable[[], Any], *, is_told: bool) -> tuple[Any, list[Any]]:
        """Return the result of `action` on this rank and, if it is sent, on all of them."""
        result, own, failure = None, None, None
        try:
            result = action()
        except Exception as error:  # raised below, after the other ranks know
            own, failure = error, _as_failure(error)
        # Every rank comes here, also one that failed: it sends the kind and the text of its error.
        results = []
        for rank, (others_failure, result_of_rank) in enumerate(
            self._exchange((failure, result if is_told else None))
        ):
            if others_failure is not None:
                kind, text = others_failure
                if own is not None and failure is not None and failure[0] == kind:
                    raise own
                raise _KINDS[kind](f"rank {rank}: {text}") from own
            results.append(result_of_rank)
        return result, results


def _as_failure(error: Exception) -> tuple[str, str]:
    """Return what other ranks need to raise the same: the name of a built-in kind of error, and the text."""
    name = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    return name, str(error) or repr(error)


def _nothing() -> Any:
    return None


COLLECTIVE = Agreement(gather_values, global_rank)
on_every_rank = COLLECTIVE.on_every_rank
on_writer = COLLECTIVE.on_writer
results = COLLECTIVE.results
from_writer = COLLECTIVE.from_writer
gather = COLLECTIVE.gather


def called_by_all_ranks(op: str, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that all ranks call: it begins when all have come.

    A rank without a watchdog does not wait.

    Args:
        op: "save" or "load".
        name: Name of the saved or loaded object: "a model".
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if num_ranks() > 1 and is_in_job():
                _wait_for_all(op, name, is_watched=is_watched())
            return function(*args, **kwargs)

        return call

    return decorated


def _wait_for_all(op: str, name: str, *, is_watched: bool) -> None:
    # See [Note: a save on one rank].
    store, size = _get_default_store(), num_ranks()
    key = f"colossalai/checkpoint/{op} of {name}"
    number = store.add(f"{key}/{global_rank()}", 1)  # of this rank's calls
    store.add(key, 1)
    arrival = meeting(
        name,
        channel=key,
        number=number,
        partners=range(size),
        op=op,
        patience=PATIENCE_S,
        advice=_ADVICE,
        after_backwards=True,
    )
    if not is_watched:  # the other ranks can be
        return
    try:
        with arrival:
            pause = _FIRST_POLL_S
            # No rank counts itself for its next call before all have come to this one.
            while store.add(key, 0) < number * size:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_POLL_S)
    except BaseException:  # such as an interrupt, after which a user can call again
        if store.add(key, -1) + 1 >= number * size:  # all have come, and go on
            store.add(key, 1)
        else:
            store.add(f"{key}/{global_rank()}", -1)
        raise
