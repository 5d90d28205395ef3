"""Last calls of a rank: collectives, which its neighbors read when it has died, and sends, receives, waits.

Both records wrap the methods of torch's `ProcessGroup` and `Work` during their lifetime.

[Note: signatures of dead ranks]
Ranks that pass different shapes to one collective do not hang with gloo: it aborts an innocent rank, which
receives more data than it expects, and the others fail with a lost connection. The calls of the dead rank are
available only if they were recorded outside of it before. So each rank records every call in a memory file,
which the ranks of the same machine hold open.

A record is sixteen bytes: the number of the call and the offset of its text. The text is written once for
each combination of operation, shapes and types; the debug mode compares the same, and more ([Note: comparison
over the store] in `_collective_check.py`). Collectives that compiled code issues (the reducer of
`DistributedDataParallel`) are not recorded on any rank.
"""

import itertools
import json
import mmap
import os
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossalai.monitor._calls import (
    AxisOf,
    CallRecord,
    Properties,
    describe_group,
    difference,
    dtype_name,
    minority,
    shapes_and_dtypes,
)
from colossalai.monitor._collective_check import METHODS, Method
from colossalai.monitor._flight_recorder import STAMPED_TAGS, replaced

_ENTRY = struct.Struct("<QII")  # number of the call in its group, text of the group, text of the signature
_NUM_ENTRIES = 16
_TEXTS = _ENTRY.size * _NUM_ENTRIES  # offset of the texts, a line each
_SIZE = 1 << 16  # when it is full, it begins anew
_LONGEST_TEXT = 1 << 13
_NUM_MESSAGES = 64
_shape_and_dtype = attrgetter("shape", "dtype")


