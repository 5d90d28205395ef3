"""Random schedules, and a model of the cache in plain Python that finds whoever reads what is not its own.

A slot of the model holds a digest of all tokens up to its own, and the version of the weights that
computed it, as keys and values follow from both. Steps run in the order in which they were scheduled: first
the copies, then the writes of all chunks, then their reads. Tokens are drawn by a function of what has been
read, so that the answer of each request is known beforehand.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from colossalai.inference import Request, SamplingParams
from colossalai.inference.sampling import accepted
from colossalai.inference.scheduling import BatchStep, BlockPool, RunningSequence, Scheduler, root_key

VOCAB = 5


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes and, maybe, is aborted, in ticks."""

    tick: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    priority: int
    abort: int | None
    wants_scores: bool


@dataclass(frozen=True)
class Schedule:
    """A pool, a scheduler, and what happens to them."""

    block_size: int
    num_blocks: int
    max_running: int
    max_tokens: int
    num_microbatches: int
    keeps_prefixes: bool
    longest_draft: int
    arrivals: tuple[Arrival, ...]
    changes: tuple[tuple[int, bool], ...]  # of the weights: the tick, and whether all begin again
    seed: int


@st.composite
def schedules(draw):
    """Return schedules whose requests all fit the pool, and often not two of them."""
    size, max_running = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    # Few beginnings, so that prompts share blocks.
    beginnings = draw(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=2))
    arrivals = []
    for _ in range(draw(st.integers(1, 9))):
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        tick = draw(st.integers(0, 6))
        arrivals.append(
            Arrival(
                tick=tick,
                prompt=(*draw(st.sampled_from(beginnings)), *tail),
                max_tokens=draw(st.integers(1, 10)),
                n=draw(st.integers(1, min(3, max_running))),
                priority=draw(st.sampled_from((0, 0, 0, 1))),
                abort=draw(st.none() | st.integers(tick, tick + 10)),
                wants_scores=draw(st.sampled_from((False, False, True))),
            )
        )
    longest = max(len(each.prompt) + each.max_tokens for each in arrivals)
    return Schedule(
        block_size=size,
        num_blocks=-(-longest // size) + draw(st.integers(0, 6)),
        max_running=max_running,
        max_tokens=max_running + draw(st.integers(0, 12)),
        num_microbatches=draw(st.integers(1, 4)),
        keeps_prefixes=draw(st.booleans()),
        longest_draft=draw(st.sampled_from((0, 0, 1, 4))),
        arrivals=tuple(arrivals),
        changes=tuple(draw(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=2))),
        seed=draw(st.integers(0, 2**16)),
    )


def digests(tokens):
    """Return for each token a digest of all up to it."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def next_token(tokens, number, index):
    """Return what a model would draw behind these tokens, for an answer of a request."""
    return hash((digests(tokens)[-1], number, index)) % VOCAB


def expected_answer(prompt, max_tokens, number, index):
    """Return an answer as it is when nobody else is there."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, number, index))
    return tokens[len(prompt) :]


