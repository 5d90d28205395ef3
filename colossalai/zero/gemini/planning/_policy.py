"""Placement policies: the home tier of each chunk's section and of its optimizer states.

A rank always holds its section of a chunk; a chunk in use is on the compute tier as a whole, in addition to
the sections and states that have their home there. An iteration needs bytes of that tier for other memory and
for the chunks in use; a policy assigns the rest of the budget to sections and states, and assigns the others
to lower tiers. It is a pure function of sizes, tiers and trace.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from colossalai.zero.gemini.planning._trace import Trace


class Home(enum.Enum):
    """The tiers, from fast to large. Without an accelerator memory is `COMPUTE`, and there is no `HOST`."""

    COMPUTE = "the compute tier"
    HOST = "host memory"
    DISK = "disk"


Tiers = Mapping[Home, int | None]  # the existing tiers, with their bytes; None: unknown


@dataclass(frozen=True)
class ModelData:
    """Bytes of each chunk, by number: as a whole, of this rank's section, and of that section's states."""

    chunks: tuple[int, ...]
    sections: tuple[int, ...]
    states: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.chunks) == len(self.sections) == len(self.states), (
            "one number of bytes for each chunk"
        )
        assert min((*self.chunks, *self.sections, *self.states), default=0) >= 0, "bytes are not negative"

    @property
    def two_chunks(self) -> int:
        """Bytes of the two largest chunks: one in use, and another in flight."""
        return _two_largest(self.chunks)

    @property
    def most_updated(self) -> int:
        """The most bytes of a chunk that the optimizer updates: its section, and its states."""
        return max((sum(its) for its in zip(self.sections, self.states, strict=True)), default=0)


@dataclass(frozen=True)
class Placement:
    """The home of each chunk's section and of its states, by number."""

    sections: tuple[Home, ...]
    states: tuple[Home, ...]

    def bytes_at(self, home: Home, data: ModelData) -> int:
        """Return how many bytes have their home in a tier."""
        homes = zip((*self.sections, *self.states), (*data.sections, *data.states), strict=True)
        return sum(size for its_home, size in homes if its_home is home)

    def bytes_when_present(self, data: ModelData) -> tuple[int, ...]:
        """Return the additional bytes of the compute tier for each chunk when it is present.

        They are 0 for a section that is the whole chunk, as with one rank, and has its home there.
        """
        return tuple(
            0 if home is Home.COMPUTE and section == chunk else chunk
            for home, section, chunk in zip(self.sections, data.sections, data.chunks, strict=True)
        )


class _Fill(enum.Enum):
    """Which sections have their home on the compute tier."""

    ALL = enum.auto()
    NONE = enum.auto()
    FIRST_USED = enum.auto()  # as many as fit into the rest of an iteration, in the order of first use
    MOST_SAVED = enum.auto()  # as many, in the order of the bytes that are then not moved in an iteration


@dataclass(frozen=True)
class _Rule:
    """The rules of one policy.

    Attributes:
        fill: Which sections have their home on the compute tier.
        has_margin: Whether states have `gpu_margin_mem_ratio` of the bytes that sections leave of it.
        uses_disk: Whether sections and states that do not fit into host memory are on disk.
    """

    fill: _Fill
    has_margin: bool = False
    uses_disk: bool = False


_RULES = MappingProxyType(
    {
        "cuda": _Rule(_Fill.ALL),
        "cpu": _Rule(_Fill.NONE),
        "const": _Rule(_Fill.FIRST_USED),
        "auto": _Rule(_Fill.MOST_SAVED, has_margin=True),
        "nvme": _Rule(_Fill.MOST_SAVED, has_margin=True, uses_disk=True),
    }
)

PLACEMENT_POLICIES = tuple(_RULES)
"""Their names."""


