"""The weights of chunks for optimizers: sections of this rank, or whole parameters of an owner.

[Note: whole parameters of chunks]
Sections can end within a parameter, and some optimizers need whole parameters. Most of their parameters are
in one section: that rank updates them in place. The others, at most one fewer than the ranks of a chunk, are
assigned to owners. Before a step the owner receives the pieces of the mean gradient from the ranks of these
sections, and after it sends back the pieces of the updated values. Between steps it keeps its own copy (the
master, if there is one) and the states; moved gradients add up there. So the layout of chunks, the gathers
and the averaging do not depend on optimizers, which can be added later.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import nn

from colossalai.communication import exchange_pieces
from colossalai.context import Axis
from colossalai.zero._bucket_grads import BucketGrads
from colossalai.zero._layout import FlatBucket, lay_out_by_owner
from colossalai.zero._weights import BucketWeights
from colossalai.zero.gemini._cache import ChunkCache
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini.planning import Home


def deal_out_cut_params(
    layouts: Sequence[FlatBucket], held: Collection[nn.Parameter]
) -> dict[nn.Parameter, int]:
    """Return the owner of each parameter that spans several sections, an axis rank.

    The largest first, each to the rank that updates the fewest elements so far.

    Args:
        layouts: The chunks.
        held: The parameters that the optimizer needs whole.
    """
    loads_along: dict[Axis, list[int]] = {}
    cut: list[tuple[int, Axis, nn.Parameter]] = []
    for layout in layouts:
        loads = loads_along.setdefault(layout.axis, [0] * layout.axis.size)
        for index, param in enumerate(layout.params):
            if param not in held:
                continue
            ranks = _ranks_with(layout, index)
            if len(ranks) > 1:
                cut.append((layout.numels[index], layout.axis, param))
            elif ranks:
                loads[ranks[0]] += layout.numels[index]
    owners = {}
    for numel, axis, param in sorted(cut, key=lambda each: -each[0]):
        loads = loads_along[axis]
        owners[param] = loads.index(min(loads))
        loads[owners[param]] += numel
    return owners


def weights_in(
    chunk: Chunk,
    cache: ChunkCache,
    held: Collection[nn.Parameter],
    *,
    owners: Mapping[nn.Parameter, int],
    keeps_shapes: bool,
) -> list[BucketWeights]:
    """Return the weights of those parameters of a chunk that an optimizer has.

    Args:
        chunk: The chunk.
        cache: The cache of gathered chunks.
        held: The parameters of the optimizer.
        owners: The axis rank of the owner of each parameter that spans several sections.
        keeps_shapes: Whether a parameter within one section keeps its shape.
    """
    params = chunk.layout.params
    here = [index for index, param in enumerate(params) if param in held and param not in owners]
    moved = [param for param in params if param in owners]
    found: list[BucketWeights] = []
    if here:
        found.append(SectionWeights(chunk, cache, held=here, keeps_shapes=keeps_shapes))
    if moved:
        layout = lay_out_by_owner(moved, owners, grad_dtype=chunk.layout.grad_dtype, sync=chunk.layout.sync)
        found.append(OwnedWeights(chunk, cache, layout))
    return found


class _OfChunk(BucketWeights):
    """Abstract: the weights of a chunk, updated in sections or whole.

    Args:
        chunk: The chunk.
        cache: The cache of gathered chunks.
        bucket: The layout by which it is updated.
        options: See the base class.
    """

    def __init__(
        self,
        chunk: Chunk,
        cache: ChunkCache,
        bucket: FlatBucket,
        *,
        held: Sequence[int] | None = None,
        keeps_shapes: bool | None = None,
    ) -> None:
        super().__init__(bucket, held=held, keeps_shapes=keeps_shapes)
        self.can_page = Home.DISK in chunk.tiers.bounds
        self._chunk = chunk
        self._cache = cache
        self._num_writes = 0  # those already seen here

    def keep(self, state: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return self._chunk.tiers.keep(state, self._chunk.states_home)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """See the base class."""
        self._chunk.tiers.give_back(tensors)

    def take_written(self) -> set[nn.Parameter]:
        """See the base class; a write counts for all parameters of the chunk."""
        num_writes, before = self._chunk.num_writes, self._num_writes
        self._num_writes = num_writes
        return {self.bucket.params[index] for index in self.held} if num_writes > before else set()

    def start_publishing(self) -> Callable[[], object]:
        """See the base class: the next use gathers the values."""
        self._num_writes = self._chunk.num_writes
        self._cache.renew(self._chunk)
        return lambda: None


@final
class SectionWeights(_OfChunk):
    """The weights of parameters of a chunk, of which each rank updates its section.

    Args:
        chunk: The chunk.
        cache: The cache of gathered chunks.
        held: The numbers of the parameters in the chunk.
        keeps_shapes: Whether a whole parameter has its shape.
    """

    def __init__(self, chunk: Chunk, cache: ChunkCache, *, held: Sequence[int], keeps_shapes: bool) -> None:
        super().__init__(chunk, cache, chunk.layout, held=held, keeps_shapes=keeps_shapes)

    @property
    def is_paged(self) -> bool:
        """See the base class."""
        return Home.DISK in (self._chunk.home, self._chunk.states_home)

    def home(self, index: int) -> torch.Tensor:
        """See the base class."""
        return self._chunk.fragment(index)

    def take_master(self, index: int) -> torch.Tensor | None:
        """See the base class; a part of the section's master, which the chunk drops when all are taken."""
        return self._chunk.take_master(index)


