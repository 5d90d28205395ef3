"""The search for the chunk size that wastes least, for each kind of parameters.

"MB" in documented names and lines means 2**20 elements, not bytes: a layout is the same in every dtype.

[Note: sizes that need not be tried]
Whether parameters are packed in one way or another depends only on comparisons of a chunk's size with the
lengths of runs of consecutive parameters. Between two neighbouring lengths all sizes pack alike, and the
smallest of them wastes least. So of all candidates only the first, and the first that is not below some run,
have to be tried. A model of equal layers has few different runs.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.tensor import gradient_sync, spec_of
from colossalai.zero.gemini._packing import Packing, check_numels, pack

MB = 2**20  # elements
DEFAULT_INTERVAL = 1024  # elements: the documented default of `hidden_dim`

_BLOCK = 2**16  # candidates that are tried at once: it bounds memory, not the result
_OUTLIER_SIGMAS = 3.0

Numels = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class ChunkGroup:
    """The chunks of parameters of one kind.

    Attributes:
        key: Common properties of the parameters.
        packing: The chunks; positions count over the parameters of all groups.
    """

    key: Hashable
    packing: Packing


class ParameterKind(NamedTuple):
    """Common properties of a group of parameters in `search_chunk_configuration`.

    Attributes:
        dtype: The dtype.
        cut_over: The axes of the mesh that cut the parameter, in order of their names.
        is_trained: Whether it gets a gradient: a frozen one needs neither that nor states.
    """

    dtype: torch.dtype
    cut_over: tuple[str, ...]
    is_trained: bool


@dataclass(frozen=True)
class ChunkSizes:
    """The sizes that a search tries: the multiples of an interval within a range, in elements.

    Multiples, because matrices of a hidden size fill a chunk of a multiple of it exactly. There is always one
    candidate: the first multiple that is not below `least`.

    Attributes:
        least: The smallest size.
        extent: Size of the searched range above `least`.
        interval: The step.
    """

    least: int
    extent: int
    interval: int

    def __post_init__(self) -> None:
        if self.least < 1 or self.extent < 0 or self.interval < 1:
            raise ValueError(
                f"least={self.least}, extent={self.extent}, interval={self.interval} are no range of chunk "
                "sizes: give a least size of 1 or more, an extent of 0 or more and an interval of 1 or more"
            )

    @classmethod
    def in_mb(
        cls,
        search_range_mb: float = 32,
        search_interval_byte: int = DEFAULT_INTERVAL,
        min_chunk_size_mb: float = 32,
    ) -> "ChunkSizes":
        """Make a range from the documented arguments; see `search_chunk_configuration`.

        Raises:
            ValueError: `search_range_mb` is not a number of 0 or more, `min_chunk_size_mb` is too small for a
                chunk of 1 element, or `search_interval_byte` is not an integer of 1 or more.
        """
        unit = "in MB of 2**20 elements; fractions are allowed"
        if not _is_finite(search_range_mb) or search_range_mb < 0:
            raise ValueError(
                f"search_range_mb={search_range_mb!r} must be a number of 0 or more: how far above "
                f"min_chunk_size_mb sizes of chunks are tried, {unit}; the default is 32"
            )
        if not _is_finite(min_chunk_size_mb) or round(min_chunk_size_mb * MB) < 1:
            raise ValueError(
                f"min_chunk_size_mb={min_chunk_size_mb!r} must be a number above 0 that makes a chunk of 1 "
                f"element or more: the least size of a chunk, {unit}; the default is 32"
            )
        if isinstance(search_interval_byte, bool) or not isinstance(search_interval_byte, int):
            raise ValueError(_bad_interval(search_interval_byte))
        if search_interval_byte < 1:
            raise ValueError(_bad_interval(search_interval_byte))
        return cls(round(min_chunk_size_mb * MB), round(search_range_mb * MB), search_interval_byte)

    @property
    def num_candidates(self) -> int:
        """Number of candidate sizes."""
        return max(1, (self.least + self.extent) // self.interval - self._first_multiple + 1)

    def candidates(self, num_ranks: int, first: int = 0, last: int | None = None) -> Numels:
        """Return candidates `first` to `last`, ascending, each rounded up to a multiple of the ranks."""
        last = self.num_candidates if last is None else last
        multiples = np.arange(first, last, dtype=np.int64) + self._first_multiple
        return -(-multiples * self.interval // num_ranks) * num_ranks

    def first_holding(self, numels: Numels, num_ranks: int) -> Numels:
        """Return for each number of elements the first candidate that holds it; it may be beyond the last."""
        # A multiple of the interval is rounded up far enough if it is above the last multiple of the ranks
        # that is too small.
        too_small = (numels - 1) // num_ranks * num_ranks
        return too_small // self.interval + 1 - self._first_multiple

    @property
    def _first_multiple(self) -> int:
        """Quotient of the first candidate and the interval."""
        return -(-self.least // self.interval)


def search(
    numels: Sequence[int], sizes: ChunkSizes, *, num_ranks: int = 1, filters_outliers: bool = True
) -> Packing:
    """Pack the parameters of one group into chunks of the size that wastes least.

    Of sizes that waste equally little the largest is taken: fewer chunks, so fewer and larger messages. If
    all parameters that can share a chunk are together smaller than the least size, one chunk just large
    enough holds them.

    Args:
        numels: Number of elements of each parameter, in the order of initialization.
        sizes: The sizes to try.
        num_ranks: Number of ranks over which each chunk is cut.
        filters_outliers: Parameters that are outliers have chunks of their own and no part in the choice.
            An outlier is larger than the least size, and larger than the mean of the group by more than
            three standard deviations: an embedding of a vocabulary, which would otherwise impose its size
            on the chunks of the layers.

    Raises:
        ValueError: `num_ranks` is below 1, or one of `numels` is negative.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be 1 or more: over how many ranks a chunk is cut")
    check_numels(numels)
    all_numels = np.asarray(numels, dtype=np.int64)
    least, most = (int(sizes.candidates(num_ranks, i, i + 1)[0]) for i in (0, sizes.num_candidates - 1))
    is_alone = all_numels > most  # no candidate holds it
    if filters_outliers and len(all_numels):
        bound = max(least, all_numels.mean() + _OUTLIER_SIGMAS * all_numels.std())
        is_alone |= all_numels > bound
    sharing = all_numels[~is_alone]
    total = int(sharing.sum())
    if len(sharing) and total <= least:
        chunk_size = max(-(-total // num_ranks), 1) * num_ranks
    else:
        chunk_size = _least_waste(sharing, sizes, num_ranks)
    return pack(numels, chunk_size, num_ranks=num_ranks, alone=np.flatnonzero(is_alone).tolist())


def search_groups(
    numels: Sequence[int],
    keys: Sequence[Hashable],
    sizes: ChunkSizes,
    *,
    num_ranks_of: Callable[[Hashable], int],
    filters_outliers: bool = True,
) -> tuple[ChunkGroup, ...]:
    """Pack parameters of several kinds: one size for each kind, found over its parameters alone.

    Args:
        numels: Number of elements of each parameter, in the order of initialization.
        keys: The kind of each parameter.
        sizes: The sizes to try.
        num_ranks_of: Over how many ranks the chunks of a kind are cut.
        filters_outliers: See `search`.

    Returns:
        The groups, in the order of their first parameters.
    """
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    groups = []
    for key, positions in members.items():
        packing = search(
            [numels[position] for position in positions],
            sizes,
            num_ranks=num_ranks_of(key),
            filters_outliers=filters_outliers,
        )
        chunks = tuple(
            replace(chunk, params=tuple(positions[index] for index in chunk.params))
            for chunk in packing.chunks
        )
        groups.append(ChunkGroup(key, replace(packing, chunks=chunks)))
    return tuple(groups)


def search_chunk_configuration(
    model: nn.Module,
    search_range_mb: float,
    search_interval_byte: int,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    *,
    replicas: Axis | None = None,
) -> tuple[tuple[ChunkGroup, ...], int, int]:
    """Search, for each kind of parameters of a model, the chunk size that wastes least.

    The parameters need no memory: the model may be on the meta device. Every chunk but those of single large
    parameters has one size for each kind (`ParameterKind`).

    Args:
        model: The model; a shared parameter counts once.
        search_range_mb: Size of the searched range above `min_chunk_size_mb`, in MB of 2**20 elements.
        search_interval_byte: The step between sizes, in elements, whatever the documented name says: the
            hidden size of the model, or any number that divides the sizes of its matrices.
        min_chunk_size_mb: The least size, in MB of 2**20 elements; a group that is smaller has one
            chunk, just large enough.
        filter_exlarge_params: Whether parameters that are outliers in size have chunks of their own and no
            part in the choice; see `search`.
        strict_ddp_flag: Whether every parameter must be whole on each rank, as in plain data parallelism. The
            groups are then by dtype, and by whether they are trained, alone.
        replicas: The ranks that see different parts of the batch; a chunk is cut over those of them that hold
            its parameters. None: over no others.

    Returns:
        The groups with their chunks, whose positions are those in `model.parameters()`, and the numbers of
        elements that are used and wasted.

    Raises:
        ValueError: A number is out of its range, see `ChunkSizes.in_mb`; or `strict_ddp_flag` is True and an
            axis of a mesh cuts a parameter.
    """
    sizes = ChunkSizes.in_mb(search_range_mb, search_interval_byte, min_chunk_size_mb)
    keys: list[ParameterKind] = []
    num_ranks: dict[Hashable, int] = {}
    params = dict(model.named_parameters())
    for name, param in params.items():
        spec = spec_of(param)
        cut_over = () if spec is None else tuple(sorted(spec.axes))
        kind = ParameterKind(param.dtype, cut_over, param.requires_grad)
        if strict_ddp_flag and cut_over:
            raise ValueError(
                f"strict_ddp_flag=True, and parameter {name!r} is cut over {' x '.join(cut_over)}: strict "
                "data parallelism holds whole parameters; give False, or a model that no mode cuts"
            )
        keys.append(kind)
        if kind not in num_ranks:
            num_ranks[kind] = 1 if replicas is None else gradient_sync(param, replicas).axis.size
    groups = search_groups(
        [param.numel() for param in params.values()],
        keys,
        sizes,
        num_ranks_of=num_ranks.__getitem__,
        filters_outliers=filter_exlarge_params,
    )
    num_used = sum(group.packing.num_used for group in groups)
    return groups, num_used, sum(group.packing.num_wasted for group in groups)


def log_search(seconds: float, num_used: int, num_wasted: int) -> None:
    """Log, on rank 0, the documented three lines about a search.

    Args:
        seconds: Duration of the search.
        num_used: Number of elements of parameters.
        num_wasted: Number of unused elements of chunks; logged as a share of all elements of chunks.
    """
    share = num_wasted / max(num_used + num_wasted, 1)
    logger = get_dist_logger()
    logger.info(f"searching chunk configuration is completed in {seconds:.2f} s.", ranks=[0])
    logger.info(f"used number: {num_used / MB:.2f} MB, wasted number: {num_wasted / MB:.2f} MB", ranks=[0])
    logger.info(f"total wasted percentage is {100 * share:.2f}%", ranks=[0])


def _least_waste(numels: Numels, sizes: ChunkSizes, num_ranks: int) -> int:
    """Return the candidate that wastes least, the largest of several."""
    num_candidates = sizes.num_candidates
    # From one candidate to the next more parameters may fit. Where that happens a new stretch begins: within
    # a stretch the same parameters share chunks.
    borders = sizes.first_holding(np.unique(numels), num_ranks)
    borders = borders[(borders > 0) & (borders < num_candidates)]
    blocks = np.arange(0, num_candidates, _BLOCK)
    stretches = np.unique(np.concatenate([blocks, borders, [num_candidates]])).tolist()
    best = (math.inf, 0)
    for first, last in pairwise(stretches):
        candidates = sizes.candidates(num_ranks, first, last)
        fits = numels <= candidates[0]
        tried = _worth_trying(numels[fits], candidates)
        waste = _num_chunks(numels[fits], tried) * tried - int(numels[fits].sum())
        waste += int((-numels[~fits] % num_ranks).sum())  # chunks of one parameter
        least = int(waste.min())
        largest = int(tried[np.flatnonzero(waste == least)[-1]])
        best = min(best, (least, -largest))
    return -best[1]


def _worth_trying(numels: Numels, candidates: Numels) -> Numels:
    """Leave out candidates that pack like a smaller one. See [Note: sizes that need not be tried]."""
    if not len(numels):
        return candidates[-1:]  # no chunk is shared: all the same
    borders = np.concatenate(([0], np.cumsum(numels)))
    lows = np.searchsorted(borders, borders + candidates[0], side="right")
    highs = np.searchsorted(borders, borders + candidates[-1], side="right")
    num_runs = highs - lows  # that begin at each border, and are longer than the first candidate
    if num_runs.sum() >= len(candidates):
        return candidates
    offsets = np.arange(num_runs.sum()) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
    runs = borders[np.repeat(lows, num_runs) + offsets] - np.repeat(borders, num_runs)
    return np.unique(np.append(candidates[np.searchsorted(candidates, runs)], candidates[0]))


def _num_chunks(numels: Numels, sizes: Numels) -> Numels:
    """Return how many chunks of each of ascending sizes hold parameters that all fit.

    All sizes advance by one chunk at a time. A larger size never falls behind: so finished sizes are at the
    end, and the positions that are looked up ascend, which is fast.
    """
    if not len(numels):
        return np.zeros(len(sizes), dtype=np.int64)
    borders = np.concatenate(([0], np.cumsum(numels)))
    begins = np.zeros(len(sizes), dtype=np.int64)  # begin of the next chunk, for unfinished sizes
    counts = np.empty(len(sizes), dtype=np.int64)
    number = 0
    while len(begins):
        number += 1
        reached = np.searchsorted(borders, begins + sizes[: len(begins)], side="right") - 1
        begins = borders[reached]
        num_left = int(np.searchsorted(begins, borders[-1]))
        counts[num_left : len(begins)] = number
        begins = begins[:num_left]
    return counts


def _is_finite(number: float) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and math.isfinite(number)


def _bad_interval(interval: object) -> str:
    return (
        f"search_interval_byte={interval!r} must be an integer of 1 or more: the step between sizes of "
        "chunks, in elements; give the hidden size of the model, or 1024"
    )
