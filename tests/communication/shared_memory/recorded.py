"""What the package's collectives do to shared memory, written down operation by operation.

The collectives and `Slots` run as they are, once for each rank, over a `Recorder` that plays segment and
counters. Only `Counters.set`, a fence and a store, and `Counters.wait_for`, a load that is repeated until it
sees its target and a fence, are written again here. What a rank loads of its own is left out: it sees that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from colossalai.communication.shared_memory import _collectives, _slots
from colossalai.communication.shared_memory._calls import Call
from colossalai.communication.shared_memory._counters import LINE, is_behind
from colossalai.communication.shared_memory._layout import FIRST_ROOM, START, SegmentLayout
from colossalai.communication.shared_memory._slots import _PHASES, REDUCED, Slots

FAR = 1 << 60  # where the segment lies: no address of this process
ARENAS = 1 << 61  # and the arenas, one behind the other
ARENA = 1 << 40
BEFORE = (2**32 - START) // _PHASES - 3  # number of the part before the first one: counters wrap in the third
ROOTED = ("reduce", "reduce in two phases", "broadcast", "gather", "scatter")
LENT = ("lent all_reduce in two phases", "lent reduce_scatter", "lent all_gather")
KINDS = (
    "barrier",
    "all_reduce",
    "all_reduce in two phases",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    *ROOTED,
    *LENT,
)
Calls = Sequence[tuple[str, int]]  # what is called, and the root


class Op(NamedTuple):
    """An operation of a rank on memory."""

    rank: int
    kind: str  # store or load of a line; set of or wait for a counter; fence
    word: int | str  # a line's address, a counter's name, or whose fence it is
    # Of a line: the part that writes it, or has to have; in an arena twice that, and one more for a sum. Of a
    # counter: value or target.
    value: int = 0
    part: int = 0  # at which the rank is

    @property
    def phase(self) -> int:
        """Of the value of a counter."""
        return (self.value - START) % _PHASES

    @property
    def is_of_part_before(self) -> bool:
        """Whether it waits until another rank is done with the part two before."""
        return self.kind == "wait" and is_behind(self.value, START + _PHASES * self.part)


class Recorder:
    """Segment and counters of a rank that runs alone: everybody else has always come already."""

    address = FAR

    def __init__(self, rank: int, layout: SegmentLayout) -> None:
        self.rank, self.layout = rank, layout
        self.ops: list[Op] = []
        self.part = self.read_part = 0
        self.operand = torch.empty(0)  # what this rank lends
        self.has_sums = False  # whether others have written their sums into what they lend
        self._headers: dict[int, bytes] = {}
        self._handed_out: list[tuple[int, torch.Tensor]] = []

    def set(self, index: int, value: int) -> None:
        for start, tensor in self._handed_out:
            if tensor._version:  # a sum was written into it
                self.touch("store", start, tensor.nbytes)
        self._handed_out.clear()
        self.has_sums = (value - START) % _PHASES == REDUCED
        self._record("fence", "writer")
        self._record("set", f"counter {index}", value)

    def wait_for(self, index: int, target: int, look: Callable[[], None]) -> None:
        self._record("wait", f"counter {index}", target)
        self._record("fence", "reader")

    def write(self, start: int, data: bytes) -> None:
        self.touch("store", start, len(data))
        self._headers[start] = data

    def read(self, start: int, length: int) -> bytes:
        self.touch("load", start, length)
        size = self.layout.header(1, 0) - self.layout.header(0, 0)
        own = self.layout.header(self.rank, 0) + (start - self.layout.header(0, 0)) % size
        return self._headers[own][:length]

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(count, dtype=dtype)
        if self._is_own(start):
            self._handed_out.append((start, tensor))
        else:
            self.touch("load", start, tensor.nbytes)
        return tensor

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        if source >= ARENAS:
            self.touch_lent("load", source, num_bytes)
        else:
            kind, at = ("store", target) if target >= FAR else ("load", source)
            self.touch(kind, at - FAR, num_bytes)
        self.note_sum(target, num_bytes)

    def touch(self, kind: str, start: int, num_bytes: int) -> None:
        assert start % LINE == 0
        if kind == "store" or not self._is_own(start):
            for line in range(start, start + num_bytes, LINE):
                self._record(kind, line, self.part if kind == "store" else self.read_part)

    # The arenas: what the package asks its own, and what it does in it and in those of the others.

    def lend(self, operand: torch.Tensor) -> None:
        """The program writes into what it is going to lend in the next part."""
        self.operand, self.has_sums = operand, False
        for line in range(0, operand.nbytes, LINE):
            self._record("store", ARENAS + self.rank * ARENA + LINE + line, 2 * (self.part + 1))

    def place(self, address: int, num_bytes: int) -> int:
        return LINE + address - self.operand.data_ptr() if self._is_in_operand(address) else 0

    def note_sum(self, address: int, num_bytes: int) -> None:
        """Note what is written into the operand that is lent: a sum."""
        if self._is_in_operand(address):
            at = ARENAS + self.rank * ARENA + self.place(address, num_bytes)
            for line in range(at, at + num_bytes, LINE):
                self._record("store", line, 2 * self.part + 1)

    def touch_lent(self, kind: str, start: int, num_bytes: int) -> None:
        for line in range(start, start + num_bytes, LINE):
            self._record(kind, line, 2 * self.part + self.has_sums)

    def _is_in_operand(self, address: int) -> bool:
        return 0 <= address - self.operand.data_ptr() < self.operand.nbytes

    def _is_own(self, start: int) -> bool:
        base = self.layout.slot(0) if start >= self.layout.slot(0) else self.layout.header(0, 0)
        size = self.layout.slot(1) - base if start >= self.layout.slot(0) else self.layout.header(1, 0) - base
        return (start - base) // size == self.rank

    def _record(self, kind: str, word: int | str, value: int = 0) -> None:
        self.ops.append(Op(self.rank, kind, word, value, self.part))


class RecordedArena:
    """The arena of another rank, for one that reads there.

    Args:
        recorder: Of the rank that reads.
        rank: The other one.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.recorder = recorder
        self.address = ARENAS + rank * ARENA

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.recorder.touch_lent("load", self.address + start, count * dtype.itemsize)
        return torch.zeros(count, dtype=dtype)