class CacheModel:
    """What the blocks hold: for each slot a digest and a version; None before it is written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]

    def run(
        self, step: BatchStep, version: int, oldest: dict[RunningSequence, int], known: list[list[int]]
    ) -> None:
        """Run a step and compare what each chunk reads with the tokens that its sequence had."""
        copied = [list(self.blocks[source]) for source, _ in step.copies]
        targets = [target for _, target in step.copies]
        assert len(set(targets)) == len(targets), "a block is copied to twice"
        for (_, target), content in zip(step.copies, copied, strict=True):
            self.blocks[target] = content
        written = set()
        for chunk, before in zip(step.chunks, known, strict=True):
            of_all = digests([*before, *chunk.token_ids])
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                block, offset = chunk.blocks[position // self.size], position % self.size
                assert (block, offset) not in written, "two tokens of a step share a slot"
                written.add((block, offset))
                self.blocks[block][offset] = (of_all[position], version)
        for chunk, before in zip(step.chunks, known, strict=True):
            for position, digest in enumerate(digests([*before, *chunk.token_ids])):
                held = self.blocks[chunk.blocks[position // self.size]][position % self.size]
                assert held is not None, "a slot is read that nobody has written"
                assert held[0] == digest, "a token reads what belongs to another sequence"
                assert held[1] >= oldest[chunk.sequence], "a token reads what older weights have computed"


@dataclass
class Player:
    """Plays a schedule to its end and asserts on the way whatever has to hold."""

    plan: Schedule
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    num_steps: int = 0
    num_hits: int = 0
    num_copies: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.pool = BlockPool(plan.num_blocks, plan.block_size, keeps_prefixes=plan.keeps_prefixes)
        self.scheduler = Scheduler(
            self.pool,
            max_running=plan.max_running,
            max_tokens=plan.max_tokens,
            num_microbatches=plan.num_microbatches,
        )
        self.cache = CacheModel(plan.num_blocks, plan.block_size)
        self.random = Random(plan.seed)
        self.version = 0
        self.open: dict[RunningSequence, int] = {}  # which arrival each is of
        self.oldest: dict[RunningSequence, int] = {}  # version of the weights that it may read
        self.under_way: deque[tuple[BatchStep, list[list[int]]]] = deque()

    def play(self) -> None:
        plan, tick = self.plan, 0
        last = max([each.tick for each in plan.arrivals] + [when for when, _ in plan.changes])
        while tick <= last or self.open or self.under_way:
            for number, arrival in enumerate(plan.arrivals):
                if arrival.tick == tick:
                    self.arrive(number, arrival)
                if arrival.abort == tick:
                    self.abort(number)
            for all_begin_again in [how for when, how in plan.changes if when == tick]:
                self.change_weights(all_begin_again)
            self.fill()
            if self.under_way:
                self.collect()
            tick += 1
        self.check_end()

    def check_end(self) -> None:
        self.pool.check([])
        assert self.pool.num_available == self.plan.num_blocks, "the pool is not full again"
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        for number, arrival in enumerate(self.plan.arrivals):
            for index in range(arrival.n):
                if arrival.abort is None or (number, index) in self.answers:
                    expected = expected_answer(arrival.prompt, arrival.max_tokens, number, index)
                    assert self.answers[number, index] == expected

    def arrive(self, number: int, arrival: Arrival) -> None:
        params = SamplingParams(
            n=arrival.n, max_tokens=arrival.max_tokens, prompt_logprobs=0 if arrival.wants_scores else None
        )
        request = Request(request_id=str(number), prompt_token_ids=arrival.prompt, params=params)
        root = root_key(self.version, None)
        order = (arrival.priority, number, 0)
        sequence = RunningSequence(request, index=0, order=order, root=root, num_answers=arrival.n)
        self.open[sequence], self.oldest[sequence] = number, self.version
        self.scheduler.add(sequence)

    def abort(self, number: int) -> None:
        for sequence in [each for each, of in self.open.items() if of == number]:
            self.end(sequence)
        self.check()

    def end(self, sequence: RunningSequence) -> None:
        del self.open[sequence]
        self.scheduler.remove(sequence)

    def change_weights(self, all_begin_again: bool) -> None:
        while self.under_way:
            self.collect()
        self.version += 1
        self.pool.forget_all()
        root = root_key(self.version, None)
        if all_begin_again:
            self.scheduler.begin_again({None: root})
            self.oldest = dict.fromkeys(self.open, self.version)
        else:
            for sequence in self.scheduler.waiting:
                sequence.begin_again(root)
                self.oldest[sequence] = self.version
        self.check()

    def fill(self) -> None:
        """Schedule as many steps as may be under way."""
        while len(self.under_way) < self.plan.num_microbatches:
            self.draft()
            before = list(self.scheduler.running)
            waited = list(self.scheduler.waiting)
            answered = [each for each in before if each.is_answered and not each.is_due]
            num_preempted = self.scheduler.num_preemptions
            most_read = self.random.choice((None, 1, 3))
            step = self.scheduler.schedule(most_read)
            self.check()
            if step is None:
                assert self.under_way or not self.open, "nothing is under way, and nothing is computed"
                return
            self.num_steps += 1
            self.num_copies += len(step.copies)
            total = sum(len(each.prompt) + each.max_tokens * each.n for each in self.plan.arrivals)
            assert self.num_steps <= 10 * total * self.plan.num_microbatches + 50, "somebody starves"
            self.check_step(step, before, waited, answered, self.scheduler.num_preemptions - num_preempted)
            read = [chunk for chunk in step.chunks if chunk.sequence not in answered]
            if most_read is not None and len(read) < len(step.chunks):
                assert sum(len(chunk.token_ids) for chunk in read) <= most_read
            self.under_way.append((step, [chunk.sequence.tokens[: chunk.start] for chunk in step.chunks]))

    def draft(self) -> None:
        """Guess tokens, right ones and wrong ones."""
        for sequence in self.scheduler.running:
            if (
                not sequence.is_answered
                or sequence.num_left != 1
                or len(sequence.tokens) == sequence.num_prompt
            ):
                continue
            guess: list[int] = []
            for _ in range(self.random.randint(0, self.plan.longest_draft)):
                right = next_token([*sequence.tokens, *guess], self.open[sequence], sequence.index)
                guess.append(right if self.random.random() < 0.7 else self.random.randrange(VOCAB))
            sequence.draft = guess

    def check_step(self, step, before, waited, answered, num_preempted) -> None:
        plan, running = self.plan, self.scheduler.running
        assert step.num_tokens <= plan.max_tokens
        chunked = [chunk.sequence for chunk in step.chunks]
        assert len(set(chunked)) == len(chunked), "a sequence is in a step twice"
        lost = [each for each in before if each not in running]
        assert len(lost) == num_preempted
        for sequence in lost:
            assert sequence not in chunked
            assert sequence in self.scheduler.waiting
            assert all(sequence.order > other.order for other in running), "an older one was preempted"
        kept = [each for each in answered if each in running]
        if plan.num_microbatches == 1:
            assert set(kept) <= set(chunked), "somebody who is answered waits"
        else:
            in_step = [each for each in kept if each in chunked]
            assert in_step == kept[: len(in_step)], "a younger one goes before an older one"
        for chunk in step.chunks:
            held = chunk.sequence.blocks
            assert tuple(held[: len(chunk.blocks)]) == chunk.blocks
            assert (len(chunk.blocks) - 1) * plan.block_size < chunk.start + len(chunk.token_ids)
            for place in range(chunk.start // plan.block_size, len(chunk.blocks)):
                others = [s for s in running if s is not chunk.sequence and held[place] in s.blocks]
                # Who shares it may only have found it by its tokens in this very step.
                assert all(
                    chunk.start + len(chunk.token_ids) >= (place + 1) * plan.block_size for _ in others
                )
        if any(chunk.num_drafted for chunk in step.chunks):
            assert chunked == [each for each in kept if each in chunked], "a prompt has a step with guesses"
        # Prompts are read in order: only the last one of a step is cut off.
        prompts = [chunk for chunk in step.chunks if chunk.sequence not in answered]
        assert all(chunk.num_draws for chunk in prompts[:-1])
        admitted = [each for each in waited if each in running]
        assert admitted == waited[: len(admitted)], "somebody has overtaken in the queue"
        self.num_hits += sum(each.num_cached or 0 for each in admitted)
        for each in admitted:
            if each.request.params.prompt_logprobs is not None:
                assert each.num_cached == 0

    def collect(self) -> None:
        step, known = self.under_way.popleft()
        self.cache.run(step, self.version, self.oldest_of(step), known)
        for chunk, before in zip(step.chunks, known, strict=True):
            sequence = chunk.sequence
            if sequence not in self.open or not chunk.num_draws:
                continue
            number = self.open[sequence]
            tokens = [*before, *chunk.token_ids[: len(chunk.token_ids) - chunk.num_drafted]]
            drafted = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafted :]
            if chunk.num_draws > 1:
                added = [[next_token(tokens, number, index)] for index in range(chunk.num_draws)]
            else:
                places = range(len(drafted) + 1)
                drawn = [next_token([*tokens, *drafted[:end]], number, sequence.index) for end in places]
                added = [drawn[: accepted(drafted, drawn) + 1]]
            for each, new in zip(self.scheduler.advance(chunk, added), added, strict=True):
                self.open[each], self.oldest[each] = number, self.oldest[sequence]
                self.take(each, len(new))
            self.check()

    def oldest_of(self, step: BatchStep) -> dict[RunningSequence, int]:
        return {chunk.sequence: self.oldest.get(chunk.sequence, 0) for chunk in step.chunks}

    def take(self, sequence: RunningSequence, num_new: int) -> None:
        """End an answer where it is long enough, maybe in the middle of what was drafted."""
        number = self.open[sequence]
        answer = sequence.tokens[sequence.num_prompt :]
        assert num_new <= len(answer)
        most = self.plan.arrivals[number].max_tokens
        if len(answer) >= most:
            del sequence.tokens[sequence.num_prompt + most :]
            self.answers[number, sequence.index] = answer[:most]
            self.end(sequence)

    def check(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.pool.check([each.blocks for each in running])
        assert all(not each.blocks for each in waiting)
        assert set(running) | set(waiting) == set(self.open)
        assert len(running) + len(waiting) == len(self.open)
        for queue in (running, waiting):
            assert [each.order for each in queue] == sorted(each.order for each in queue)
        assert len(running) <= self.plan.max_running