@dataclass(frozen=True)
class PlacementPolicy:
    """One of the five policies, with its numbers.

    - `cuda`: all on the compute device.
    - `cpu`: all in host memory but the chunks that are used; without an accelerator that is the same.
    - `const`: sections on the compute device as far as `memory_budget` goes, in the order of first use.
    - `auto`: the sections that save most bytes first, as many as fit; and states in the margin.
    - `nvme`: as `auto`, with a disk below host memory.

    Without an accelerator the last three use the disk below memory, if there is a disk, and states have all
    the memory that sections leave.

    Args:
        name: The name of the policy.
        memory_budget: Bytes of the compute tier for all memory. None: the bound of the tier.
        host_budget: Bytes of host memory for sections and states. None: the bound of the tier.
        warmup_ratio: Fraction of the budget for model data before there is a trace.
        gpu_margin_mem_ratio: Fraction for states of the compute tier's bytes left by sections and iteration.

    Raises:
        ValueError: `name` is none of the five; `memory_budget` is None with "const"; a budget is negative; or
            a ratio is not within 0 and 1.
    """

    name: str
    memory_budget: int | None = None
    host_budget: int | None = None
    warmup_ratio: float = 0.3
    gpu_margin_mem_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise ValueError(f"placement_policy={self.name!r} is unknown: it is one of {', '.join(_RULES)}")
        for name, budget in (("memory_budget", self.memory_budget), ("host_budget", self.host_budget)):
            if budget is not None and budget < 0:
                raise ValueError(f"{name}={budget}: it is a number of bytes, 0 or more; None for no bound")
        ratios = {"warmup_ratio": self.warmup_ratio, "gpu_margin_mem_ratio": self.gpu_margin_mem_ratio}
        for name, ratio in ratios.items():
            if not 0 <= ratio <= 1:
                raise ValueError(f"{name}={ratio}: it is a part of memory, from 0 to 1")
        if self.name == "const" and self.memory_budget is None:
            raise ValueError("placement_policy='const' has a fixed budget: give memory_budget=<bytes>")

    def check(self, tiers: Tiers) -> None:
        """Refuse settings without effect or without room, for any model.

        Raises:
            ValueError: `tiers` lacks a tier of a budget or of the policy, or the policy never uses the disk.
        """
        bounds = self._bounds(tiers)
        self._check_tiers(bounds)
        if Home.DISK not in bounds:
            return
        if Home.HOST in bounds and not _RULES[self.name].uses_disk:
            raise ValueError(
                f"offload_dir has no effect under placement_policy={self.name!r}, which keeps in host memory "
                "what is not on the device: take 'nvme'"
            )
        if math.isinf(bounds[Home.COMPUTE]) and self.memory_budget is None and self.name != "nvme":
            raise ValueError(
                "offload_dir has no effect without a bound of memory: give memory_budget=<bytes>"
            )

    def place(self, data: ModelData, tiers: Tiers, trace: Trace | None = None) -> Placement:
        """Return the homes.

        Args:
            data: The sizes of chunks, sections and states.
            tiers: The existing tiers, with their bytes for this model and its activations.
            trace: The iteration that repeats. None: not recorded yet.

        Raises:
            ValueError: The budget is below two chunks and the measured other memory; `tiers` lacks a tier of
                a budget or of the policy; or a tier has too little room for its sections and states.
        """
        bounds = self._bounds(tiers)
        self._check_tiers(bounds)
        fill = _RULES[self.name].fill
        below = self._tiers_below(bounds)
        _check_least(bounds[Home.COMPUTE], data, trace, updates_from_disk=_is_disk_next(below))
        if fill is _Fill.ALL or not below or (fill is _Fill.NONE and Home.HOST not in below):
            everywhere = (Home.COMPUTE,) * len(data.chunks)
            placement = Placement(everywhere, everywhere)
        else:
            placement = self._fill(data, bounds[Home.COMPUTE], below, trace)
        _check_room(placement, data, bounds, trace)
        return placement

    def chunk_budget(
        self, placement: Placement, data: ModelData, tiers: Tiers, trace: Trace | None = None
    ) -> int | None:
        """Return the bytes of the compute tier left by sections and states. None: no bound.

        With a trace they are for present chunks and for other memory. Without a trace they are for present
        chunks alone, and at least two.
        """
        budget = self._bounds(tiers)[Home.COMPUTE]
        if math.isinf(budget):
            return None
        at_home = placement.bytes_at(Home.COMPUTE, data)
        if trace is None:
            return max(data.two_chunks, int(self.warmup_ratio * budget) - at_home)
        return int(budget) - at_home

    def _bounds(self, tiers: Tiers) -> dict[Home, float]:
        """Return the bytes of each tier that is there, from fast to large."""
        budgets = {Home.COMPUTE: self.memory_budget, Home.HOST: self.host_budget}
        bounds = {}
        for home in Home:
            if home in tiers:
                budget = budgets.get(home)
                bound = tiers[home] if budget is None else budget
                bounds[home] = math.inf if bound is None else bound
        return bounds

    def _tiers_below(self, bounds: Mapping[Home, float]) -> dict[Home, float]:
        """Return the tiers below the compute tier: a disk below host memory on request."""
        uses_disk = _RULES[self.name].uses_disk or Home.HOST not in bounds
        return {
            home: bound
            for home, bound in bounds.items()
            if home is Home.HOST or (home is Home.DISK and uses_disk)
        }

    def _fill(
        self, data: ModelData, budget: float, below: Mapping[Home, float], trace: Trace | None
    ) -> Placement:
        """Return homes on the compute tier as far as there is room, and below it for the others."""
        rule = _RULES[self.name]
        first_used = _in_order_of_use(len(data.chunks), trace)
        order = first_used
        if rule.fill is _Fill.MOST_SAVED and trace is not None:
            needs = {chunk: len(moments) for chunk, moments in trace.moments.items()}
            order = sorted(first_used, key=lambda chunk: -needs.get(chunk, 0) * data.sections[chunk])
        room = 0.0 if rule.fill is _Fill.NONE else self._room(data, budget, trace)
        if _is_disk_next(below):
            room = min(room, budget - data.most_updated)
        sections, left = _deal_out(data.sections, order, {Home.COMPUTE: room, **below})
        margin = self.gpu_margin_mem_ratio if rule.has_margin else 0.0
        if _is_disk_next(below):
            margin = 1.0  # the tier below is the disk: memory is worth it for states, too
        left[Home.COMPUTE] = margin * left[Home.COMPUTE] if margin else 0.0  # 0 of an endless rest, too
        states, _ = _deal_out(data.states, first_used, left)
        return Placement(sections, states)

    def _room(self, data: ModelData, budget: float, trace: Trace | None) -> float:
        """Return the bytes of the compute tier for sections and states."""
        model_budget = self.warmup_ratio * budget if trace is None else budget
        return max(0.0, model_budget - _most_needed(data.chunks, trace))

    def _check_tiers(self, bounds: Mapping[Home, float]) -> None:
        """Refuse settings without effect on these tiers."""
        memory, budget = Home.HOST, "host_budget"
        if Home.HOST not in bounds:
            memory, budget = Home.COMPUTE, "memory_budget"
            if self.host_budget is not None:
                raise ValueError(
                    f"host_budget={self.host_budget}: without an accelerator memory is the compute tier: "
                    "give memory_budget"
                )
            if self.memory_budget is not None and Home.DISK not in bounds:
                raise ValueError(
                    f"memory_budget={self.memory_budget}: without an accelerator nothing lies below memory: "
                    "give offload_dir=<a directory> as well"
                )
        if self.name == "nvme" and Home.DISK not in bounds:
            raise ValueError(
                "placement_policy='nvme' needs a disk: give offload_dir=<a directory that can be written>"
            )
        if self.name == "nvme" and math.isinf(bounds[memory]):
            raise ValueError(
                "placement_policy='nvme' keeps on disk what does not fit into memory, which has no bound: "
                f"give {budget}=<bytes>"
            )


