"""Debug mode for collectives: their ranks compare operation, shapes and dtypes before one is issued.

[Note: comparison over the store]
A comparison must not hang if the collective would. So it does not use the group, but the store: each rank
writes the properties of its next call there, under the group and a number that counts the collectives of the
group, and waits for those of the others. All read the same values and reach the same result. A rank that is
missing after the time limit is named, with its last collective. Five requests to the store for each
collective make this a mode for finding an error, not for training. For messages see _message_check.

All of `torch.distributed` calls the methods of one class, which are replaced while the mode is on.
Collectives issued by compiled code are not compared: those of the reducer of `DistributedDataParallel`, which
compares its parameters once when it is built, and those of compiled graphs.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossalai._clock import Clock
from colossalai.monitor._calls import (
    AxisOf,
    DisagreementError,
    Properties,
    describe_group,
    difference,
    properties_of,
)
from colossalai.monitor._flight_recorder import replaced
from colossalai.monitor._message_check import MessageCheck, late_error
from colossalai.monitor._store import DeadlineStore

_STORE_S = 10.0  # an answer of the store that takes longer does not come


@dataclass(frozen=True)
class Method:
    """A collective, as a method of a process group.

    Attributes:
        op: Its name in `torch.distributed`.
        argument: The argument that must be alike on all ranks.
        same_shapes: Whether the shapes must be, not only the dtypes.
    """

    op: str
    argument: int | None = 0
    same_shapes: bool = True


METHODS = {
    "allreduce": Method("all_reduce"),
    "allreduce_coalesced": Method("all_reduce_coalesced"),
    "broadcast": Method("broadcast"),
    "reduce": Method("reduce"),
    "allgather": Method("all_gather", 1),
    "allgather_coalesced": Method("all_gather_coalesced", 1),
    "_allgather_base": Method("all_gather_into_tensor", 1),
    "all_gather_single": Method("all_gather_single", 1),
    "all_gather_single_coalesced": Method("all_gather_single_coalesced", 1),
    "reduce_scatter": Method("reduce_scatter"),
    "_reduce_scatter_base": Method("reduce_scatter_tensor"),
    "reduce_scatter_single": Method("reduce_scatter_single"),
    "reduce_scatter_single_coalesced": Method("reduce_scatter_single_coalesced"),
    "alltoall": Method("all_to_all", 1, same_shapes=False),
    "alltoall_base": Method("all_to_all_single", 1, same_shapes=False),
    "all_to_all_single": Method("all_to_all_single", 1, same_shapes=False),
    "gather": Method("gather", 1),
    "scatter": Method("scatter"),
    "barrier": Method("barrier", None),
}
_OPTIONS = (("reduceOp", "reduction"), ("rootRank", "root"))


class CollectiveCheck:
    """Compares every collective and every message of this rank with those of the others.

    Args:
        store: The store of the ranks; a separate connection to it is opened.
        rank: Global rank of this process.
        timeout: Seconds to wait for the other ranks of a collective.
        axis_of: Returns the name of the mesh axis along some ranks.
        clock: The clock of the wait for other ranks.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, timeout: float, axis_of: AxisOf, clock: Clock
    ) -> None:
        self._store = DeadlineStore("debug", store, timeout=_STORE_S, clock=clock)
        self._messages = MessageCheck(self._store, rank=rank, timeout=timeout, axis_of=axis_of)
        self._rank = rank
        self._timeout = timeout
        self._axis_of = axis_of
        self._numbers: Counter[str] = Counter()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Within the block, check every collective and every message that Python code issues; once."""
        makers = {name: partial(self._checked, method) for name, method in METHODS.items()}
        try:
            with replaced(dist.ProcessGroup, makers), self._messages.checking():
                yield
        finally:
            self._store.close()

    def _checked(self, method: Method, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._compare(group, _description(method, args, kwargs))
            return original(group, *args, **kwargs)

        return check_and_issue

    def _compare(self, group: dist.ProcessGroup, own: Properties) -> None:
        """Raise on all ranks of a group if they are not about to do the same.

        Raises:
            DisagreementError: The ranks are about to issue different operations, or some do not come in time.
        """
        ranks = sorted(distributed_c10d._world.pg_group_ranks[group])
        name = group.group_name
        self._numbers[name] += 1
        number = self._numbers[name]
        where = f"#{number} {describe_group(self._axis_of(tuple(ranks)), name)}"
        own["where"] = where
        keys = [f"{name}/{number}/{rank}" for rank in ranks]
        text = json.dumps(own)
        self._store.set(f"{name}/{number}/{self._rank}", text)
        self._store.set(f"now/{self._rank}", text)
        try:
            self._store.wait(keys, self._timeout)
        except dist.DistError:
            late = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check(key)]
            fault, wait = f"ranks {late} have not come to it", f"rank {self._rank} waits at"
            raise late_error(self._store, own, late, fault=fault, seconds=self._timeout, wait=wait) from None
        calls = {rank: json.loads(text) for rank, text in zip(ranks, self._store.texts(keys), strict=True)}
        if number > 1:  # all ranks are here, so all have read the values under the number before
            self._store.delete(f"{name}/{number - 1}/{self._rank}")
        message = difference(where, calls)
        if message:
            raise DisagreementError(message)


def _description(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Properties:
    values = [*args, *kwargs.values()]
    tensors = [] if method.argument is None else values[method.argument]
    properties = properties_of(method.op, tensors, has_shapes=method.same_shapes)
    for option, name in _OPTIONS:
        value = next((getattr(v, option) for v in values if hasattr(v, option)), None)
        if value is not None:
            properties[name] = str(getattr(value, "op", value)).rpartition(".")[2]
    return properties
