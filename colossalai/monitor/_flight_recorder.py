"""Flight recorder: the collectives issued by this rank, as recorded by torch or by a group in Python.

torch's flight recorder records each collective where it is issued, in compiled code, for every caller: our
layers, DDP, FSDP, a user's script. It does not cover groups in Python, which keep records of their own. Gloo
records collectives, but not sends and receives: see `MessageRecord` in `_last_calls.py`.
"""

import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d

from colossalai.monitor._calls import AxisOf, CallRecord, describe_group, shapes_and_dtypes
from colossalai.monitor._sections import meetings

_NUM_COLLECTIVES = 500  # torch keeps 2000 of them: to write those down takes seconds
_NUM_OF_A_GROUP = 64
_SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
STAMPED_TAGS = 1 << 30
"""Smallest tag of messages that belong to a meeting and are identified by their tag alone."""
_native: Any = torch._C._distributed_c10d


@dataclass(slots=True)
class RecordedCall:
    """A collective of a group in Python, recorded by the thread that issues it.

    Attributes:
        op: Its name in `torch.distributed`.
        number: Number of the group's collectives, this one included.
        tensors: Shapes and dtypes of its tensors.
        since: Seconds since the epoch, when it was issued.
        thread: The thread that issued it.
        is_over: Whether it has ended.
    """

    op: str
    number: int
    tensors: list[tuple[torch.Size, torch.dtype]]
    since: float
    thread: int
    is_over: bool = False


class CallLog:
    """The collectives of one process group in Python, which the group itself writes down.

    Args:
        group: The name that torch gives it.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._num_begun = self._num_ended = 0
        self._last: deque[RecordedCall] = deque(maxlen=_NUM_OF_A_GROUP)
        records.open.add(self)

    def where(self, ranks: Sequence[int]) -> str:
        """Name the group, by the mesh axis along its ranks where there is one: "of axis dp"."""
        axis = records.axis_of(tuple(ranks)) if records.axis_of is not None else None
        return describe_group(axis, self.group)

    def begin(self, op: str, tensors: Sequence[torch.Tensor]) -> RecordedCall:
        """Note a collective that is issued."""
        self._num_begun += 1
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        call = RecordedCall(op, self._num_begun, shapes, time.time(), threading.get_ident())
        self._last.append(call)
        return call

    def end(self, call: RecordedCall) -> None:
        """Note that one has ended, well or not."""
        call.is_over = True
        self._num_ended = max(self._num_ended, call.number)

    def progress(self) -> tuple[int, int]:
        """Return the numbers of the last issued and of the last completed collective."""
        return self._num_begun, self._num_ended

    def calls(self, members: tuple[int, ...], since: float) -> list[CallRecord]:
        """Return those on record, oldest first."""
        return [
            CallRecord(
                op=call.op,
                group=self.group,
                channel=self.group,
                number=call.number,
                partners=members,
                **shapes_and_dtypes(call.tensors),
                is_pending=not call.is_over,
                seconds=max(0.0, time.time() - call.since),
                thread=call.thread,
            )
            for call in list(self._last)
            if call.since >= since
        ]


class CallLogs:
    """The logs of all groups in Python of this process.

    Attributes:
        open: Those of the groups that exist.
        axis_of: The names of the mesh axes; None outside of a job.
    """

    def __init__(self) -> None:
        self.open: weakref.WeakSet[CallLog] = weakref.WeakSet()
        self.axis_of: AxisOf | None = None

    @contextmanager
    def naming(self, axis_of: AxisOf) -> Iterator[None]:
        """Within the block, groups are named by the axes of a job."""
        self.axis_of = axis_of
        try:
            yield
        finally:
            self.axis_of = None


records = CallLogs()


def prepare_recorder() -> None:
    """Set a short buffer for the flight recorder, unless the user has set its size."""
    if _SIZE_VARIABLE in os.environ or not _dumps():
        return
    os.environ[_SIZE_VARIABLE] = str(_NUM_COLLECTIVES)
    try:
        progress()  # the recorder reads the variable at its first use
    finally:
        del os.environ[_SIZE_VARIABLE]


def progress() -> dict[str, tuple[int, int]]:
    """Return for every group, by an internal name, the last collective issued and the last one complete."""
    found = {}
    for index, dump in enumerate(_dumps()):
        for group, status in pickle.loads(dump(False, False, False)).get("pg_status", {}).items():
            enqueued, completed = (
                int(status["last_enqueued_collective"]),
                int(status["last_completed_collective"]),
            )
            found[f"{index}/{group}"] = (enqueued, completed)
    return {**found, **{log.group: log.progress() for log in list(records.open)}}


def collectives(*, since: float) -> list[CallRecord]:
    """Return the collectives on record, oldest first.

    Args:
        since: Seconds since the epoch; older ones are of an earlier job in this process.
    """
    members = group_members()
    found = []
    for dump in _dumps():
        for entry in pickle.loads(dump(True, False, False)).get("entries", []):
            group = entry["process_group"][0]
            if entry["is_p2p"] or group not in members or entry["time_created_ns"] < since * 1e9:
                continue
            found.append(_collective(entry, members[group]))
    for log in list(records.open):
        if log.group in members:
            found += log.calls(members[log.group], since)
    return sorted(found, key=lambda item: -item.seconds)


def group_members() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of every process group of this rank, by its name."""
    world = distributed_c10d._world
    return {
        name: tuple(sorted(world.pg_group_ranks.get(group, {}), key=world.pg_group_ranks[group].__getitem__))
        for group, name in list(world.pg_names.items())
        if group in world.pg_group_ranks
    }


