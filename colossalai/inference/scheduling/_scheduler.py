"""Scheduler of continuous batching: selects the tokens and sequences of the next step.

Requests join and leave at every step (Orca, OSDI 2022). A step has a budget of tokens. Sequences whose next
token is due come first, each with one token; the rest of the budget goes to prompts, cut into chunks
(2308.16369), so that no running answer waits for another request's prompt.

The scheduler is plain Python, without tensors and without a clock: the same calls give the same steps. It
decides, and the engine computes: `schedule` returns a `BatchStep`, `advance` takes the drawn tokens.

[Note: order of steps]
Several steps can be in flight (stages of a pipeline). Every rank runs them one after another, and within a
layer of a step all keys and values are written before any are read. So a block can be reallocated as soon as
its sequence releases it, even if a step in flight still reads it: the new owner writes in a later step. For
the same reason a block enters the prefix cache as soon as the step that fills it is scheduled, and serves
requests of that very step.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from colossalai.inference._request import Request
from colossalai.inference.scheduling._blocks import BlockPool, next_key

Order = tuple[int, int, int]
"""Position in the queue, smaller first: priority, number of arrival, index of the answer."""


class RunningSequence:
    """A running answer: its tokens, and the blocks of their keys and values.

    Args:
        request: The request.
        index: Index of the answer in the request.
        order: Its position in the queue.
        root: Key before its first block.
        num_answers: Number of answers drawn from its prompt; it forks into that number of sequences there.

    Attributes:
        tokens: The prompt, then the answer so far.
        num_computed: Number of tokens whose keys and values are in blocks once the steps in flight end.
        blocks: The blocks, from the first token on.
        draft: Draft of the next tokens, set by the engine.
        is_due: Whether a step in flight draws its next token, which it needs to continue.
        num_cached: Number of prompt tokens from the prefix cache at its first admission.
    """

    def __init__(
        self, request: Request, *, index: int, order: Order, root: bytes, num_answers: int = 1
    ) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.num_answers = num_answers
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.draft: Sequence[int] = ()
        self.is_due = False
        self.num_cached: int | None = None
        self._keys: list[bytes] = []
        self._root = root

    @property
    def num_left(self) -> int:
        """Number of known tokens not yet scheduled."""
        return len(self.tokens) - self.num_computed

    @property
    def has_begun(self) -> bool:
        """Whether it has been admitted before."""
        return self.num_cached is not None

    @property
    def is_answered(self) -> bool:
        """Whether its prompt is complete, so that one token at a time follows."""
        return self.num_left == 1 and self.num_computed > 0

    def keys(self, num_blocks: int, block_size: int) -> Sequence[bytes]:
        """Return the keys of its first `num_blocks` blocks, which must be full."""
        while len(self._keys) < num_blocks:
            start = len(self._keys) * block_size
            previous = self._keys[-1] if self._keys else self._root
            self._keys.append(next_key(previous, self.tokens[start : start + block_size]))
        return self._keys[:num_blocks]

    def begin_again(self, root: bytes | None = None) -> None:
        """Discard all computed tokens; its blocks must have been released.

        Args:
            root: New root of its keys; None to keep the current one.
        """
        self.blocks, self.num_computed, self.draft = [], 0, ()
        if root is not None:
            self._root, self._keys = root, []

    def fork(self, index: int) -> "RunningSequence":
        """Return another answer to the same prompt with the same blocks, without references yet."""
        order = (*self.order[:2], index)
        twin = RunningSequence(self.request, index=index, order=order, root=self._root)
        twin.num_computed, twin.blocks, twin._keys = self.num_computed, list(self.blocks), list(self._keys)
        twin.num_cached = self.num_cached
        return twin


@dataclass(frozen=True)
class SequenceChunk:
    """Tokens of one sequence in a step.

    Attributes:
        sequence: The sequence.
        start: Position of the first token.
        token_ids: The tokens, drafted ones at the end.
        blocks: Blocks of the sequence up to the last token.
        num_draws: Number of tokens drawn after the last token before the draft: 0 inside a prompt, the number
            of answers at the end of a prompt, else 1.
        num_drafted: Number of drafted tokens; one more token is drawn after each.
    """

    sequence: RunningSequence
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    num_draws: int
    num_drafted: int = 0


@dataclass(frozen=True)
class BatchStep:
    """Tokens and block copies of one step.

    Attributes:
        chunks: The tokens, by sequence.
        copies: Blocks to copy before the computation, as (source, target).
    """

    chunks: tuple[SequenceChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def reads_no_prompt(self) -> bool:
        """Whether each chunk is the next token of an answer with its draft."""
        return all(len(chunk.token_ids) == 1 + chunk.num_drafted for chunk in self.chunks)


class Scheduler:
    """Queue, running sequences and block pool of an engine.

    Args:
        pool: The blocks.
        max_running: Maximum number of running sequences; a prompt with n answers counts n times.
        max_tokens: Maximum number of tokens of a step; at least `max_running`.
        num_microbatches: Target number of steps in flight; running answers are divided among them.

    Attributes:
        is_holding: Whether only preempted sequences are admitted, and no new ones.

    Raises:
        ValueError: `max_tokens` is less than `max_running`.
    """

    def __init__(
        self, pool: BlockPool, *, max_running: int, max_tokens: int, num_microbatches: int = 1
    ) -> None:
        if max_tokens < max_running:
            raise ValueError(
                f"max_tokens_per_step={max_tokens} is less than max_running={max_running}: each request that "
                "is answered takes a token of a step; choose at least as many"
            )
        self.pool = pool
        self.max_running = max_running
        self.max_tokens = max_tokens
        self.num_microbatches = num_microbatches
        self.num_preemptions = 0
        self.is_holding = False
        self.running: list[RunningSequence] = []  # both by order
        self.waiting: list[RunningSequence] = []

    @property
    def has_begun(self) -> bool:
        """Whether an admitted sequence has not ended."""
        return bool(self.running) or any(sequence.has_begun for sequence in self.waiting)

    def add(self, sequence: RunningSequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: RunningSequence) -> None:
        """Remove a sequence from the queue or the running ones, and release its blocks.

        See [Note: order of steps].
        """
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.pool.release(sequence.blocks)  # steps in flight may still read them
        sequence.begin_again()

    def begin_again(self, root_of: Mapping[str | None, bytes]) -> None:
        """Queue all running sequences again, to be recomputed from the first token.

        Args:
            root_of: New root of the keys, by adapter.
        """
        for sequence in reversed(list(self.running)):
            self._requeue(sequence)
        for sequence in self.waiting:
            sequence.begin_again(root_of[sequence.request.adapter])

    @property
    def num_to_read(self) -> int:
        """Number of prompts being read, or waiting only for room in a step."""
        num_begun = sum(sequence.num_left > 0 and not sequence.is_answered for sequence in self.running)
        num_seats = self.max_running - len(self.running)
        return num_begun + (0 if self.is_holding else min(len(self.waiting), num_seats))

    @property
    def reads_prompt(self) -> bool:
        """Whether the next step continues a prompt."""
        return any(sequence.num_left > 0 and not sequence.is_answered for sequence in self.running)

    def due(self) -> list[RunningSequence]:
        """Return the sequences whose next token is due in the next step, oldest first."""
        num_answered = sum(sequence.num_left <= 1 for sequence in self.running)
        # Rounded up: `num_microbatches` steps serve all of them.
        share = -(-num_answered // self.num_microbatches)
        return [sequence for sequence in self.running if sequence.is_answered and not sequence.is_due][:share]

    def schedule(self, prompt_tokens: int | None = None) -> BatchStep | None:
        """Return the next step; None if nothing can be computed before a step in flight ends.

        Args:
            prompt_tokens: Maximum number of prompt tokens in a step that also draws tokens for others; None
                for the rest of the budget.
        """
        chunks: list[SequenceChunk] = []
        copies: list[tuple[int, int]] = []
        num_preemptions = self.num_preemptions
        self._add_answers(chunks, copies)
        num_answered = len(chunks)
        budget = self.max_tokens - sum(len(chunk.token_ids) for chunk in chunks)
        if chunks and prompt_tokens is not None:
            budget = min(budget, prompt_tokens)
        for sequence in self.running:
            if budget > 0 and sequence.num_left > 0 and not sequence.is_answered:
                budget -= self._add(chunks, sequence, min(budget, sequence.num_left))
        # After a preemption admit nothing: the victim would take its blocks back, or be overtaken.
        while budget > 0 and num_preemptions == self.num_preemptions:
            admitted = self._admit_first()
            if admitted is None:
                break
            budget -= self._add(chunks, admitted, min(budget, admitted.num_left))
        # A step with prompts is bound by arithmetic, where a drafted token costs as much as it may save.
        is_alone = len(chunks) == num_answered and num_preemptions == self.num_preemptions
        self._add_drafts(chunks, self.max_tokens - len(chunks) if is_alone else 0)
        return BatchStep(tuple(chunks), tuple(copies)) if chunks else None

    def advance(self, chunk: SequenceChunk, token_ids: Sequence[Sequence[int]]) -> list[RunningSequence]:
        """Append the tokens that a step drew for a chunk.

        Args:
            chunk: The chunk; its sequence has not been removed.
            token_ids: Tokens to add to each answer drawn from the chunk, at least one: the accepted part of
                the draft, and the token after it.

        Returns:
            The sequences with new tokens: the chunk's own, then further answers to its prompt.
        """
        sequence = chunk.sequence
        sequence.is_due = False
        twins = [sequence.fork(index) for index in range(1, chunk.num_draws)]
        sequence.num_answers = 1
        grown = [sequence, *twins]
        for each, added in zip(grown, token_ids, strict=True):
            each.tokens.extend(added)
        if sequence.blocks:  # empty after a preemption in the meantime
            sequence.num_computed -= chunk.num_drafted - (len(token_ids[0]) - 1)
            if chunk.num_drafted:  # accepted tokens enter the prefix cache
                self._register(sequence, chunk.start, sequence.num_computed)
                num_blocks = -(-len(sequence.tokens) // self.pool.block_size)
                self.pool.release(sequence.blocks[num_blocks:])  # blocks of rejected tokens only
                del sequence.blocks[num_blocks:]
        for twin in twins:
            if sequence.blocks:
                self.pool.take(twin.blocks)
                insort(self.running, twin, key=_order)
            else:
                self.add(twin)
        return grown

    def _add_answers(self, chunks: list[SequenceChunk], copies: list[tuple[int, int]]) -> None:
        """Add the next token of running answers; preempts the youngest ones if blocks run out."""
        for sequence in self.due():
            # Older ones come first, so a preempted sequence is not in this step.
            if sequence in self.running and self._make_room(sequence, copies):
                self._add(chunks, sequence, 1)

    def _add_drafts(self, chunks: list[SequenceChunk], room: int) -> None:
        """Add drafts to the chunks of answers, as far as free blocks permit.

        Args:
            chunks: Chunks of the step; drafts that are not added are dropped.
            room: Maximum number of drafted tokens.
        """
        for place, chunk in enumerate(chunks):
            sequence = chunk.sequence
            num_drafted = self._room_for_draft(sequence, room)
            drafted = tuple(sequence.draft[:num_drafted])
            sequence.draft = ()
            if drafted:
                room -= num_drafted
                sequence.num_computed += num_drafted
                num_blocks = -(-sequence.num_computed // self.pool.block_size)
                chunks[place] = replace(
                    chunk,
                    token_ids=(*chunk.token_ids, *drafted),
                    blocks=tuple(sequence.blocks[:num_blocks]),
                    num_drafted=num_drafted,
                )

    def _make_room(self, sequence: RunningSequence, copies: list[tuple[int, int]]) -> bool:
        """Provide a writable block for a sequence's next token; False if it was preempted instead."""
        place, offset = divmod(sequence.num_computed, self.pool.block_size)
        is_there = place < len(sequence.blocks)
        if is_there and self.pool.references(sequence.blocks[place]) == 1:
            return True
        while self.pool.num_available == 0:
            victim = self.running[-1]
            self.num_preemptions += 1
            self._requeue(victim)
            if victim is sequence:
                return False
            if is_there and self.pool.references(sequence.blocks[place]) == 1:
                return True  # the victim was the only other owner
        block = self.pool.allocate()
        if not is_there:
            sequence.blocks.append(block)
            return True
        shared = sequence.blocks[place]
        if offset:  # copy on write: the block has tokens of this sequence
            copies.append((shared, block))
        self.pool.release([shared])
        sequence.blocks[place] = block
        return True

    def _room_for_draft(self, sequence: RunningSequence, room: int) -> int:
        """Return the length of the draft that can be computed, after adding free blocks for it.

        Args:
            sequence: A sequence whose next token is scheduled.
            room: Maximum number of drafted tokens.
        """
        size = self.pool.block_size
        wanted = min(len(sequence.draft), room)
        while len(sequence.blocks) * size < sequence.num_computed + wanted:
            # Drafts never cause a preemption: one block stays available for each running sequence.
            if self.pool.num_available <= len(self.running):
                return len(sequence.blocks) * size - sequence.num_computed
            sequence.blocks.append(self.pool.allocate())
        return wanted

    def _add(self, chunks: list[SequenceChunk], sequence: RunningSequence, num_tokens: int) -> int:
        start, size = sequence.num_computed, self.pool.block_size
        known = start + num_tokens
        is_end = known == len(sequence.tokens)
        chunks.append(
            SequenceChunk(
                sequence,
                start,
                tuple(sequence.tokens[start:known]),
                tuple(sequence.blocks[: -(-known // size)]),
                num_draws=sequence.num_answers if is_end else 0,
            )
        )
        sequence.num_computed = known
        sequence.is_due = is_end
        self._register(sequence, start, known)
        return num_tokens

    def _register(self, sequence: RunningSequence, start: int, end: int) -> None:
        """Add the blocks filled by the tokens from `start` to `end` to the prefix cache."""
        size = self.pool.block_size
        num_full = end // size
        if self.pool.keeps_prefixes:
            for place in range(start // size, num_full):
                self.pool.register(sequence.blocks[place], sequence.keys(num_full, size)[place])

    def _admit_first(self) -> RunningSequence | None:
        """Admit the first waiting sequence with blocks for all its tokens; None if it has to wait."""
        let_in = (each for each in self.waiting if each.has_begun or not self.is_holding)
        sequence = next(let_in, None)
        if sequence is None or sequence.is_due:
            return None
        num_answers = sequence.num_answers + sum(other.num_answers for other in self.running)
        if self.running and num_answers > self.max_running:
            return None
        size = self.pool.block_size
        num_blocks = -(-len(sequence.tokens) // size)
        # Always compute the last token: the first draw needs its logits.
        num_shared = (len(sequence.tokens) - 1) // size if self._may_share(sequence) else 0
        found = self.pool.find(sequence.keys(num_shared, size))
        available = self.pool.num_available - self.pool.num_taken_from_available(found)
        # Each running sequence may need a block soon: an admission must not cause a preemption at once.
        if available < num_blocks - len(found) + len(self.running):
            return None
        self.pool.take(found)
        sequence.blocks = [*found, *(self.pool.allocate() for _ in range(num_blocks - len(found)))]
        sequence.num_computed = len(found) * size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        return sequence

    def _may_share(self, sequence: RunningSequence) -> bool:
        """Return whether a sequence can use cached blocks: not if it needs logits of its whole prompt."""
        return self.pool.keeps_prefixes and sequence.request.params.prompt_logprobs is None

    def _requeue(self, sequence: RunningSequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.begin_again()
        self.add(sequence)


def _order(sequence: RunningSequence) -> Order:
    return sequence.order
