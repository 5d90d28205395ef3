"""Draft model: a small model that drafts the most likely tokens of all sequences in one batch.

It has its own paged cache, with the same block size as the large model. That cache can lag behind: after a
rejected draft, for a new sequence, or after its blocks were evicted. Before a draft it reads the missing
tokens, a bounded number at a time; a sequence with more to read gets no draft until it has caught up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from colossalai.inference.paging import Runner, StepArrays
from colossalai.inference.scheduling import BlockPool, RunningSequence
from colossalai.inference.speculation._drafts import DraftMaker


@dataclass
class _CacheState:
    """Cache state of a sequence.

    Attributes:
        blocks: Its blocks.
        num_computed: Number of computed tokens, drafted ones included.
        num_known: Number of these that are confirmed tokens of the sequence.
        guesses: Computed tokens after those.
        num_found: Number of its blocks in the prefix cache.
    """

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_known: int = 0
    guesses: list[int] = field(default_factory=list)
    num_found: int = 0

    def settle(self, tokens: Sequence[int]) -> None:
        """Discard drafted tokens that were rejected.

        Args:
            tokens: Confirmed tokens of the sequence.
        """
        taken = 0
        for guess, token in zip(self.guesses, tokens[self.num_known : len(tokens) - 1], strict=False):
            if guess != token:
                break
            taken += 1
        self.num_known += taken
        # Always compute the last token: the first draft needs its logits.
        self.num_known = self.num_computed = min(self.num_known, len(tokens) - 1)
        self.guesses = []


class DraftModel(DraftMaker):
    """Drafts by a small model.

    Args:
        runner: The model, with a cache.
        num_blocks: Number of blocks of that cache.
        max_length: Its window, the end of all drafts.
        max_tokens: Maximum number of tokens to read before a draft.
    """

    def __init__(self, runner: Runner, *, num_blocks: int, max_length: int, max_tokens: int) -> None:
        self._runner = runner
        self._pool = BlockPool(num_blocks, runner.block_size)
        self._max_length = max_length
        self._max_tokens = max_tokens
        self._cached: dict[RunningSequence, _CacheState] = {}

    @property
    def num_used(self) -> int:
        """Number of blocks with references."""
        return self._pool.num_used

    def reach(self, sequence: RunningSequence, num_tokens: int) -> tuple[int, int]:
        """Return the requested length up to the end of the window; all drafts are of one kind."""
        return max(0, min(num_tokens, self._max_length - len(sequence.tokens))), 0

    def lag(self, sequence: RunningSequence) -> int:
        """Return the number of unread tokens; all of them for a new sequence."""
        cached = self._cached.get(sequence)
        return len(sequence.tokens) - (0 if cached is None else cached.num_known)

    def drafts(self, wanted: Mapping[RunningSequence, int]) -> Mapping[RunningSequence, Sequence[int]]:
        """Read missing tokens, and return the most likely next ones."""
        ready: dict[RunningSequence, list[int]] = {}
        reading: list[tuple[RunningSequence, Sequence[int]]] = []
        budget = self._max_tokens
        for sequence, num_tokens in wanted.items():
            cached = self._begin(sequence)
            behind = sequence.tokens[cached.num_computed : cached.num_computed + budget]
            is_whole = cached.num_computed + len(behind) == len(sequence.tokens)
            longest = len(sequence.tokens) + num_tokens - 1 if is_whole else cached.num_computed + len(behind)
            if behind and self._make_room(cached, longest, wanted):
                budget -= len(behind)
                reading.append((sequence, behind))
                if is_whole:
                    ready[sequence] = []
        step = reading
        while step:
            for sequence, token in zip(
                (each for each, _ in step if each in ready), self._run(step, ready), strict=True
            ):
                ready[sequence].append(token)
            step = [(each, found[-1:]) for each, found in ready.items() if len(found) < wanted[each]]
        return ready

    def forget(self, sequence: RunningSequence) -> None:
        """Release the blocks of a sequence."""
        cached = self._cached.pop(sequence, None)
        if cached is not None:
            self._pool.release(cached.blocks)

    def _begin(self, sequence: RunningSequence) -> _CacheState:
        """Return the cache state of a sequence; a new one shares the cached blocks of its prefix."""
        cached = self._cached.get(sequence)
        if cached is None:
            cached = self._cached[sequence] = _CacheState()
            num_shared = (len(sequence.tokens) - 1) // self._pool.block_size
            cached.blocks = self._pool.find(sequence.keys(num_shared, self._pool.block_size))
            self._pool.take(cached.blocks)
            cached.num_found = len(cached.blocks)
            cached.num_known = cached.num_computed = len(cached.blocks) * self._pool.block_size
        else:
            cached.settle(sequence.tokens)
        return cached

    def _make_room(self, cached: _CacheState, num_tokens: int, wanted: Mapping[RunningSequence, int]) -> bool:
        """Allocate blocks for `num_tokens` tokens; first evicts sequences preempted in the large model."""
        num_missing = -(-num_tokens // self._pool.block_size) - len(cached.blocks)
        if num_missing > self._pool.num_available:
            for sequence in [each for each in self._cached if not each.blocks and each not in wanted]:
                self.forget(sequence)
        if num_missing > self._pool.num_available:
            return False
        cached.blocks += [self._pool.allocate() for _ in range(num_missing)]
        return True

    def _run(
        self, step: Sequence[tuple[RunningSequence, Sequence[int]]], ready: Mapping[RunningSequence, object]
    ) -> list[int]:
        """Compute tokens of sequences; return the most likely next token of each in `ready`."""
        size = self._pool.block_size
        caches = [self._cached[sequence] for sequence, _ in step]
        counts = np.array([len(tokens) for _, tokens in step], np.int64)
        starts = np.array([cached.num_computed for cached in caches], np.int64)
        tables = [
            cached.blocks[: -(-(start + count) // size)]
            for cached, start, count in zip(caches, starts.tolist(), counts.tolist(), strict=True)
        ]
        is_ready = np.array([sequence in ready for sequence, _ in step])
        arrays = StepArrays(
            token_ids=np.array([token for _, tokens in step for token in tokens], np.int64),
            starts=starts,
            counts=counts,
            table_sizes=np.array([len(table) for table in tables], np.int64),
            tables=np.array([block for table in tables for block in table], np.int64),
            copies=np.empty((0, 2), np.int64),
            rows=np.cumsum(counts)[is_ready] - 1,
        )
        logits = self._runner.run(arrays)
        for (sequence, tokens), cached in zip(step, caches, strict=True):
            self._note(sequence, cached, tokens)
        return logits.argmax(-1).tolist() if is_ready.any() else []

    def _note(self, sequence: RunningSequence, cached: _CacheState, tokens: Sequence[int]) -> None:
        """Record computed tokens; full blocks of confirmed tokens enter the prefix cache."""
        cached.num_computed += len(tokens)
        if cached.num_computed > len(sequence.tokens):
            cached.guesses += tokens
            return
        cached.num_known = cached.num_computed
        size, num_found = self._pool.block_size, cached.num_found
        cached.num_found = max(num_found, cached.num_known // size)
        for place in range(num_found, cached.num_found):
            self._pool.register(cached.blocks[place], sequence.keys(cached.num_found, size)[place])
