"""The cache of gathered chunks: which of them this rank has, which are fetched, evicted and pinned.

A chunk that is used is gathered, unless it is present; before that, other chunks are evicted until there is
room for it: those of the tracer's plan, and without a plan the least recently used. All ranks use chunks in
the same order, so that the gathers are the same collectives; see _positions.py.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from colossalai.communication import all_reduce_in_place
from colossalai.context import Axis
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini._positions import PATIENCE_S, GatherPositions
from colossalai.zero.gemini.planning import EvictionPlan, Home, OtherBytes, Period, Tracer

if TYPE_CHECKING:
    from colossalai.zero.gemini._method import AppliedChunks
    from colossalai.zero.gemini._timeline import ChunkTimeline


class ChunkCache:
    """The chunks of a model on this rank.

    Args:
        most_bytes: Limit of the bytes of gathered chunks; the chunks of one function can exceed it.
        is_strict: Whether the chunks of one function must not exceed it either.

    Attributes:
        chunks: All of them, in the order of initialization.
        most_bytes: As given.
        tracer: The tracer, which records and plans iterations; None: the least recently used chunks go.
        find_owner: Returns the applied data method; None if that has been freed.
        present_bytes: Bytes of all gathered memory that is alive, including memory that only users reference.
        peak_bytes: Maximum of `present_bytes` so far.
        num_gathers: Number of chunks gathered so far.
        num_blocks: Number of open blocks of `gathered`.
        gathered_at: The chunks, by the storage of gathered memory that is alive.
        sections_at: The chunks, by the storage of their section.
    """

    def __init__(self, *, most_bytes: int, is_strict: bool = False) -> None:
        self.chunks: list[Chunk] = []
        self.most_bytes = most_bytes
        self.tracer: Tracer | None = None
        self.find_owner: Callable[[], AppliedChunks | None] = lambda: None
        self.present_bytes = self.peak_bytes = self.num_gathers = self.num_blocks = 0
        self.gathered_at: dict[int, Chunk] = {}
        self.sections_at: dict[int, Chunk] = {}
        self._positions = GatherPositions([])
        self._is_strict = is_strict
        self._coming: dict[Chunk, tuple[torch.Tensor, Callable[[], object]]] = {}  # gathers in flight
        self._present: OrderedDict[Chunk, None] = OrderedDict()  # the least recently used first
        self._is_evaluating = False  # whether this forward is not a part of an iteration

    def add(self, chunk: Chunk, home: Home, states_home: Home) -> None:
        """Add the next chunk in the order of initialization.

        Args:
            chunk: The chunk.
            home: Tier of its section.
            states_home: Tier of its optimizer states.

        Raises:
            OSError: The disk has no room for it.
        """
        self.chunks.append(chunk)
        self._place(chunk, home, states_home)

    def start_gathers(self, *, patience: float = PATIENCE_S) -> None:
        """Number the gathers of all chunks, which have been added; collective over the job's store.

        Args:
            patience: Seconds before a waiting gather requests the positions of all ranks.
        """
        self._positions = GatherPositions(self.chunks, patience=patience)

    def start_planning(self) -> None:
        """Record the next iteration, to plan from."""
        assert self.chunks, "a model without chunks has nothing to record"
        self.tracer = Tracer(self._make_counter(), plans=True)

    def follow(self, plan: EvictionPlan, *, most_bytes: int) -> None:
        """Follow a plan from the next iteration on."""
        assert self.tracer is not None, "a plan is made from a trace"
        self.most_bytes = most_bytes
        self.tracer.follow(plan)

    def set_timeline(self, timeline: "ChunkTimeline | None") -> None:
        """Begin to record a timeline, or end it."""
        if self.tracer is None:
            self.tracer = Tracer(self._make_counter(), plans=False)
        self.tracer.timeline = timeline
        if timeline is None:
            self.tracer.counter.stop()
            if not self.tracer.plans:
                self.tracer = None

    # When a parameter is used.

    def begin_forward(self, inputs: Any, *, is_training: bool) -> None:
        """Begin a forward of the model that is not a recomputation.

        Args:
            inputs: A nest of tensors and other values.
            is_training: Whether it is a part of an iteration.
        """
        self._is_evaluating = not is_training
        if is_training and self.tracer is not None:
            self.tracer.begin_forward(inputs)

    def end_forward(self) -> None:
        """End the forward that `begin_forward` began."""
        self._is_evaluating = False
        if self.tracer is not None:
            self.tracer.end_forward()

    def pin(self, needed: Mapping[Chunk, str], func: Callable[..., Any]) -> None:
        """Fetch the chunks that a function takes, and pin them: the caller subtracts from `num_uses`.

        Collective, if a chunk is not present.

        Args:
            needed: The chunks, each with the name of a parameter for which it is needed.
            func: The function.

        Raises:
            ValueError: The chunks that `func` takes at once are larger than the budget.
        """
        if self._is_strict:
            self._check_fits(needed, func)
        self.hold(needed)

    def take_write(self, chunk: Chunk, name: str) -> None:
        """Copy a write into the whole of a chunk into its section; `gathered` does so at its end.

        Raises:
            RuntimeError: `chunk` has copies on other ranks, which lack the write.
        """
        if self.num_blocks > 0:
            return
        chunk.take_write()
        if chunk.is_cut:
            self._free(chunk)
            raise RuntimeError(
                f"{name} was written in a forward or backward, where each rank has its own copy: "
                "write into it inside `with torch.no_grad(), model.gathered():` (an embedding with "
                "max_norm writes into its weight: leave max_norm out)"
            )
        if chunk.is_apart:
            chunk.write_section()
        chunk.num_writes += 1

    def fetch(self, chunk: Chunk, needed: Collection[Chunk] = ()) -> torch.Tensor:
        """Return all values of a chunk; collective over the ranks that share it, if it is not present.

        Args:
            chunk: The chunk.
            needed: Chunks that must not be evicted.
        """
        if chunk.whole is not None and chunk.num_uses > 0:
            return chunk.whole  # pinned: further uses of it are not recorded
        period = None
        if self.tracer is not None and self.num_blocks == 0 and not self._is_evaluating:  # in an iteration
            held = self._held(needed)
            period = self.tracer.use(chunk.number, held, is_backward=is_in_backward())
        if period is not None:
            # Evict before the gather below allocates: the plan counts on this order.
            self._evict(other for other in list(self._present) if other.number not in period.present)
        if chunk.whole is None:
            if period is None and chunk not in self._coming:
                self._make_room(chunk.num_bytes, needed)  # frees before the gather allocates
            chunk.hold(self._gather(chunk))
        self._present[chunk] = None
        self._present.move_to_end(chunk)
        if period is not None:
            self._fetch_ahead(period)
        if self.tracer is not None:
            self.tracer.hold(self.present_bytes)
        assert chunk.whole is not None
        return chunk.whole

    def keep_mean(self, chunk: Chunk, mean: torch.Tensor) -> torch.Tensor:
        """Return this rank's section of a mean gradient where the states of its chunk lie."""
        kept = chunk.keep_mean(mean)
        if self.tracer is not None:
            self.tracer.keep(kept)
            if chunk.states_home is not Home.COMPUTE:
                self.tracer.move(bytes_in=kept.nbytes if kept is mean else 0, bytes_out=kept.nbytes)
        return kept

    def place(self, chunk: Chunk, home: Home, states_home: Home) -> None:
        """Move the section of a chunk to another tier, between two iterations.

        Raises:
            OSError: The disk has no room for it.
        """
        if (chunk.home, chunk.states_home) == (home, states_home):
            return
        if chunk.whole is not None:
            self._free(chunk)  # it can be the section itself, which moves
        self._place(chunk, home, states_home)

    def hold(self, chunks: Collection[Chunk]) -> None:
        """Gather chunks, in this order, and pin them until `release`; collective."""
        num_pinned = 0
        try:
            for chunk in chunks:  # all ranks gather in this order, that of the arguments of a function
                self.fetch(chunk, chunks)
                chunk.num_uses += 1
                num_pinned += 1
        except BaseException:  # a failed gather, or Ctrl-C in one: the caller has nothing to release
            self.release([*chunks][:num_pinned])
            raise

    def release(self, chunks: Sequence[Chunk]) -> None:
        """Release the chunks that `hold` pinned."""
        for chunk in chunks:
            chunk.num_uses -= 1

    def renew(self, chunk: Chunk) -> None:
        """Free a whole that is out of date, or gather it again if it is pinned (collective)."""
        if chunk in self._coming:
            self._coming.pop(chunk)[1]()  # wait for a gather in flight, whose values are out of date
        if chunk.is_cut:
            self._positions.note_written(chunk)
        if chunk.is_apart and chunk.whole is not None and chunk.num_uses == 0:
            self._free(chunk)  # the next use gathers the new values
            return
        if chunk.is_apart and chunk.whole is not None:
            self._start_gather_into(chunk.whole, chunk)()  # gather again in place, and wait
        chunk.take_write()  # an update is not a write of the user

    def note_loaded(self, chunk: Chunk) -> None:
        """Note that all ranks have written into their sections; collective in a block of `gathered`."""
        chunk.num_writes += 1
        self.renew(chunk)

    def end_backward_of(self, chunk: Chunk) -> None:
        """Free a chunk whose gradients are complete, unless it is pinned or a plan decides."""
        if self.num_blocks == 0 and not self._has_plan:
            self._evict([chunk])

    @contextmanager
    def gathered(self, chunks: Sequence[Chunk] | None = None) -> Iterator[None]:
        """Within the block, values can be read and written; writes of any rank are shared at its end.

        All ranks enter and leave. If several ranks wrote into a chunk, the values of the lowest rank count.

        Args:
            chunks: Those to gather; default: all.
        """
        chosen = self.chunks if chunks is None else list(chunks)
        self.num_blocks += 1
        self.hold(chosen)  # gathers, in the order of `chosen` on all ranks
        try:
            yield
        finally:
            self.num_blocks -= 1
            self.release(chosen)
            self.share_writes(chosen)  # all ranks, with writes or without
            self._evict(chosen)

    # Inside.

    def _place(self, chunk: Chunk, home: Home, states_home: Home) -> None:
        self.sections_at.pop(chunk.section.untyped_storage()._cdata, None)
        chunk.place(home, states_home)
        self.sections_at[chunk.section.untyped_storage()._cdata] = chunk

    def _gather(self, chunk: Chunk) -> torch.Tensor:
        """Return the values of all ranks' sections; collective."""
        if not chunk.is_apart:
            return chunk.section
        if chunk not in self._coming:
            self._coming[chunk] = self._start_gather(chunk)
        whole, wait = self._coming.pop(chunk)
        wait()  # for the sections of the other ranks; ends before a function reads `whole`
        return whole

    def _start_gather(self, chunk: Chunk) -> tuple[torch.Tensor, Callable[[], object]]:
        """Begin to gather; return where it goes, and the wait; collective."""
        self.num_gathers += 1
        if self.tracer is not None and self.tracer.plans:
            chunk.tiers.give_back_freed()
        make = partial(torch.empty, chunk.layout.numel, dtype=chunk.section.dtype, device=chunk.device)
        whole = make() if self.tracer is None else self.tracer.gather(make)
        storage = whole.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.gathered_at[key] = chunk
        self.present_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.present_bytes)
        # On the storage: one on the tensor would fire while a view of it still holds the memory.
        weakref.finalize(storage, ChunkCache._forget_storage, weakref.ref(self), key, size)
        return whole, self._start_gather_into(whole, chunk)

    def _start_gather_into(self, whole: torch.Tensor, chunk: Chunk) -> Callable[[], object]:
        chunk.layout.section(whole, chunk.layout.axis.rank).copy_(chunk.section)
        if chunk.home is not Home.COMPUTE:
            chunk.tiers.give_back([chunk.section])  # pages of a section on disk, which `copy_` read
            if self.tracer is not None:
                self.tracer.move(bytes_in=chunk.section.nbytes)
        # All-gather over the ranks of the chunk, in place: this rank's section is already in `whole`.
        return self._positions.start(whole, chunk) if chunk.is_cut else lambda: None

    @staticmethod
    def _forget_storage(find: "weakref.ref[ChunkCache]", key: int, size: int) -> None:
        """Account for freed memory of a gather; weakly, since finalizers reference their function."""
        if (living := find()) is not None:
            del living.gathered_at[key]
            living.present_bytes -= size

    def _make_room(self, num_bytes: int, needed: Collection[Chunk]) -> None:
        """Evict unused chunks, the least recently used first, until there is room."""
        held = sum(chunk.num_bytes for chunk in (*self._present, *self._coming) if chunk.is_apart)
        for chunk in list(self._present):
            if held + num_bytes <= self.most_bytes:
                return
            if chunk.is_apart and chunk.num_uses == 0 and chunk not in needed:
                held -= chunk.num_bytes
                self._free(chunk)

    def _evict(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            if chunk.is_apart and chunk.num_uses == 0 and chunk.whole is not None:
                self._free(chunk)

    def _check_fits(self, needed: Mapping[Chunk, str], func: Callable[..., Any]) -> None:
        """Refuse a function whose own chunks do not fit.

        Raises:
            ValueError: The chunks of `needed` are larger than the budget.
        """
        size = sum(chunk.num_bytes for chunk in needed if chunk.is_apart)
        if size > self.most_bytes and self.num_blocks == 0:
            names, name = ", ".join(list(needed.values())[:4]), getattr(func, "__name__", func)
            raise ValueError(
                f"{name} takes {names} at once, whose chunks are {size} bytes, and memory_budget leaves "
                f"{self.most_bytes} for chunks: give {size - self.most_bytes} bytes more, or smaller chunks "
                "(search_range_mb, min_chunk_size_mb)"
            )

    # With a tracer.

    def _make_counter(self) -> OtherBytes:
        find = weakref.ref(self)

        def is_model_data(storage: int) -> bool:
            living = find()
            return living is not None and (storage in living.gathered_at or storage in living.sections_at)

        return OtherBytes(self.chunks[0].device, is_model_data)

    @property
    def _has_plan(self) -> bool:
        return self.tracer is not None and self.tracer.is_followed

    def _held(self, needed: Collection[Chunk]) -> set[int]:
        """Return the numbers of the chunks that cannot be evicted: pinned, needed, or referenced."""
        held = {other.number for other in self._present if other.num_uses > 0}
        held |= {other.number for other in self.gathered_at.values() if other.whole is None}
        held -= {other.number for other in self._coming}
        return held | {other.number for other in needed}

    def _fetch_ahead(self, period: Period) -> None:
        """Start the gathers of the next use, and reading from disk for those after it."""
        assert self.tracer is not None
        for number in period.ahead:
            chunk = self.chunks[number]
            if chunk.is_apart and chunk.whole is None and chunk not in self._coming:
                # In the order of the plan, which all ranks share; the use waits.
                self._coming[chunk] = self._start_gather(chunk)
        tiers = self.chunks[0].tiers
        tiers.expect(self.chunks[number].section for number in self.tracer.coming())

    def _free(self, chunk: Chunk) -> None:
        chunk.free()
        self._present.pop(chunk, None)

    def share_writes(self, chunks: Iterable[Chunk] | None = None) -> None:
        """Copy the writes of one rank in blocks of `gathered` to all ranks; collective.

        Args:
            chunks: The chunks; default: those of the blocks that are open.
        """
        along: dict[Axis, list[Chunk]] = {}
        for chunk in [chunk for chunk in self.chunks if chunk.num_uses > 0] if chunks is None else chunks:
            along.setdefault(chunk.layout.axis, []).append(chunk)
        for axis, shared in along.items():
            writers = [axis.rank if chunk.take_write() else axis.size for chunk in shared]
            # Per chunk: this rank if it wrote, else the number of ranks. MIN gives the first writer.
            first = torch.tensor(writers, device=shared[0].section.device)
            for chunk, rank in zip(
                shared, all_reduce_in_place(first, axis, dist.ReduceOp.MIN).tolist(), strict=True
            ):
                if rank == axis.size:
                    continue
                assert chunk.whole is not None, "a chunk is present in the block that gathered it"
                if chunk.is_apart and not chunk.is_cut:
                    chunk.write_section()
                if chunk.is_cut:  # the writer sends the whole; each rank copies its section out of it
                    dist.broadcast(chunk.whole, src=axis.ranks[rank], group=axis.group)
                    chunk.section.copy_(chunk.layout.section(chunk.whole, axis.rank))
                    chunk.take_write()  # received values are not a write of this rank
                chunk.num_writes += 1


def is_in_backward() -> bool:
    """Return whether this thread is in a backward, which recomputations are."""
    return bool(torch._C._current_graph_task_id() != -1)
