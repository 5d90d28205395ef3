"""Positions: checks that all ranks of an axis gather chunks in the same order.

A gather is a collective issued when a module uses a parameter. A rank that runs an additional forward, or
uses modules in another order, would wait forever, or, since chunks have one size, receive the values of
another chunk.

[Note: stamps of gathers]
Each gather has a *stamp*: the number of its chunk among those of all models along the axis, the number of
writes of its sections, and the number of gathers of the model. Messages carry it as their tag, so only
messages of one stamp match, and never those of gradients. Collectives through shared memory carry it in the
header that ranks compare anyway. NCCL has no tags: there one byte over the group's other library carries it,
in addition to the data. On CPU the stamp sends nothing.

A tag has 30 bits, so the counts wrap around. Ranks whose gathers matched so far have issued equally many of
them, and differ little in the number of writes since.

So ranks that differ wait, or raise at once if they share memory. A gather is a `meeting` for the watchdog,
with a patience: `deadlock` in `monitor` reports the position of each rank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from colossalai.context import Axis
from colossalai.monitor import STAMPED_TAGS, meeting
from colossalai.zero._exchange import start_gather
from colossalai.zero.gemini._chunk import Chunk

PATIENCE_S = 10.0
ADVICE = (
    "Every rank runs the same forwards and backwards in the same order; where ranks rightly differ, gather "
    "the module whole: whole_modules=[...] names it; a rank that evaluates more often than others does so "
    "inside `with model.gathered():`"
)
_GATHERS, _WRITES, _CHUNKS = 1 << 6, 1 << 10, 1 << 14  # until a stamp comes again; together 30 bits


@dataclass
class _Line:
    """The gathers of a model along one axis.

    Attributes:
        channel: Its name, the same on all ranks of the axis.
        number: Number of gathers so far.
    """

    channel: str
    number: int = 0


class GatherPositions:
    """The position of this rank in the order of gathers of a model; constructed in one order on all ranks.

    Args:
        chunks: The chunks of the model.
        patience: Seconds before a waiting gather requests the positions of all ranks.
    """

    def __init__(self, chunks: Sequence[Chunk], *, patience: float = PATIENCE_S) -> None:
        self._patience = patience
        self._lines: dict[Axis, _Line] = {}
        self._named: dict[Chunk, tuple[int, str]] = {}  # number along the axis, and name
        self._num_writes: Counter[Chunk] = Counter()
        along: dict[Axis, list[Chunk]] = {}
        for chunk in chunks:
            if chunk.is_cut:
                along.setdefault(chunk.layout.axis, []).append(chunk)
        for axis, cut in along.items():
            ranks = "-".join(map(str, axis.ranks))
            model, first = _take_numbers(f"colossalai/gathers/{ranks}/{dist.get_rank()}", len(cut))
            self._lines[axis] = _Line(f"gathers/{ranks}/{model}")
            for number, chunk in enumerate(cut, first):
                self._named[chunk] = number, f"{_name(chunk)}{f' of model {model}' if model > 1 else ''}"

    def note_written(self, chunk: Chunk) -> None:
        """Count a write of all ranks into their sections of a chunk."""
        self._num_writes[chunk] += 1

    def start(self, whole: torch.Tensor, chunk: Chunk) -> Callable[[], None]:
        """Start to gather a chunk, in the order of all ranks; return a function that waits. Collective.

        Args:
            whole: For all values; this rank's section is in place.
            chunk: A sharded chunk.
        """
        axis = chunk.layout.axis
        line = self._lines[axis]
        line.number += 1
        place, name = self._named[chunk]
        writes = self._num_writes[chunk]
        if writes:
            name += f" after update {writes}"
        item = meeting(
            name,
            channel=line.channel,
            number=line.number,
            partners=axis.ranks,
            op="gather",
            patience=self._patience,
            advice=ADVICE,
        )
        # See [Note: stamps of gathers].
        number = (line.number % _GATHERS * _WRITES + writes % _WRITES) * _CHUNKS + place % _CHUNKS
        with _at(item):
            # Each rank of the axis sends its section to all others; only equal stamps match.
            wait = start_gather(whole, chunk.layout, stamp=STAMPED_TAGS + number)

        def end() -> None:
            with _at(item):
                wait()  # for the sections of all ranks, which are at the same gather

        return end


@contextmanager
def _at(item: meeting) -> Iterator[None]:
    """Enter a meeting; an error inside of it gets its description as a note."""
    try:
        with item:
            yield
    except RuntimeError as error:
        if ADVICE not in str(error):
            error.add_note(f"This rank was in {item.describe()}. {ADVICE}")
        raise


def _take_numbers(key: str, count: int) -> tuple[int, int]:
    """Return the number of this model along an axis of the job, and the first number of its chunks.

    Each rank counts them in the job's store, as no other state of a process ends with the job.
    """
    store = _get_default_store()
    return int(store.add(f"{key}/models", 1)), int(store.add(f"{key}/chunks", count)) - count


def _name(chunk: Chunk) -> str:
    """Return a chunk's name for messages: "chunk 3 (blocks.1.up.weight to blocks.2.scale)"."""
    names = chunk.names
    within = ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
    return f"chunk {chunk.number} ({within})"