@final
class OwnedWeights(_OfChunk):
    """The weights of parameters that span several sections, each updated whole by its owner.

    See [Note: whole parameters of chunks].

    Args:
        chunk: The chunk.
        cache: The cache of gathered chunks.
        bucket: The layout by owners.
    """

    has_lasting_homes: ClassVar[bool] = False
    moves_mean: ClassVar[bool] = True

    def __init__(self, chunk: Chunk, cache: ChunkCache, bucket: FlatBucket) -> None:
        super().__init__(chunk, cache, bucket)
        layout, ranks = chunk.layout, range(bucket.axis.size)
        number_of = {param: number for number, param in enumerate(layout.params)}
        self._numbers = [number_of[param] for param in bucket.params]  # in the chunk
        owners_of = [_ranks_with(bucket, index)[0] for index in range(len(bucket.params))]
        self._in_section: list[tuple[int, int]] = []  # pieces that this rank's section has, by owner
        self._in_own: list[tuple[int, int]] = []  # pieces of the parameters that this rank owns, by section
        self._to_owners, self._from_sections = [0 for _ in ranks], [0 for _ in ranks]
        for owner in ranks:
            for index, number in enumerate(self._numbers):
                begin, end = layout.place(number, bucket.axis.rank)
                if owners_of[index] == owner and end > begin:
                    self._in_section.append((begin, end))
                    self._to_owners[owner] += end - begin
        for rank in ranks:
            for index, number in enumerate(self._numbers):
                begin, end = layout.overlap(number, rank)
                offset, stop = bucket.place(index, bucket.axis.rank)
                if stop > offset and end > begin:
                    self._in_own.append((offset + begin, offset + end))
                    self._from_sections[rank] += end - begin
        self._homes: torch.Tensor | None = None  # of the parameters that this rank owns, as in the sections
        self._masters: torch.Tensor | None = None  # likewise, until all are taken
        self._mean: torch.Tensor | None = None
        self._mean_on_disk: torch.Tensor | None = None

    @property
    def is_paged(self) -> bool:
        """See the base class."""
        return self._chunk.states_home is Home.DISK

    def home(self, index: int) -> torch.Tensor:
        """See the base class; without values where they are about to be overwritten."""
        begin, end = self.bucket.place(index, self.bucket.axis.rank)
        return self._own()[begin:end]

    def release_homes(self) -> None:
        """See the base class."""
        self._homes = None

    def collect_homes(self) -> None:
        """See the base class; collective."""
        self._homes = self._to_owner(self._chunk.section)

    def take_master(self, index: int) -> torch.Tensor | None:
        """See the base class: the pieces come from the sections; collective for the first one."""
        if self._chunk.master is not None and self._masters is None:
            self._masters = self._to_owner(self._chunk.master)
        self._chunk.take_master(self._numbers[index])
        if self._masters is None:
            return None
        begin, end = self.bucket.place(index, self.bucket.axis.rank)
        master = self._masters[begin:end].clone()
        if index == len(self.bucket.params) - 1:
            self._masters = None
        return master

    def take_written(self) -> set[nn.Parameter]:
        """See the base class; collective if there are some."""
        written = super().take_written()
        if written:
            self.collect_homes()
        return written

    def start_publishing(self) -> Callable[[], object]:
        """See the base class: owned values are sent to the sections; collective."""
        sent = _packed(self._own(), self._in_own)
        # The reverse all-to-all: owners send the updated pieces back to the sections.
        received = exchange_pieces(
            sent,
            send_sizes=self._from_sections,
            receive_sizes=self._to_owners,
            parallel_mode=self.bucket.axis,
        )
        _unpack(received, self._chunk.section, self._in_section)
        self._chunk.tiers.give_back([self._chunk.section])
        self._homes = None
        return super().start_publishing()

    def take_mean(self, grads: BucketGrads) -> torch.Tensor | None:
        """See the base class: the pieces come from the sections; collective."""
        if grads.slice is None:  # so it is on all ranks
            return self._mean
        mean = self._to_owner(grads.slice)
        grads.drop(self._numbers)
        if self._mean is not None:
            self._mean += mean
        elif self._mean_on_disk is not None and self.is_paged:
            self._mean = self._mean_on_disk.copy_(mean)
        else:
            self._mean = self.keep(mean)
            self._mean_on_disk = self._mean if self.is_paged else None
        self.give_back([self._mean])
        return self._mean

    def scale_mean(self, factor: float) -> None:
        """See the base class."""
        if self._mean is not None:
            self._mean *= factor

    @property
    def has_moved_mean(self) -> bool:
        """See the base class."""
        return self._mean is not None

    def clear_mean(self, index: int) -> None:
        """See the base class."""
        if self._mean is not None:
            begin, end = self.bucket.place(index, self.bucket.axis.rank)
            self._mean[begin:end].zero_()

    def forget_mean(self, *, set_to_none: bool) -> None:
        """See the base class."""
        if set_to_none:
            self._mean = None
        elif self._mean is not None:
            self._mean.zero_()

    def _own(self) -> torch.Tensor:
        """Return memory for the parameters that this rank owns, in the dtype of the chunk."""
        if self._homes is None:
            size = self.bucket.section_sizes[self.bucket.axis.rank]
            self._homes = torch.empty(size, dtype=self._chunk.section.dtype, device=self._chunk.device)
        return self._homes

    def _to_owner(self, section: torch.Tensor) -> torch.Tensor:
        """Return the owned parameters, from the sections of all ranks; collective (all-to-all)."""
        sent = _packed(section, self._in_section).to(self._chunk.device)
        # All-to-all of uneven pieces: each rank sends parts of its section to their owners.
        received = exchange_pieces(
            sent,
            send_sizes=self._to_owners,
            receive_sizes=self._from_sections,
            parallel_mode=self.bucket.axis,
        )
        own = received.new_empty(self.bucket.section_sizes[self.bucket.axis.rank])
        _unpack(received, own, self._in_own)
        return own


def _ranks_with(layout: FlatBucket, index: int) -> list[int]:
    """Return the ranks whose sections overlap a parameter."""
    overlaps = (layout.overlap(index, rank) for rank in range(layout.axis.size))
    return [rank for rank, (begin, end) in enumerate(overlaps) if end > begin]


def _packed(flat: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([flat[begin:end] for begin, end in places]) if places else flat.new_empty(0)


def _unpack(packed: torch.Tensor, flat: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
    parts = packed.split([end - begin for begin, end in places])
    for part, (begin, end) in zip(parts, places, strict=True):
        flat[begin:end].copy_(part)
