"""Chunks: flat tensors of consecutive parameters, each sharded over the ranks that share them.

[Note: life of a chunk]
A rank always has its section of a chunk. The whole is gathered before a function uses one of its parameters
(`hold`), and is pinned during the use (`num_uses`). It is freed when room is needed, when all gradients of a
backward are complete, and after a step, as its values are out of date then; never while it is pinned.
`ChunkState` follows from the presence of the whole and the number of uses, and is not stored:

| state | the whole | legal moves |
| --- | --- | --- |
| FREE | is not present | it is gathered: HOLD |
| HOLD | is present, no function uses it | a use: COMPUTE; it is freed: FREE |
| COMPUTE | a function uses it | another use; the end of the last one: HOLD |

The tier of a chunk's section (device, host or disk) is independent of it, see `_tiers.py`.
"""

import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, cast

import torch
from torch import nn

from colossalai.context import Axis
from colossalai.nn.parallel import ArrivingParams, broadcast_from_first
from colossalai.tensor import PIPELINE_SHARE, GradientSync, gradient_sync
from colossalai.zero._layout import FlatBucket
from colossalai.zero.gemini._packing import ChunkLayout
from colossalai.zero.gemini._search import ChunkSizes, log_search, search_groups
from colossalai.zero.gemini._tiers import TierMemory
from colossalai.zero.gemini.planning import Home


class ChunkState(Enum):
    """State of the gathered whole of a chunk; see [Note: life of a chunk]."""

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"


class Chunk:
    """A chunk on one rank; see [Note: life of a chunk].

    Args:
        number: Its place in the order of initialization.
        layout: Offsets of its parameters, and bounds of the section of each rank.
        names: The names of its parameters.
        section: This rank's part of the values, flat, on the compute device.
        master: That in float32, if its parameters have masters.
        tiers: The memory tiers of this rank.

    Attributes:
        number: As given.
        layout: As given.
        names: As given.
        section: As given, in its current tier.
        master: As given, until optimizers have taken it.
        device: The compute device.
        tiers: As given.
        home: The tier of the section.
        states_home: The tier of its mean gradients, master weights and optimizer states.
        whole: All values while they are present.
        num_uses: Number of functions, and blocks that gather it, that need it now.
        num_writes: Number of writes other than those of optimizers; its section has the values.
        version: Version of `whole` when it last matched the sections.
        views: Views of `whole` in the shapes of parameters, by their number, as they are requested.
    """

    def __init__(
        self,
        number: int,
        layout: FlatBucket,
        *,
        names: tuple[str, ...],
        section: torch.Tensor,
        master: torch.Tensor | None = None,
        tiers: TierMemory,
    ) -> None:
        self.number = number
        self.layout = layout
        self.section = section
        self.master = master
        self._untaken = set(range(len(layout.params)) if master is not None else ())  # of the master
        self.device = section.device
        self.tiers = tiers
        self._has_one_tier = len(tiers.bounds) == 1
        self.home = self.states_home = Home.COMPUTE
        self.whole: torch.Tensor | None = None
        self.num_uses = self.num_writes = 0
        self.names = names
        self._mean_on_disk: torch.Tensor | None = None
        self.version = 0
        self.views: dict[int, torch.Tensor] = {}

    @property
    def state(self) -> ChunkState:
        """State of the whole."""
        if self.whole is None:
            return ChunkState.FREE
        return ChunkState.COMPUTE if self.num_uses > 0 else ChunkState.HOLD

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return self.layout.numel * self.section.element_size()

    @property
    def is_cut(self) -> bool:
        """Whether there are other ranks with other sections."""
        return self.layout.axis.size > 1

    @property
    def is_apart(self) -> bool:
        """Whether the whole has memory of its own: one rank has nothing to gather in its first tier."""
        return self.is_cut or self.home is not Home.COMPUTE

    def place(self, home: Home, states_home: Home) -> None:
        """Move the section to a tier, and set the tier of the states.

        Raises:
            OSError: The disk has no room for it.
        """
        assert self.whole is None, f"chunk {self.number} is present, so its section cannot move"
        self.section = self.tiers.keep(self.section, home)
        if self.master is not None:
            self.master = self.tiers.keep(self.master, states_home)
        self.home, self.states_home = home, states_home

    def write_section(self) -> None:
        """Copy writes into the whole to the section, on the one rank that has all of it."""
        assert self.whole is not None, f"chunk {self.number} is not present"
        self.section.copy_(self.whole)
        self.tiers.give_back([self.section])
        self.take_write()

    def keep_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """Return a mean gradient of the section in the tier of the states; on disk in the same place."""
        if self._has_one_tier:
            return mean
        if self.states_home is not Home.DISK:
            return self.tiers.keep(mean, self.states_home)
        if self._mean_on_disk is None or self._mean_on_disk.dtype != mean.dtype:
            self._mean_on_disk = self.tiers.keep(mean, Home.DISK)
        elif mean is not self._mean_on_disk:
            self._mean_on_disk.copy_(mean)
        self.tiers.give_back([self._mean_on_disk])
        return self._mean_on_disk

    def fragment(self, index: int) -> torch.Tensor:
        """Return this rank's part of the values of a parameter, flat, in its current tier."""
        begin, end = self.layout.place(index, self.layout.axis.rank)
        return self.section[begin:end]

    def take_master(self, index: int) -> torch.Tensor | None:
        """Transfer this rank's part of the master of a parameter to the caller, flat. None: no master."""
        if self.master is None:
            return None
        begin, end = self.layout.place(index, self.layout.axis.rank)
        master = self.master[begin:end]
        self._untaken.remove(index)
        if not self._untaken:
            self.master = None
        return master

    def hold(self, whole: torch.Tensor) -> None:
        """Take the gathered values."""
        assert self.state is ChunkState.FREE, f"{self}, and cannot be gathered"
        self.whole = whole
        self.version = whole._version

    def free(self) -> None:
        """Free the whole; its memory is returned with the last reference."""
        assert self.state is ChunkState.HOLD, f"{self}, and cannot be freed"
        self.whole = None
        self.views.clear()

    def __str__(self) -> str:
        return f"chunk {self.number} ({', '.join(self.names)}) is {self.state.value}"

    @property
    def is_written(self) -> bool:
        """Whether the whole was written since it was gathered or since the last `take_write`."""
        return self.whole is not None and self.whole._version != self.version

    def take_write(self) -> bool:
        """Return whether a write is pending, and clear it."""
        was_written = self.is_written
        if self.whole is not None:
            self.version = self.whole._version
        return was_written


