"""Coordination of ranks: the rank of this process, and blocks that one rank runs first.

Everything here is read from `torch.distributed` at the moment of the call; nothing is kept.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from colossalai.cluster._plain_values import broadcast_value
from colossalai.monitor import expected_wait

Params = ParamSpec("Params")
Result = TypeVar("Result")

_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class DistCoordinator:
    """Place of a process among the ranks, and turns of ranks.

    Methods with a `process_group` refer to the ranks of that group; without one, to all ranks.

    Example:
        ```python
        coordinator = DistCoordinator()
        with coordinator.priority_execution():
            dataset = download("./data")  # rank 0 fetches it, then the others find it there
        coordinator.print_on_master(f"{len(dataset)} samples")
        ```

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
    """

    def __init__(self) -> None:
        _require_initialized()

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine, as the launcher set it; 0 if none did."""
        for variable in _LOCAL_RANK_VARIABLES:
            if variable in os.environ:
                return int(os.environ[variable])
        return 0

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the first rank."""
        return _group_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the last rank."""
        return _group_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print `msg` on the first rank."""
        if self.is_master(process_group):
            print(msg)  # noqa: T201

    def print_on_node_master(self, msg: str) -> None:
        """Print `msg` on the first rank of every machine."""
        if self.is_node_master():
            print(msg)  # noqa: T201

    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Run the block on one rank first; see the function `priority_execution`."""
        return priority_execution(executor_rank, process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank has come to this line."""
        dist.barrier(group=process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[Params, Result]], Callable[Params, Result | None]]:
        """Return a decorator: the function runs on the first rank, and is skipped with None on the others."""

        def decorate(function: Callable[Params, Result]) -> Callable[Params, Result | None]:
            @functools.wraps(function)
            def call(*args: Params.args, **kwargs: Params.kwargs) -> Result | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return call

        return decorate

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Destroy `process_group`, or all groups without one."""
        dist.destroy_process_group(process_group)


@contextlib.contextmanager
def priority_execution(
    executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Run the block on one rank first, and on the others when it has ended there.

    For work that one rank does for all: a download, a cache. The wait of the others is bounded by the timeout
    of the group, and by the watchdog's, which gives no notice of it before. There is no wait at the end of
    the block.

    Args:
        executor_rank: The rank, within the group, that goes first.
        process_group: The ranks that take part; all without one.

    Raises:
        RuntimeError: The block failed on the executor, which raises its own error: on the waiting ranks; or
            `torch.distributed` is not initialised: on every rank.
        ValueError: The group has no such rank, or this process is not in the group.
    """
    _require_initialized()
    group_rank, group_size = _group_rank(process_group), dist.get_world_size(process_group)
    if not 0 <= executor_rank < group_size:
        raise ValueError(
            f"executor_rank={executor_rank} is not a rank of a group of {group_size}; "
            f"use a number from 0 to {group_size - 1}"
        )
    if group_rank == executor_rank:
        try:
            yield
        except BaseException as error:
            # The others wait for the verdict below: without it they would hang until their timeout.
            _agree_on_failure(f"{type(error).__name__}: {error}", executor_rank, process_group)
            raise
        _agree_on_failure(None, executor_rank, process_group)
    else:
        with expected_wait():  # a download takes minutes; the watchdog's notice would look like an error
            failure = _agree_on_failure(None, executor_rank, process_group)
        if failure is not None:
            raise RuntimeError(f"rank {executor_rank}, which went first, failed in this block: {failure}")
        yield


def _agree_on_failure(
    failure: str | None, executor_rank: int, process_group: dist.ProcessGroup | None
) -> str | None:
    """Return the executor's `failure` on every rank; it is also the barrier."""
    source = executor_rank if process_group is None else dist.get_global_rank(process_group, executor_rank)
    verdict: str | None = broadcast_value(failure, source=source, group=process_group)
    return verdict


def _group_rank(process_group: dist.ProcessGroup | None) -> int:
    group_rank = dist.get_rank(process_group)
    if group_rank < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in process_group; call this on the ranks of the group only"
        )
    return group_rank


def _require_initialized() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialised; before this, call colossalai.launch_from_torch "
            "(or the colossalai.launch* of your launcher)"
        )
