"""The timeline of an iteration: measured bytes on the compute tier from each use until the next.

    with record_timeline(model) as iterations:
        for batch in batches[:2]:  # whole iterations: forward, backward, step
            ...
    iterations[-1].peak_bytes

The bytes of model data are read from its owners: the cache has gathered chunks (by finalizers on their
memory), chunks have sections, the reducer has means, the optimizer has states. `OtherBytes` counts the rest;
see [Note: memory other than model data]. Without a recorder a use costs one comparison.

[Note: the step]
An optimizer updates chunks in memory at once, and then one by one the chunks with parts on disk, whose pages
are memory until they are given back: one moment for each. Other memory is not counted there, so temporary
memory of an optimizer is missing; and reads from disk by clipping are not among the bytes that move.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.zero._reducer import ShardedReducer
from colossalai.zero._shards import Shards
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini._hooks import handle_of, is_chunked
from colossalai.zero.gemini.planning import Home


class Phase(enum.StrEnum):
    """The part of an iteration."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A use of a chunk, and the time until the next one; in the step, the update of one chunk or of several.

    All sizes are bytes on this rank, the most in this time.

    Attributes:
        phase: The part of the iteration.
        chunk: The number of the chunk; None for all that is updated in memory at once.
        gathered_bytes: Gathered chunks, in flight or present, including memory that only users reference.
        section_bytes: Sections that have their home on the compute tier.
        gradient_bytes: Mean gradients on the compute tier.
        state_bytes: Master weights and optimizer states on the compute tier.
        paged_bytes: Files whose pages are in memory while their chunk is updated.
        other_bytes: All other memory: activations, gradients before averaging, temporary results.
        bytes_in: Bytes read from lower tiers.
        bytes_out: Bytes written to lower tiers.
    """

    phase: Phase
    chunk: int | None
    gathered_bytes: int
    section_bytes: int
    gradient_bytes: int
    state_bytes: int
    paged_bytes: int = 0
    other_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def model_bytes(self) -> int:
        """Bytes of model data on the compute tier."""
        at_home = self.section_bytes + self.gradient_bytes + self.state_bytes
        return self.gathered_bytes + at_home + self.paged_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory on the compute tier."""
        return self.model_bytes + self.other_bytes


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The measured moments of one iteration on this rank.

    Attributes:
        moments: In the order of uses.
        memory_budget: Bytes of the compute tier; None for no bound.
        is_planned: Whether it followed a plan from beginning to end.
    """

    moments: tuple[Moment, ...]
    memory_budget: int | None
    is_planned: bool

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the compute tier."""
        return max((moment.num_bytes for moment in self.moments), default=0)

    @property
    def peak_model_bytes(self) -> int:
        """The most bytes of model data there."""
        return max((moment.model_bytes for moment in self.moments), default=0)

    @property
    def peak_other_bytes(self) -> int:
        """The most bytes of other memory there."""
        return max((moment.other_bytes for moment in self.moments), default=0)

    @property
    def bytes_in(self) -> int:
        """Bytes read from lower tiers."""
        return sum(moment.bytes_in for moment in self.moments)

    @property
    def bytes_out(self) -> int:
        """Bytes written to lower tiers."""
        return sum(moment.bytes_out for moment in self.moments)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Iteration":
        """Return the iteration of an `as_dict` result."""
        moments = tuple(Moment(**{**each, "phase": Phase(each["phase"])}) for each in content["moments"])
        return cls(moments=moments, memory_budget=content["memory_budget"], is_planned=content["is_planned"])

    def as_dict(self) -> dict[str, Any]:
        """Return the figures and the series under their names, for JSON."""
        names = ("peak_bytes", "peak_model_bytes", "peak_other_bytes", "bytes_in", "bytes_out")
        return {
            "memory_budget": self.memory_budget,
            "is_planned": self.is_planned,
            **{name: getattr(self, name) for name in names},
            "moments": [asdict(moment) for moment in self.moments],
        }