class ChunkKind(NamedTuple):
    """Common properties of the parameters of a chunk after `ArrivingParams.bring`."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    sync: GradientSync
    is_trained: bool
    has_master: bool
    part: int  # of the model, whose gradients are complete together; `LATE` after the last backward only


LATE = -1


def lay_out_chunks(
    params: Sequence[nn.Parameter],
    parts: Sequence[nn.Module],
    arriving: ArrivingParams,
    replicas: Axis,
    *,
    sizes: ChunkSizes,
    filters_outliers: bool,
) -> dict[FlatBucket, ChunkKind]:
    """Lay parameters out in chunks, in the order of initialization, and log the result of the search.

    Args:
        params: The parameters; they need no values yet.
        parts: The parts of the model whose gradients are complete together.
        arriving: Their final dtypes and devices.
        replicas: The ranks that see different parts of the batch.
        sizes: The sizes that are tried.
        filters_outliers: Whether parameters that are outliers in size have chunks of their own.
    """
    start = time.perf_counter()
    part_of: dict[nn.Parameter, int] = {}
    for number, part in enumerate(parts):
        for param in part.parameters():
            is_late = param in part_of or getattr(param, PIPELINE_SHARE, None) is not None
            part_of[param] = LATE if is_late else number
    groups = search_groups(
        [param.numel() for param in params],
        [_kind_of(param, arriving, replicas, part_of[param]) for param in params],
        sizes,
        num_ranks_of=lambda kind: cast(ChunkKind, kind).sync.axis.size,
        filters_outliers=filters_outliers,
    )
    num_used = sum(group.packing.num_used for group in groups)
    num_wasted = sum(group.packing.num_wasted for group in groups)
    log_search(time.perf_counter() - start, num_used, num_wasted)
    found = [(chunk, cast(ChunkKind, group.key)) for group in groups for chunk in group.packing.chunks]
    return {
        _bucket_of(chunk, params, kind): kind
        for chunk, kind in sorted(found, key=lambda each: each[0].params[0])
    }


def _bucket_of(chunk: ChunkLayout, params: Sequence[nn.Parameter], kind: ChunkKind) -> FlatBucket:
    """Return a chunk as a bucket that is cut into equal sections."""
    num_ranks = kind.sync.axis.size
    size = chunk.size // num_ranks
    bounds = tuple((size * rank, size * (rank + 1)) for rank in range(num_ranks))
    own = tuple(params[position] for position in chunk.params)
    return FlatBucket(own, chunk.starts, bounds, kind.grad_dtype, True, kind.sync)


def _kind_of(param: nn.Parameter, arriving: ArrivingParams, replicas: Axis, part: int) -> ChunkKind:
    dtype, grad_dtype = arriving.dtype_of(param), getattr(param, "grad_dtype", None)
    return ChunkKind(
        dtype=dtype,
        grad_dtype=dtype if grad_dtype in (None, param.dtype) else grad_dtype,
        sync=gradient_sync(param, replicas),
        is_trained=param.requires_grad,
        has_master=arriving.has_master(param),
        part=part,
    )


def make_chunk(
    number: int,
    layout: FlatBucket,
    names: Mapping[nn.Parameter, str],
    arriving: ArrivingParams,
    replicas: Axis,
    tiers: TierMemory,
) -> Chunk:
    """Materialize the parameters of a chunk, and return it with this rank's section; collective.

    The parameters themselves still have all values on every rank.
    """
    arriving.bring(layout.params)
    broadcast_from_first(layout.params, replicas)  # before the cast, so that masters are equal on all ranks
    masters = arriving.cast(layout.params)
    first = layout.params[0]
    size = layout.section_sizes[layout.axis.rank]
    chunk = Chunk(
        number,
        layout,
        names=tuple(names[param] for param in layout.params),
        section=torch.zeros(size, dtype=first.dtype, device=first.device),
        master=torch.zeros(size, device=first.device, dtype=torch.float32) if masters else None,
        tiers=tiers,
    )
    for index, param in enumerate(layout.params):
        begin, end = layout.overlap(index, layout.axis.rank)
        chunk.fragment(index).copy_(param.detach().reshape(-1)[begin:end])
        if chunk.master is not None:
            place = slice(*layout.place(index, layout.axis.rank))
            chunk.master[place].copy_(masters.pop(param).detach().reshape(-1)[begin:end])
    return chunk