def awaited_meetings() -> list[CallRecord]:
    """Return the meetings that this rank waits in."""
    return [
        CallRecord(
            op=item.op,
            group=item.channel,
            channel=item.channel,
            number=item.number,
            partners=item.partners,
            seconds=time.monotonic() - item.start,
            thread=thread,
            where=f"of {item.name}",
            patience=item.patience,
            advice=item.advice,
            after_backwards=item.after_backwards,
        )
        for thread, item in meetings().items()
    ]


def _dumps() -> list[Callable[[bool, bool, bool], bytes]]:
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    return [getattr(_native, name) for name in names if hasattr(_native, name)]


def _collective(entry: dict[str, Any], members: tuple[int, ...]) -> CallRecord:
    group = entry["process_group"][0]
    return CallRecord(
        op=entry["profiling_name"].rpartition(":")[2],
        group=group,
        channel=group,
        number=entry["collective_seq_id"],
        partners=members,
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtypes=tuple(dtype.lower() for dtype in entry["input_dtypes"]),
        is_pending=not entry["retired"] and entry["state"] != "completed",
        seconds=max(0.0, time.time() - entry["time_created_ns"] / 1e9),
        thread=int(entry["thread_id"]),
    )


@contextmanager
def replaced(
    kind: type, makers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
) -> Iterator[None]:
    """Within the block, some methods of a compiled class, and of classes in Python under it, are others.

    The entries of the class's `__dict__` are restored afterwards: a compiled method read as an attribute of
    the class is a function that would get no `self`.

    Args:
        kind: The class.
        makers: By name of a method, a function that returns its replacement. A class need not have all of
            them.
    """
    kept = [(each, name, vars(each)[name]) for each in _family(kind) for name in makers if name in vars(each)]
    for each, name, _ in kept:
        setattr(each, name, makers[name](getattr(each, name)))
    try:
        yield
    finally:
        for each, name, method in kept:
            setattr(each, name, method)


def _family(kind: type) -> Iterator[type]:
    """Yield a class and those of ours under it."""
    yield kind
    each: type
    for each in kind.__subclasses__():
        if each.__module__.partition(".")[0] == __name__.partition(".")[0]:
            yield from _family(each)