def _is_disk_next(below: Tiers | Mapping[Home, float]) -> bool:
    """Return whether the disk is the next lower tier, so that its chunks are updated in memory."""
    return Home.DISK in below and Home.HOST not in below


class SmallBudgetError(ValueError):
    """A memory budget below the bytes of the largest chunks.

    Args:
        message: The message.
        needed: The smallest sufficient budget in bytes.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


def _check_least(budget: float, data: ModelData, trace: Trace | None, *, updates_from_disk: bool) -> None:
    measured = 0 if trace is None else max(trace.other_bytes, default=0)
    least = data.two_chunks + measured
    if updates_from_disk and budget < data.most_updated and least < data.most_updated:
        raise SmallBudgetError(
            f"the compute tier has {budget} bytes, and to update the largest chunk takes {data.most_updated} "
            f"with its gradient and states: memory_budget={data.most_updated} would do, or smaller chunks",
            data.most_updated,
        )
    if budget < least:
        raise SmallBudgetError(
            f"the compute tier has {budget} bytes, and needs {data.two_chunks} for the two largest chunks "
            f"and {measured} as measured beside them: memory_budget={least} would do",
            least,
        )


def _check_room(
    placement: Placement, data: ModelData, bounds: Mapping[Home, float], trace: Trace | None
) -> None:
    remedies = {
        Home.COMPUTE: "memory_budget={} would do, or placement_policy='auto' with a tier below",
        Home.HOST: "host_budget={} would do, or placement_policy='nvme'",
        Home.DISK: "offload_dir has to have {} bytes free",
    }
    for home, bound in bounds.items():
        takes = placement.bytes_at(home, data)
        if home is Home.COMPUTE and takes:
            takes += _most_needed(placement.bytes_when_present(data), trace)
        if takes > bound:
            raise ValueError(
                f"{home.value} has {bound} bytes, and sections, optimizer states and the chunks in use take "
                f"{takes}: {remedies[home].format(takes)}"
            )


def _most_needed(sizes: Sequence[int], trace: Trace | None) -> int:
    """Return the most bytes that a use and the next chunk take of the compute tier, without homes."""
    if trace is None:
        return _two_largest(sizes)
    following = (*trace.needed[1:], *trace.needed[:1])
    periods = zip(trace.other_bytes, trace.needed, following, strict=True)
    needs = (other + sum(sizes[chunk] for chunk in here | there) for other, here, there in periods)
    return max(needs, default=0)


def _two_largest(sizes: Sequence[int]) -> int:
    return sum(sorted(sizes)[-2:])


def _in_order_of_use(num_chunks: int, trace: Trace | None) -> list[int]:
    """Return all chunks: in the order of first use, then by number those that have none."""
    used = [] if trace is None else list(trace.moments)
    return [*used, *sorted(set(range(num_chunks)) - set(used))]


def _deal_out(
    sizes: Sequence[int], order: Iterable[int], rooms: Mapping[Home, float]
) -> tuple[tuple[Home, ...], dict[Home, float]]:
    """Return the first tier in which each chunk fits, or the last one, and the rest of the tiers."""
    left = dict(rooms)
    homes = {}
    for chunk in order:
        home = next((home for home, room in left.items() if sizes[chunk] <= room), [*left][-1])
        homes[chunk] = home
        left[home] -= sizes[chunk]
    return tuple(homes[chunk] for chunk in range(len(sizes))), left