class SignatureRecord:
    """The file of this rank; neighbors read it by its descriptor, -1 where there is none."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._texts: dict[Any, int] = {}
        self._end = _TEXTS
        self._numbers: dict[str, int] = {}
        self._offsets = itertools.cycle(range(0, _TEXTS, _ENTRY.size))  # offset of the next one
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("colossalai-signatures")
            os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, note every collective that Python code issues; once."""
        makers = {name: partial(self._recorded, method) for name, method in METHODS.items()}
        with replaced(dist.ProcessGroup, makers):
            yield

    def close(self) -> None:
        """Let go of the file; neighbors may hold it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def read(self) -> list[CallRecord]:
        """Return the last calls of this rank."""
        return _signatures(self._memory[:])

    def _recorded(self, method: Method, original: Callable[..., Any]) -> Callable[..., Any]:
        # Every collective passes here: no look-up that can be done before.
        op, argument, has_shapes = method.op, method.argument, method.same_shapes
        numbers, texts, notes, memory, pack = (
            self._numbers,
            self._texts,
            self._offsets,
            self._memory,
            _ENTRY.pack_into,
        )

        def record_and_issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            name = group.group_name
            number = numbers[name] = numbers.get(name, 0) + 1
            signature: tuple[Any, ...] = (op,)
            if argument is not None:
                value = args[argument] if argument < len(args) else [*args, *kwargs.values()][argument]
                count, first = (len(value), value[0]) if type(value) is list and value else (1, value)
                if type(first) is torch.Tensor:
                    signature = (op, count, first.dtype, first.shape if has_shapes else None)
            text, group_text = texts.get(signature), texts.get(name)
            if text is None or group_text is None:
                group_text, text = self._write_texts(group, name, signature)
            pack(memory, next(notes), number, group_text, text)
            try:
                return original(group, *args, **kwargs)
            except BaseException:
                numbers[name] = number - 1  # it was not issued, and the next one has its number
                raise

        return record_and_issue

    def _write_texts(
        self, group: dist.ProcessGroup, name: str, signature: tuple[Any, ...]
    ) -> tuple[int, int]:
        texts = self._texts
        if self._end > _SIZE - 2 * _LONGEST_TEXT:
            self._begin_anew()
        if name not in texts:
            ranks = sorted(distributed_c10d._world.pg_group_ranks[group])
            self._write(name, {"channel": name, "partners": ranks})
        if signature not in texts:
            self._write(signature, _fields(*signature))
        return texts[name], texts[signature]

    def _begin_anew(self) -> None:
        self._memory[:_TEXTS] = bytes(_TEXTS)  # readers must not find other texts behind the records
        self._texts.clear()
        self._end = _TEXTS

    def _write(self, key: Any, content: dict[str, Any]) -> None:
        """Write a text, and keep its offset; a text longer than readers accept is not stored."""
        line = json.dumps(content).encode() + b"\n"
        if len(line) > _LONGEST_TEXT:
            self._texts[key] = 0
            return
        self._memory[self._end : self._end + len(line)] = line
        self._texts[key] = self._end
        self._end += len(line)


@dataclass(frozen=True)
class _Route:
    """The messages of one direction between this rank and another one of a group.

    Attributes:
        message: Any of them; its channel is the one in which the other rank counts them.
        counted: The channel in which this rank counts them; see [Note: channels] in `_calls.py`.
    """

    message: CallRecord
    counted: str


@dataclass(frozen=True)
class _RecordedMessage:
    route: _Route
    number: int
    tensors: list[tuple[torch.Size, torch.dtype]]
    work: Callable[[], Any]  # a weak reference: the record must not keep the memory of a message


class MessageRecord:
    """The last sends and receives of this rank, how many there were, and those that a thread waits for.

    Only these are waits: a message counts as complete for gloo when it has been waited for, and a send that
    no thread waits for can stay pending for ever.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._awaited: dict[int, tuple[int, float]] = {}  # operation: thread, since when
        self._last: deque[_RecordedMessage] = deque(maxlen=_NUM_MESSAGES)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, note every send and receive, and every wait."""
        makers = {op: partial(self._recorded, op) for op in ("send", "recv")}
        with replaced(dist.ProcessGroup, makers), replaced(dist.Work, {"wait": self._recorded_wait}):
            yield

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait for the work of a message or of a collective."""
        return {thread for thread, _ in list(self._awaited.values())}

    def messages(self) -> list[CallRecord]:
        """Return those that a thread waits for, oldest first."""
        now = time.monotonic()
        found = []
        for recorded in list(self._last):
            thread, start = self._awaited.get(id(recorded.work()), (0, now))
            if thread:
                tensors = shapes_and_dtypes(recorded.tensors)
                message = replace(
                    recorded.route.message,
                    number=recorded.number,
                    **tensors,
                    seconds=now - start,
                    thread=thread,
                )
                found.append(message)
        return found

    def _recorded_wait(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            key = id(work)
            self._awaited[key] = (threading.get_ident(), time.monotonic())
            try:
                return original(work, *args, **kwargs)
            finally:
                self._awaited.pop(key, None)

        return wait

    def _recorded(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        counts, last = self.counts, self._last
        routes: dict[tuple[str, int], _Route] = {}

        def note(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            work = original(group, tensors, peer, tag)
            if work is not None and tag < STAMPED_TAGS:
                name = group.group_name
                route = routes.get((name, peer))
                if route is None:
                    route = routes[name, peer] = _route(op, group, peer)
                counts[route.counted] += 1
                shapes = list(map(_shape_and_dtype, tensors))
                last.append(_RecordedMessage(route, counts[route.counted], shapes, weakref.ref(work)))
            return work

        return note


def _route(op: str, group: dist.ProcessGroup, peer: int) -> _Route:
    name, own, other = group.group_name, *(dist.get_global_rank(group, r) for r in (group.rank(), peer))
    opposite, ends = ("recv", f"{own}>{other}") if op == "send" else ("send", f"{other}>{own}")
    message = CallRecord(op=op, group=name, channel=f"{name}/{opposite}/{ends}", number=0, partners=(other,))
    return _Route(message, f"{name}/{op}/{ends}")


class NeighborSignatures:
    """The files of the other ranks of this machine, held open: they outlive the processes."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def open(self, rank: int, *, pid: int, descriptor: int) -> None:
        """Hold the file of a rank, if this process may."""
        # See [Note: signatures of dead ranks].
        if descriptor >= 0 and rank not in self._files:
            with suppress(OSError):
                self._files[rank] = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)

    def read(self) -> dict[int, list[CallRecord]]:
        """Return the last calls of the ranks."""
        return {rank: _signatures(os.pread(file, _SIZE, 0)) for rank, file in self._files.items()}

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def disagreements(
    signatures: dict[int, list[CallRecord]], axis_of: AxisOf
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Find in every group the first collective in whose properties the ranks differ.

    Args:
        signatures: By rank, its last collectives.
        axis_of: Returns the name of the mesh axis along some ranks.

    Yields:
        The ranks in the minority, or all of them where none is, and the properties that differ.
    """
    calls: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Properties]]] = {}
    for rank, items in sorted(signatures.items()):
        for item in items:
            numbers = calls.setdefault((item.channel, item.partners), {})
            numbers.setdefault(item.number, {})[rank] = item.properties()
    for (group, ranks), numbers in calls.items():
        where = describe_group(axis_of(ranks), group)
        for number, properties in sorted(numbers.items()):
            if line := difference(f"#{number} {where}", properties).partition("\n")[0]:
                yield minority({rank: json.dumps(each) for rank, each in properties.items()}), line
                break


def _fields(
    op: str, count: int = 1, dtype: torch.dtype | None = None, shape: torch.Size | None = None
) -> dict[str, Any]:
    """Return the fields of a `CallRecord` that describe a call by the first of its tensors."""
    return {
        "op": op,
        "num_tensors": count,
        "dtypes": [] if dtype is None else [dtype_name(dtype)],
        "shapes": [] if shape is None else [list(shape)],
    }


def _signatures(data: bytes) -> list[CallRecord]:
    """Read a file; a note that its rank was writing when it died is left out."""
    found = []
    for index in range(min(_NUM_ENTRIES, len(data) // _ENTRY.size)):
        number, *places = _ENTRY.unpack_from(data, index * _ENTRY.size)
        if not number or not all(places):
            continue
        with suppress(ValueError, KeyError, TypeError):
            group, fields = (json.loads(data[place : data.index(b"\n", place)]) for place in places)
            found.append(CallRecord.from_plain({**group, **fields, "number": number}))
    return found
