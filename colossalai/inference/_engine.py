"""Inference engine: requests enter, the model runs steps, and each step yields deltas of answers.

One thread calls it. Requests join and leave at every step: running answers get one token each, and prompts
are read in chunks in the same step. A request ends in one of four ways: finished, aborted, refused at
submission, or failed, alone or together with the engine.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colossalai.inference._answers import OpenAnswer, OpenRequest
from colossalai.inference._executor import Executor, StepResult
from colossalai.inference._plan import PlannedStep, plan_step
from colossalai.inference._request import (
    Delta,
    FinishReason,
    QueueFull,
    Request,
    RequestFailed,
    RequestRefused,
)
from colossalai.inference._service import EngineStats, Listener
from colossalai.inference.loading import WeightSource
from colossalai.inference.sampling import (
    HAS_INFINITY,
    HAS_NAN,
    HAS_NO_TOKEN,
    StructureCompiler,
    TextStream,
    accepted,
    fresh_seed,
)
from colossalai.inference.scheduling import (
    BatchStep,
    EngineLimits,
    PromptPace,
    RunningSequence,
    Scheduler,
    SequenceChunk,
    refuse_unanswerable,
    root_key,
)
from colossalai.inference.speculation import Speculator

_COUNTED = ("prefix_hit_tokens", "prompt_tokens", "generated_tokens", "steps", "weight_updates")
_BROKEN = "; a dtype with a larger range may help, if the weights themselves are sound"
_NOT_DRAWN = {
    HAS_NAN: RequestFailed(f"no token can be drawn: the model's logits for this prompt have a NaN{_BROKEN}"),
    HAS_INFINITY: RequestFailed(f"no token can be drawn: a logit of the model is infinite{_BROKEN}"),
    HAS_NO_TOKEN: RequestRefused(
        "no token may be drawn: logit_bias, min_tokens with its stop tokens, and structure rule out all"
    ),
}


@dataclass(frozen=True)
class _InFlightStep:
    """A submitted step, and its time of submission."""

    planned: PlannedStep
    began: float

    @property
    def step(self) -> BatchStep:
        """The step."""
        return self.planned.step


class InferenceEngine:
    """Continuous batching engine of one model.

    Args:
        executor: Executor of the steps.
        scheduler: Scheduler of the steps.
        limits: Limits of requests.
        tokenizer: Detokenizer of answers; None if only tokens are exchanged.
        clock: Monotonic clock in seconds.
        speculator: Source of drafts; None to disable speculation.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: EngineLimits,
        *,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.limits = limits
        self.tokenizer = tokenizer
        self._clock = clock
        self._structures = (
            StructureCompiler(tokenizer, end_token_ids=sorted(limits.eos_token_ids))
            if tokenizer is not None
            else None
        )
        self._open: dict[str, OpenRequest] = {}
        self._answer_of: dict[RunningSequence, OpenAnswer] = {}
        self._in_flight: deque[_InFlightStep] = deque()
        self._number_of = {name: number for number, name in enumerate(limits.adapters, 1)}
        self._pace = PromptPace()
        self._speculator = speculator
        self._collected = 0.0  # time of the last collected step
        self._num_arrived = 0
        self._weights_version = 0
        self._update_error: str | None = None  # error message after a partial update of the weights
        self._weights_stamp = executor.weights_stamp()
        self._totals = dict.fromkeys(_COUNTED, 0)

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight."""
        return bool(self._open or self._in_flight)

    @property
    def _has_readers(self) -> bool:
        """Whether a streamed answer is running, which long prompts would delay."""
        return any(sequence.request.is_streamed for sequence in self.scheduler.running)

    @property
    def _prompt_tokens(self) -> int | None:
        """Maximum number of prompt tokens in a step that also answers; None without streamed answers.

        A prompt delays streamed answers by one step at most. Each prompt to read adds the same amount;
        otherwise, in a steady state, prompts would wait for free seats while only half of a batch is
        computed.
        """
        pace = self._pace.prompt_tokens
        return pace * max(self.scheduler.num_to_read, 1) if pace is not None and self._has_readers else None

    def check(self, request: Request) -> None:
        """Check that a request can be served; safe in any thread.

        Raises:
            RequestRefused: `request` is too long for the window or the pool, has unknown tokens or an unknown
                adapter, or needs a text and the engine has no tokenizer.
        """
        refuse_unanswerable(request, self.limits, self.scheduler, has_tokenizer=self.tokenizer is not None)
        if request.params.structure is not None and self._structures is not None:
            self._structures.compile(request.params.structure)

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; calls of `step` pass its deltas to the listener.

        Raises:
            RequestRefused: `request` cannot be served.
            QueueFull: The queue is full.
            RequestFailed: An update of weights has failed midway, and none has succeeded since.
            ValueError: `request.request_id` is in use.
        """
        if self._update_error is not None:
            raise RequestFailed(self._update_error)
        self.check(request)
        if request.request_id in self._open:
            raise ValueError(f"a request {request.request_id!r} is in flight; each needs a name of its own")
        if self.limits.max_queue is not None and len(self.scheduler.waiting) >= self.limits.max_queue:
            raise QueueFull(f"{len(self.scheduler.waiting)} requests wait, as many as may; try again later")
        params = request.params
        room = self.limits.max_length - len(request.prompt_token_ids)
        opened = OpenRequest(
            request,
            listener,
            seed=fresh_seed() if params.seed is None else params.seed,
            arrived=self._clock(),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            end_tokens=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.limits.eos_token_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else {},
            number=self._num_arrived,
        )
        self._num_arrived += 1
        self._begin(opened)
        self._open[request.request_id] = opened

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request with its answers so far; does nothing if it has ended."""
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        for answer in opened.answers:
            if answer.finish_reason is None:
                self._drop(answer)
                opened.listener(answer.end(reason))
        for index in range(len(opened.answers), opened.request.params.n):
            opened.listener(Delta(request_id=request_id, index=index, finish_reason=reason))

    def fail(self, error: BaseException) -> None:
        """End all requests with an error; drops steps in flight and frees all blocks."""
        self._in_flight.clear()
        self.executor.discard()
        # An incomplete step may not have filled the blocks that are registered in the prefix cache.
        self.scheduler.pool.forget_all()
        for opened in list(self._open.values()):
            self._fail_one(opened, error)

    def _fail_one(self, opened: OpenRequest, error: BaseException) -> None:
        """End a request with an error."""
        if self._open.pop(opened.request.request_id, None) is None:
            return
        for answer in opened.answers:
            if answer.sequence in self._answer_of:
                # Blocks that may contain a NaN must not stay in the prefix cache.
                self.scheduler.pool.forget(answer.sequence.blocks)
                self._drop(answer)
        opened.listener(error)

    def step(self) -> bool:
        """Run one step, or collect the oldest of several in flight.

        An exception, Ctrl-C included, ends all requests with it: the results of the step are lost.

        Returns:
            True if a step was run.
        """
        try:
            return self._step()
        except BaseException as error:
            self.fail(error)
            raise

    def _step(self) -> bool:
        self._abort_timed_out()
        stamp = self.executor.weights_stamp()
        if stamp != self._weights_stamp:
            self._weights_stamp = stamp
            self.weights_changed()
        while len(self._in_flight) < self.executor.depth:
            self._draft()
            step = self.scheduler.schedule(self._prompt_tokens)
            if step is None:
                break
            self._submit(step)
        if not self._in_flight:
            return False
        self._collect()
        return True

    def _collect(self) -> None:
        pending = self._in_flight.popleft()
        result = self.executor.collect()
        self._note_pace(pending)
        self._totals["steps"] += 1
        self._apply(pending, result)

    def stats(self) -> EngineStats:
        """Return the current state."""
        pool = self.scheduler.pool
        free = pool.num_available - pool.num_cached
        return EngineStats(
            running=len(self.scheduler.running),
            queued=len(self.scheduler.waiting),
            blocks={"used": pool.num_used, "cached": pool.num_cached, "free": free},
            preemptions=self.scheduler.num_preemptions,
            draft_tokens=self._speculator.num_drafted if self._speculator else 0,
            accepted_draft_tokens=self._speculator.num_accepted if self._speculator else 0,
            weights_version=self._weights_version,
            **self._totals,
        )

    def weights_changed(self) -> None:
        """Invalidate cached prefixes of older weights; running requests continue."""
        self._weights_version += 1
        self.scheduler.pool.forget_all()
        for sequence in self.scheduler.waiting:
            sequence.begin_again(root_key(self._weights_version, sequence.request.adapter))

    def hold(self) -> None:
        """Admit no request before the next update of weights, or `release`."""
        self.scheduler.is_holding = True

    def release(self) -> None:
        """Admit requests again."""
        self.scheduler.is_holding = False

    @property
    def has_begun(self) -> bool:
        """Whether a request has begun and not ended."""
        return bool(self._in_flight) or self.scheduler.has_begun

    def update_weights(self, source: WeightSource, *, in_flight: str = "finish") -> None:
        """Replace all values of the model between two steps.

        Args:
            source: A file or folder as for `checkpoint`; in memory a model of the same class, or tensors by
                name, where the engine has one rank.
            in_flight: Treatment of requests that have begun. "finish": they finish first, with the old
                values, and no request begins meanwhile. "restart": they start over with the new values;
                streamed requests keep the tokens already sent and continue after them.

        Raises:
            ValueError: `source` has other names or shapes than the model (the message lists all), or
                `in_flight` is neither of these. Nothing has changed.
            OSError: `source` cannot be read. Nothing has changed.
            RequestFailed: `source` could not be read to its end, and the model has some of its values. All
                requests fail until an update succeeds.
        """
        if in_flight not in ("finish", "restart"):
            raise ValueError(f"in_flight={in_flight!r}; it must be 'finish' or 'restart'")
        try:
            self.hold()
            while in_flight == "finish" and self.has_begun:
                self.step()
            while self._in_flight:  # steps in flight use the old values: collect them first
                self._collect()
            self.executor.update_weights(source)
        except BaseException as error:
            if not self.executor.is_partly_updated:
                raise
            self._update_error = (
                f"the model has new weights in part, and answers again after a whole update: {error}"
            )
            failure = RequestFailed(self._update_error)
            self.fail(failure)
            raise failure from error
        finally:
            self.release()
        self._update_error = None
        self._totals["weight_updates"] += 1
        self._weights_stamp = self.executor.weights_stamp()
        self._start_over() if in_flight == "restart" else self.weights_changed()

    def _start_over(self) -> None:
        """Restart requests from their prompts, unless tokens have been streamed."""
        self.begin_again()
        for opened in list(self._open.values()):
            if opened.prompt_logprobs is not None and not opened.has_told_scores:
                opened.prompt_logprobs = {}
            if opened.request.is_streamed or not opened.has_answered:
                continue
            for answer in opened.answers:
                if answer.sequence in self._answer_of:
                    self._drop(answer)
            opened.answers.clear()
            if opened.prompt_logprobs is not None:
                opened.prompt_logprobs, opened.has_told_scores = {}, False
            self._begin(opened)
            opened.listener(Delta(request_id=opened.request.request_id, index=0, is_restart=True))

    def begin_again(self) -> None:
        """Recompute all running sequences from their first token with the current weights.

        Texts continue where they are. No step may be in flight.
        """
        assert not self._in_flight, "steps are in flight"
        names = {opened.request.adapter for opened in self._open.values()}
        self._weights_version += 1
        self.scheduler.pool.forget_all()
        roots: Mapping[str | None, bytes] = {name: root_key(self._weights_version, name) for name in names}
        self.scheduler.begin_again(roots)

    def _draft(self) -> None:
        """Draft tokens for sequences whose next token is due."""
        if self._speculator is None or self.scheduler.reads_prompt:
            return
        due = self.scheduler.due()
        rooms = {sequence: self._answer_of[sequence].room_for_draft for sequence in due}
        room = {sequence: most for sequence, most in rooms.items() if most > 0}
        for sequence, draft in self._speculator.drafts(room, len(due)).items():
            sequence.draft = self._answer_of[sequence].allowed(draft)

    def _note_pace(self, pending: _InFlightStep) -> None:
        now = self._clock()
        self._pace.note(pending.step, now - pending.began)
        # Several steps in flight end one after another: a step takes the time between two ends.
        seconds, self._collected = now - max(pending.began, self._collected), now
        if self._speculator is not None and pending.step.reads_no_prompt:
            self._speculator.note_step(pending.step.num_tokens, seconds)

    def _begin(self, opened: OpenRequest) -> None:
        """Queue the sequence that reads the prompt of a request."""
        request = opened.request
        sequence = RunningSequence(
            request,
            index=0,
            order=(request.priority, opened.number, 0),
            root=root_key(self._weights_version, request.adapter),
            num_answers=request.params.n,
        )
        self._add_answer(opened, sequence)
        self.scheduler.add(sequence)

    def _submit(self, step: BatchStep) -> None:
        began = self._clock()
        planned = plan_step(step, self._answer_of, self._number_of)
        self._in_flight.append(_InFlightStep(planned, began))
        self.executor.submit(planned.order)

    def _apply(self, pending: _InFlightStep, result: StepResult) -> None:
        row = scored_row = 0
        for chunk, count, positions in zip(
            pending.step.chunks, pending.planned.num_draws, pending.planned.scored, strict=True
        ):
            answer = self._answer_of.get(chunk.sequence)
            if answer is not None:  # None: it has ended meanwhile
                self._count_prompt(chunk)
                is_sound = self._score(answer, positions, result, scored_row)
                if not is_sound:
                    self._fail_one(answer.of, _NOT_DRAWN[HAS_NAN])
                elif count:
                    self._take(chunk, answer, result, range(row, row + count))
            row += count
            scored_row += len(positions)

    def _score(self, answer: OpenAnswer, positions: Sequence[int], result: StepResult, first: int) -> bool:
        """Store the log-probabilities of prompt tokens; return whether they are numbers."""
        for row, position in enumerate(positions, first):
            found = result.scored.logprobs_at(row)
            assert answer.of.prompt_logprobs is not None
            assert found is not None
            if math.isnan(found.logprob):
                return False
            answer.of.prompt_logprobs[position] = found
        return True

    def _take(self, chunk: SequenceChunk, answer: OpenAnswer, result: StepResult, rows: range) -> None:
        """Append the tokens drawn for a chunk to its answers."""
        token_ids = result.drawn.token_ids[rows.start : rows.stop].tolist()
        if chunk.num_drafted:
            drafted = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafted :]
            num_accepted = accepted(drafted, token_ids)
            added = [token_ids[: num_accepted + 1]]
            assert self._speculator is not None, "who else has guessed"
            self._speculator.note_draft(chunk.sequence, chunk.num_drafted, num_accepted)
        else:
            added = [[token] for token in token_ids]
        opened = answer.of
        if opened.failure is not None:
            self._fail_one(opened, _decoding_error(opened.failure))
            return
        failure = min(0, *(min(tokens) for tokens in added))
        if failure:
            self._fail_one(opened, _NOT_DRAWN[failure])
            return
        grown = self.scheduler.advance(chunk, added)
        # Create all answers before the first listener call, which may abort the request.
        answers = [self._answer_of.get(sequence) or self._add_answer(opened, sequence) for sequence in grown]
        row = rows.start
        for each, tokens in zip(answers, added, strict=True):
            if each.finish_reason:
                continue
            sequence = each.sequence
            logprobs = [result.drawn.logprobs_at(number) for number in range(row, row + len(tokens))]
            row += len(tokens)
            try:
                delta = each.end("length") if opened.max_tokens == 0 else each.take(tokens, logprobs)
            except Exception as error:  # a grammar or a tokenizer failed; other requests continue
                self._fail_one(opened, _decoding_error(error))
                return
            self._totals["generated_tokens"] += len(delta.token_ids)
            if sequence.index == 0:
                delta = self._with_scores(delta, opened)
            if each.finish_reason:
                self._drop(each)
            opened.listener(delta)
        if opened.is_over:
            self._open.pop(opened.request.request_id, None)

    def _with_scores(self, delta: Delta, opened: OpenRequest) -> Delta:
        """Add the log-probabilities of the prompt to the first delta of answer 0."""
        scores = opened.scores()
        if scores is None or opened.has_told_scores:
            return delta
        opened.has_told_scores = True
        return Delta(**{**vars(delta), "prompt_logprobs": scores})

    def _add_answer(self, opened: OpenRequest, sequence: RunningSequence) -> OpenAnswer:
        params = opened.request.params
        matcher = None
        if params.structure is not None:
            assert self._structures is not None, "submission requires a tokenizer for a structure"
            matcher = self._structures.compile(params.structure)
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, stop=params.stop, is_streamed=opened.request.is_streamed)
        answer = OpenAnswer(opened, sequence, text=text, matcher=matcher)
        opened.answers.append(answer)
        self._answer_of[sequence] = answer
        return answer

    def _drop(self, answer: OpenAnswer) -> None:
        del self._answer_of[answer.sequence]
        if self._speculator is not None:
            self._speculator.forget(answer.sequence)
        self.scheduler.remove(answer.sequence)

    def _count_prompt(self, chunk: SequenceChunk) -> None:
        sequence, opened = chunk.sequence, self._answer_of[chunk.sequence].of
        end = min(chunk.start + len(chunk.token_ids), sequence.num_prompt)
        self._totals["prompt_tokens"] += max(end - max(chunk.start, opened.num_read), 0)
        opened.num_read = max(opened.num_read, end)
        if not opened.has_begun:
            opened.has_begun = True
            self._totals["prefix_hit_tokens"] += sequence.num_cached or 0

    def _abort_timed_out(self) -> None:
        now = self._clock()
        late = [
            opened.request.request_id
            for opened in self._open.values()
            if opened.request.timeout_s is not None and now - opened.arrived >= opened.request.timeout_s
        ]
        for request_id in late:
            self.abort(request_id, "timeout")


def _decoding_error(error: Exception) -> RequestFailed:
    failed = RequestFailed(f"the answer cannot be gone on with: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
