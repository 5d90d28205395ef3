"""All ranks succeed or all ranks raise.

Files are written by one rank while the others wait, and read by every rank on its own. An error on one rank
alone would leave the others waiting in their next collective until it times out. So every step that can fail
on some ranks only ends with an exchange of the outcome, and a failure anywhere is an exception everywhere.

In a process without a process group these functions just call their argument.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from colossalai.cluster import PlainCodec, gather_bytes

T = TypeVar("T")
_KINDS = {"OSError": OSError, "ValueError": ValueError, "RuntimeError": RuntimeError}
_PLAIN = PlainCodec()
Failure = tuple[str, str]


def global_rank() -> int:
    """Return the rank in the default process group, 0 without one."""
    return dist.get_rank() if _is_distributed() else 0


def num_ranks() -> int:
    """Return the size of the default process group, 1 without one."""
    return dist.get_world_size() if _is_distributed() else 1


def is_writer() -> bool:
    """Return whether this rank is the one that writes: global rank 0."""
    return global_rank() == 0


class Agreement:
    """All ranks succeed or all ranks raise; every method is called by all of them, in the same order.

    Args:
        exchange: Takes this rank's bytes and returns those of all ranks.
        rank: Tells the rank of this process.
    """

    def __init__(self, exchange: Callable[[bytes], list[bytes]], rank: Callable[[], int]) -> None:
        self._exchange = exchange
        self._rank = rank

    @property
    def rank(self) -> int:
        """The rank of this process among those that agree; 0 is the writer."""
        return self._rank()

    def on_writer(self, action: Callable[[], T]) -> T | None:
        """Run `action` on the writer while the others wait.

        Returns:
            What `action` returned on the writer, None on the other ranks.

        Raises:
            Exception: What `action` raised on the writer; on the others an error of the same kind with its
                message.
        """
        return self.on_every_rank(lambda: action() if self.rank == 0 else None)

    def on_every_rank(self, action: Callable[[], T]) -> T:
        """Run `action`, which takes no part in collectives, on every rank.

        Returns:
            What `action` returned on this rank.

        Raises:
            Exception: What `action` raised on this rank; where it did not, an error that tells what the first
                rank that failed raised.
        """
        result, error = _attempt(action)
        _raise_first(dict(enumerate(self.gather(_failure(error)))), error)
        return result  # type: ignore[return-value]

    def gather(self, value: T, codec: PlainCodec = _PLAIN) -> list[T]:
        """Return all ranks' plain values, by global rank.

        Args:
            value: This rank's.
            codec: Knows the classes of records in them.
        """
        return [codec.decode(data) for data in self._exchange(codec.encode(value))]


def _over_default_group(data: bytes) -> list[bytes]:
    return gather_bytes(data) if _is_distributed() else [data]


COLLECTIVE = Agreement(_over_default_group, global_rank)
on_writer = COLLECTIVE.on_writer
on_every_rank = COLLECTIVE.on_every_rank
gather = COLLECTIVE.gather


def broadcast_from_writer(value: T) -> T:
    """Return the writer's value on every rank."""
    return gather(value)[0]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # raised again by _raise_first, after the other ranks know
        return None, error


def _failure(error: Exception | None) -> Failure | None:
    """Return what other ranks need to raise the same: the name of a built-in kind of error, and the text."""
    if error is None:
        return None
    name = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    return name, str(error) or repr(error)


def _raise_first(outcomes: dict[int, Failure | None], own: Exception | None) -> None:
    if own is not None:
        raise own
    for rank, failure in outcomes.items():
        if failure is not None:
            name, text = failure
            raise _KINDS[name](f"rank {rank}: {text}")