class RecordedSlots(Slots):
    """Slots of which the recorder knows in which part they are, and which one they read."""

    def __init__(self, recorder: Any, before: int) -> None:
        self.recorder = recorder
        layout, rank = recorder.layout, recorder.rank
        watch = mock.Mock()
        others = (other for other in range(layout.num_ranks) if other != rank)
        super().__init__(
            recorder,
            layout,
            rank,
            counters=recorder,
            watch=watch,
            timeout=1.0,
            budget=lambda: 0,
            own=recorder,
            arenas={other: RecordedArena(recorder, other) for other in others},
        )
        self._part = before

    @property
    def _part(self) -> int:
        return self.recorder.part

    @_part.setter
    def _part(self, part: int) -> None:
        self.recorder.part = self.recorder.read_part = part

    def _compare(self, ranks: Sequence[int], part: int, header: bytes) -> None:
        self.recorder.read_part = part
        super()._compare(ranks, part, header)
        self.recorder.read_part = self._part


def record(num_ranks: int, calls: Calls, before: int = BEFORE) -> list[list[Op]]:
    """Return the operations of each rank in some calls of the package; `before`: parts that were."""
    programs = []
    for rank in range(num_ranks):
        recorder = Recorder(rank, SegmentLayout(num_ranks))
        slots = RecordedSlots(recorder, before)

        def combine(
            target: torch.Tensor,
            *terms: Any,
            recorder: Recorder = recorder,
            combine: Callable[..., None] = _collectives.combine,
        ) -> None:
            combine(target, *terms)
            recorder.note_sum(target.data_ptr(), target.nbytes)

        with (
            mock.patch.object(_slots, "copy_bytes", recorder.copy),
            mock.patch.object(_slots, "LEAST_BYTES", 0),
            mock.patch.object(_collectives, "combine", combine),
        ):
            for number, (kind, root) in enumerate(calls):
                _make_call(slots, number, kind, root)
        programs.append(recorder.ops)
    return programs


def _make_call(slots: RecordedSlots, number: int, kind: str, root: int) -> None:
    ranks = range(slots.num_ranks)
    size = LINE * (2 if slots.num_ranks == 2 else 1)  # of a message
    name, _, is_long = kind.removeprefix("lent ").partition(" in ")
    memory = torch.zeros(2, slots.num_ranks, size // 4)
    if kind in LENT:
        slots.recorder.lend(memory[0, slots.rank] if name == "all_gather" else memory[0])
    else:
        slots.recorder.operand = torch.empty(0)
    source, target = memory[0].data_ptr(), memory[1].data_ptr()
    targets = [target + rank * size for rank in ranks]
    sources = [source + rank * size for rank in ranks]
    call = Call(number, name, reduction="SUM", root=root if kind in ROOTED else -1)
    with mock.patch.object(_collectives, "_SMALL", -1 if is_long else FIRST_ROOM):
        if name == "barrier":
            _collectives.barrier(slots, call)
        elif name in ("all_reduce", "reduce"):
            getattr(_collectives, name)(slots, call, memory[0].flatten() if is_long else memory[0, 0])
        elif name == "reduce_scatter":
            _collectives.reduce_scatter(slots, call, memory[1, 0], memory[0].flatten())
        elif name == "all_to_all":
            pairs = [[(at, size) for at in places] for places in (targets, sources)]
            _collectives.all_to_all(slots, call, *pairs)
        elif name == "broadcast":
            _collectives.broadcast(slots, call, source, size)
        elif name == "scatter":
            _collectives.scatter(slots, call, target, sources, size)
        else:  # all_gather, gather
            own = source + slots.rank * size if kind in LENT else source
            getattr(_collectives, name)(slots, call, targets, own, size)
