"""Scheduler of continuous batching: which tokens of which sequences the next step computes.

Requests join and leave at every step (Orca, OSDI 2022). A step has a budget of tokens. Sequences whose next
token is due come first, each with one token; what is left of the budget goes to prompts, cut into chunks
(2308.16369), so that nobody who is being answered waits for somebody's prompt.

The scheduler is plain Python, without tensors and without a clock: the same calls give the same steps. It
decides, and the engine computes: `schedule` returns a `BatchStep`, `advance` takes the tokens that it drew.

[Note: steps run in the order in which they were scheduled]
Several steps may be under way (stages of a pipeline). On every rank they run one after the other, and within
a layer of a step all keys and values are written before any are read. So a block may be given away as soon as
its sequence has no use for it, though a step that reads it is still under way: whoever writes to it does so
in a later step. For the same reason a block can be found by its tokens as soon as the step that fills it is
scheduled, in that very step.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from colossalai.inference._request import Request
from colossalai.inference.scheduling._blocks import BlockPool, next_key

Order = tuple[int, int, int]
"""Place in the queue, smaller first: priority, number of arrival, index of the answer."""


class RunningSequence:
    """An answer that is being made: its tokens, and the blocks that hold their keys and values.

    Args:
        request: What is asked for.
        index: Which of the request's answers it is.
        order: Its place in the queue.
        root: The key before its first block.
        num_answers: Answers that are drawn from its prompt: it becomes so many sequences there.

    Attributes:
        tokens: The prompt, then the answer as far as it is known.
        num_computed: Tokens whose keys and values are in blocks, or will be when the steps under way end.
        blocks: The blocks, from the first token on.
        draft: Guesses of the tokens that come next; the engine sets them.
        is_due: Whether a step that draws its next token is under way: until then it cannot go on.
        num_cached: Tokens of the prompt that came from the prefix cache when it was first admitted.
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
        """Number of known tokens that no step has computed or was given."""
        return len(self.tokens) - self.num_computed

    @property
    def has_begun(self) -> bool:
        """Whether it has been let in once."""
        return self.num_cached is not None

    @property
    def is_answered(self) -> bool:
        """Whether it is past its prompt: one token at a time follows."""
        return self.num_left == 1 and self.num_computed > 0

    def keys(self, num_blocks: int, block_size: int) -> Sequence[bytes]:
        """Return the keys of its first full blocks; its tokens reach so far."""
        while len(self._keys) < num_blocks:
            start = len(self._keys) * block_size
            previous = self._keys[-1] if self._keys else self._root
            self._keys.append(next_key(previous, self.tokens[start : start + block_size]))
        return self._keys[:num_blocks]

    def begin_again(self, root: bytes | None = None) -> None:
        """Let nothing of it be computed; its blocks have been released.

        Args:
            root: A new root of its keys; None for the one it has.
        """
        self.blocks, self.num_computed, self.draft = [], 0, ()
        if root is not None:
            self._root, self._keys = root, []

    def fork(self, index: int) -> "RunningSequence":
        """Return another answer to the same prompt, with the blocks of this one; it has no reference yet."""
        order = (*self.order[:2], index)
        twin = RunningSequence(self.request, index=index, order=order, root=self._root)
        twin.num_computed, twin.blocks, twin._keys = self.num_computed, list(self.blocks), list(self._keys)
        twin.num_cached = self.num_cached
        return twin


@dataclass(frozen=True)
class SequenceChunk:
    """Tokens of one sequence that a step computes.

    Attributes:
        sequence: The sequence.
        start: Position of the first of them.
        token_ids: The tokens, drafted ones at the end.
        blocks: The blocks of the sequence up to the last of them.
        num_draws: Tokens that are drawn after the last one that is no draft: 0 while more of the prompt
            follows, the number of answers at the end of a prompt, else 1.
        num_drafted: How many of the tokens are drafted: after each a token is drawn, too.
    """

    sequence: RunningSequence
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    num_draws: int
    num_drafted: int = 0