@contextmanager
def record_timeline(model: nn.Module) -> Iterator[list[Iteration]]:
    """Within the block, record the bytes on the compute tier of this rank at each use of a chunk.

    The block holds whole iterations. Each rank can record on its own, and training is the same bit for bit.
    Functions of torch take longer, since each of their results is counted.

    Args:
        model: A model returned by `Booster.boost`, `GeminiDDP` or `zero_model_wrapper`, or the raw model.

    Returns:
        The iterations in order; each is appended at the end of its step.

    Raises:
        ValueError: `model` has no parameter in a chunk, or is being recorded already.
    """
    cache = next((handle_of(param).hooks.cache for param in model.parameters() if is_chunked(param)), None)
    if cache is None:
        raise ValueError(
            f"no parameter of this {type(model).__name__} lies in a chunk: pass a model that has been "
            "through GeminiPlugin, GeminiDDP or zero_model_wrapper(zero_stage=3)"
        )
    if cache.tracer is not None and cache.tracer.timeline is not None:
        raise ValueError(f"this {type(model).__name__} is being recorded already: leave one block out")
    owner = cache.find_owner()
    assert owner is not None, "a model that is recorded is alive"
    iterations: list[Iteration] = []
    timeline = ChunkTimeline(
        iterations,
        contents=lambda: [] if (living := cache.find_owner()) is None else living.contents(),
        memory_budget=owner.memory_budget,
    )
    owner.set_timeline(timeline)
    try:
        yield iterations
    finally:
        owner.set_timeline(None)


@dataclass(frozen=True)
class ChunkContents:
    """Bytes of a chunk on this rank, without gathered values.

    Attributes:
        chunk: The chunk.
        section: Bytes of its section.
        mean: Bytes of the section of the mean gradient, while there is one.
        states: Bytes of master weights and optimizer states.
    """

    chunk: Chunk
    section: int
    mean: int
    states: int

    def bytes_at(self, home: Home) -> tuple[int, int, int]:
        """Return the bytes of section, mean and states in a tier."""
        has_states = self.chunk.states_home is home
        section = self.section if self.chunk.home is home else 0
        return section, self.mean if has_states else 0, self.states if has_states else 0

    @property
    def is_updated_below(self) -> bool:
        """Whether a part of it is below the compute tier when an optimizer updates it."""
        return {self.chunk.home, self.chunk.states_home} != {Home.COMPUTE}

    def moved_by_update(self) -> dict[str, int]:
        """Return the bytes that an update moves between tiers, and the pages of files it has in memory.

        If the CPU is the compute tier, it reads files through memory. Below an accelerator the optimizer
        runs on the tier of the states, and moves nothing.
        """
        section, mean, states = self.bytes_at(Home.DISK)
        paged = section + mean + states
        is_apart = Home.HOST in self.chunk.tiers.bounds
        return {
            "paged_bytes": 0 if is_apart else paged,
            "bytes_in": 0 if is_apart else paged,
            "bytes_out": 0 if is_apart else section + states,
        }


def contents_of(
    chunks: Sequence[Chunk], reducer: ShardedReducer, shards_of: Mapping[Optimizer, Shards]
) -> list[ChunkContents]:
    """Return the bytes of each chunk on this rank."""
    slices = {grads.bucket: grads.slice for grads in reducer.all_grads}
    means = {chunk: 0 if (its := slices.get(chunk.layout)) is None else its.nbytes for chunk in chunks}
    states = dict.fromkeys(chunks, 0)
    for optimizer, shards in shards_of.items():
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            param = shards.param_of(tensor)
            if not is_chunked(param):
                continue
            chunk = handle_of(param).chunk
            its_own = [value for value in optimizer.state.get(tensor, {}).values() if torch.is_tensor(value)]
            if tensor.untyped_storage()._cdata != chunk.section.untyped_storage()._cdata:
                its_own.append(tensor)  # a master, or a whole parameter
                if slices.get(chunk.layout) is None and tensor.grad is not None:
                    means[chunk] += tensor.grad.nbytes  # moved to the owner of the whole parameter
            states[chunk] += sum(value.nbytes for value in its_own if value.ndim)
    return [ChunkContents(chunk, chunk.section.nbytes, means[chunk], size) for chunk, size in states.items()]