@dataclass(frozen=True)
class BatchStep:
    """What one step computes.

    Attributes:
        chunks: The tokens, sequence by sequence.
        copies: Blocks that are copied before anything is computed, as (from, to).
    """

    chunks: tuple[SequenceChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def reads_no_prompt(self) -> bool:
        """Whether each chunk is the next token of an answer, and what was guessed behind it."""
        return all(len(chunk.token_ids) == 1 + chunk.num_drafted for chunk in self.chunks)


class Scheduler:
    """The queue, the sequences that have blocks, and the pool.

    Args:
        pool: The blocks.
        max_running: Most sequences that have blocks at a time; a prompt with n answers counts n times.
        max_tokens: Most tokens of a step; at least `max_running`.
        num_microbatches: Steps that are to be under way at a time: those who are answered are spread over
            so many.

    Attributes:
        is_holding: Whether nobody is let in but who has been in before, and lost its blocks.

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
        """Whether a sequence has been let in, and has not ended."""
        return bool(self.running) or any(sequence.has_begun for sequence in self.waiting)

    def add(self, sequence: RunningSequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: RunningSequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back.

        See [Note: steps run in the order in which they were scheduled].
        """
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.begin_again()

    def begin_again(self, root_of: Mapping[str | None, bytes]) -> None:
        """Queue all that runs, from its first token on: what has been computed is out of date.

        Args:
            root_of: The new root of the keys, by adapter.
        """
        for sequence in reversed(list(self.running)):
            self._put_back(sequence)
        for sequence in self.waiting:
            sequence.begin_again(root_of[sequence.request.adapter])

    @property
    def num_to_read(self) -> int:
        """Number of prompts that are being read, or would be if steps had room for their tokens."""
        num_begun = sum(sequence.num_left > 0 and not sequence.is_answered for sequence in self.running)
        num_seats = self.max_running - len(self.running)
        return num_begun + (0 if self.is_holding else min(len(self.waiting), num_seats))

    @property
    def reads_prompt(self) -> bool:
        """Whether a prompt has been begun whose rest the next step reads."""
        return any(sequence.num_left > 0 and not sequence.is_answered for sequence in self.running)

    def due(self) -> list[RunningSequence]:
        """Return the sequences that get their next token in the next step, oldest first."""
        num_answered = sum(sequence.num_left <= 1 for sequence in self.running)
        # Rounded up: all of them go around in as many steps as are to be under way.
        share = -(-num_answered // self.num_microbatches)
        return [sequence for sequence in self.running if sequence.is_answered and not sequence.is_due][:share]

    def schedule(self, prompt_tokens: int | None = None) -> BatchStep | None:
        """Return the next step, None where nothing can be computed before a step under way ends.

        Args:
            prompt_tokens: Most tokens of prompts in a step that also draws tokens for others; None for what
                the budget leaves.
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
        # Who has just lost its blocks must not take them back at once, nor anybody else behind its back.
        while budget > 0 and num_preemptions == self.num_preemptions:
            admitted = self._admit_first()
            if admitted is None:
                break
            budget -= self._add(chunks, admitted, min(budget, admitted.num_left))
        # Where a prompt is read arithmetic binds, and a guess costs as much as it may save.
        is_alone = len(chunks) == num_answered and num_preemptions == self.num_preemptions
        self._add_drafts(chunks, self.max_tokens - len(chunks) if is_alone else 0)
        return BatchStep(tuple(chunks), tuple(copies)) if chunks else None

    def advance(self, chunk: SequenceChunk, token_ids: Sequence[Sequence[int]]) -> list[RunningSequence]:
        """Take the tokens that a step drew for a chunk.

        Args:
            chunk: The chunk; its sequence has not been removed.
            token_ids: For each answer that is drawn the tokens that were added to it, at least one: those of
                the draft that the draws agree with, and the one behind them.

        Returns:
            The sequences that got tokens: that of the chunk, then the further answers to its prompt.
        """
        sequence = chunk.sequence
        sequence.is_due = False
        twins = [sequence.fork(index) for index in range(1, chunk.num_draws)]
        sequence.num_answers = 1
        grown = [sequence, *twins]
        for each, added in zip(grown, token_ids, strict=True):
            each.tokens.extend(added)
        if sequence.blocks:  # else it was preempted meanwhile
            sequence.num_computed -= chunk.num_drafted - (len(token_ids[0]) - 1)
            if chunk.num_drafted:  # what has been guessed right may be found from now on
                self._register(sequence, chunk.start, sequence.num_computed)
                num_blocks = -(-len(sequence.tokens) // self.pool.block_size)
                self.pool.release(sequence.blocks[num_blocks:])  # those of guesses that were wrong
                del sequence.blocks[num_blocks:]
        for twin in twins:
            if sequence.blocks:
                self.pool.take(twin.blocks)
                insort(self.running, twin, key=_order)
            else:
                self.add(twin)
        return grown

    def _add_answers(self, chunks: list[SequenceChunk], copies: list[tuple[int, int]]) -> None:
        """Add the next token of those who are answered; the youngest lose their blocks if too few are."""
        for sequence in self.due():
            # Older ones come first, so that whoever is preempted is not in this step.
            if sequence in self.running and self._make_room(sequence, copies):
                self._add(chunks, sequence, 1)

    def _add_drafts(self, chunks: list[SequenceChunk], room: int) -> None:
        """Add to those who are answered what has been guessed, as far as free blocks reach.

        Args:
            chunks: Those of the step; what was guessed is forgotten where it is not added.
            room: Most tokens.
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
        """Give a sequence a block of its own for its next token; False where it has lost all instead."""
        place, offset = divmod(sequence.num_computed, self.pool.block_size)
        is_there = place < len(sequence.blocks)
        if is_there and self.pool.references(sequence.blocks[place]) == 1:
            return True
        while self.pool.num_available == 0:
            victim = self.running[-1]
            self.num_preemptions += 1
            self._put_back(victim)
            if victim is sequence:
                return False
            if is_there and self.pool.references(sequence.blocks[place]) == 1:
                return True  # it was the other one who shared it
        block = self.pool.allocate()
        if not is_there:
            sequence.blocks.append(block)
            return True
        shared = sequence.blocks[place]
        if offset:
            copies.append((shared, block))
        self.pool.release([shared])
        sequence.blocks[place] = block
        return True

    def _room_for_draft(self, sequence: RunningSequence, room: int) -> int:
        """Return how much of its draft a sequence can have computed, with free blocks added for it.

        Args:
            sequence: One whose next token has been scheduled.
            room: Most tokens.
        """
        size = self.pool.block_size
        wanted = min(len(sequence.draft), room)
        while len(sequence.blocks) * size < sequence.num_computed + wanted:
            # Nobody is preempted for a guess, now or when those who run begin their next blocks.
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
        """Let the blocks be found that are full with the tokens from `start` to `end`."""
        size = self.pool.block_size
        num_full = end // size
        if self.pool.keeps_prefixes:
            for place in range(start // size, num_full):
                self.pool.register(sequence.blocks[place], sequence.keys(num_full, size)[place])

    def _admit_first(self) -> RunningSequence | None:
        """Give the first that waits all blocks of its known tokens; None where it has to wait on."""
        let_in = (each for each in self.waiting if each.has_begun or not self.is_holding)
        sequence = next(let_in, None)
        if sequence is None or sequence.is_due:
            return None
        num_answers = sequence.num_answers + sum(other.num_answers for other in self.running)
        if self.running and num_answers > self.max_running:
            return None
        size = self.pool.block_size
        num_blocks = -(-len(sequence.tokens) // size)
        # The last token is always computed: its logits are what the first draw needs.
        num_shared = (len(sequence.tokens) - 1) // size if self._may_share(sequence) else 0
        found = self.pool.find(sequence.keys(num_shared, size))
        available = self.pool.num_available - self.pool.num_taken_from_available(found)
        # Those who run can each begin a block soon: who is let in must not throw another out at once.
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
        """Return whether known blocks serve a sequence: not where all logits of its prompt are asked for."""
        return self.pool.keeps_prefixes and sequence.request.params.prompt_logprobs is None

    def _put_back(self, sequence: RunningSequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.begin_again()
        self.add(sequence)


def _order(sequence: RunningSequence) -> Order:
    return sequence.order