Contents = Callable[[], list[ChunkContents]]


class ChunkTimeline:
    """Assembles the moments of iterations from the events of a tracer.

    Args:
        iterations: The list to which iterations are appended.
        contents: Returns the bytes of each chunk on this rank.
        memory_budget: Bytes of the compute tier; None for no bound.
    """

    def __init__(
        self,
        iterations: list[Iteration],
        *,
        contents: Contents,
        memory_budget: int | None,
    ) -> None:
        self._iterations = iterations
        self._contents = contents
        self._memory_budget = memory_budget
        self._moments: list[Moment] = []
        self._current: tuple[Phase, int] | None = None  # of the current moment
        self._sizes: Counter[str] = Counter()  # its other fields
        self._is_stepping = False
        self._is_planned = True

    def use(self, chunk: int, *, is_backward: bool, is_planned: bool) -> None:
        """Add a use, before the chunk is gathered; several times in a row is one use."""
        if self._is_stepping:  # the step was skipped, for example by a loss scale after an overflow
            self._begin_anew()
        phase = Phase.BACKWARD if is_backward else Phase.FORWARD
        self._is_planned &= is_planned
        if self._current != (phase, chunk):
            self._close()
            self._current = (phase, chunk)

    def add_other(self, num_bytes: int) -> None:
        """Add the most bytes of other memory since the last call."""
        self._sizes["other_bytes"] = max(self._sizes["other_bytes"], num_bytes)

    def hold(self, gathered_bytes: int) -> None:
        """Add the bytes of gathered memory after a fetch."""
        self._sizes["gathered_bytes"] = max(self._sizes["gathered_bytes"], gathered_bytes)

    def move(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Add bytes read from lower tiers, or written to them."""
        self._sizes.update(bytes_in=bytes_in, bytes_out=bytes_out)

    def begin_step(self) -> None:
        """Begin the step, whose gradients are complete."""
        if self._current is not None:
            self._close()
            self._is_stepping = True

    def end_step(self, gathered_bytes: int) -> None:
        """End the step, before any section moves; see [Note: the step].

        Args:
            gathered_bytes: Bytes of chunks that are still present.
        """
        if not self._is_stepping:
            return
        found = self._contents()
        sizes = {"gathered_bytes": gathered_bytes, **_at_home(found)}
        trained = [contents for contents in found if contents.mean or contents.states]
        below = [contents for contents in trained if contents.is_updated_below]
        if len(below) < len(trained) or not trained:
            self._moments.append(Moment(phase=Phase.STEP, chunk=None, **sizes))
        self._moments += [
            Moment(phase=Phase.STEP, chunk=contents.chunk.number, **sizes, **contents.moved_by_update())
            for contents in below
        ]
        self._finish()

    def _close(self) -> None:
        """End the current moment; records before the first use are left out."""
        if self._current is not None:
            phase, chunk = self._current
            sizes = {"gathered_bytes": 0, **self._sizes, **_at_home(self._contents())}
            self._moments.append(Moment(phase=phase, chunk=chunk, **sizes))
        self._current = None
        self._sizes.clear()

    def _finish(self) -> None:
        self._iterations.append(
            Iteration(
                moments=tuple(self._moments),
                memory_budget=self._memory_budget,
                is_planned=self._is_planned,
            )
        )
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._moments, self._is_stepping, self._is_planned = [], False, True


def _at_home(found: Iterable[ChunkContents]) -> dict[str, int]:
    """Return the bytes that have their home on the compute tier, by the fields of a moment."""
    kinds = ("section_bytes", "gradient_bytes", "state_bytes")
    sizes = zip(*(contents.bytes_at(Home.COMPUTE) for contents in found), strict=True)
    return dict(zip(kinds, map(sum, sizes), strict=True))
