"""An engine without a model: a thread that answers token by token, as slowly as a test wants it to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from colossalai.inference import (
    Delta,
    EngineStats,
    EngineStopped,
    Listener,
    ModelInfo,
    QueueFull,
    Request,
    RequestFailed,
    RequestRefused,
    TokenLogprobs,
)

LIMIT_S = 300.0  # for what takes a moment on an idle machine

SENTENCE = " the longest river of all goes on and on until it meets the sea, and there it ends"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of a few hundred tokens, with a token that begins each text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([SENTENCE] * 8, trainer)
    inner.save(str(folder / "tokenizer.json"))
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


@dataclass
class Job:
    request: Request
    listener: Listener
    made: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    end_s: float | None = None


class FakeService:
    """Answers every prompt with a sentence, from a place in it that the prompt decides on.

    Args:
        tokenizer: Of `make_tokenizer`, or None.
        window: Most tokens of prompt and answer.
        slots: Requests that run at once.
        max_queue: Requests that wait at most.
        step_s: Seconds of a step.
        adapters: Names beside the model's.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        window: int = 64,
        slots: int = 4,
        max_queue: int = 1000,
        step_s: float = 0.0,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        vocab_size = len(tokenizer) if tokenizer is not None else 320
        self.info = ModelInfo(
            name="fake", max_length=window, vocab_size=vocab_size, created=1_700_000_000, adapters=adapters
        )
        self.slots, self.max_queue, self.step_s = slots, max_queue, step_s
        self.sentence = _ids(tokenizer, SENTENCE) if tokenizer is not None else list(range(2, 30))
        self.steps_allowed: int | None = None  # None: as many as there are
        self.cached_tokens = 0
        self.fail_at: int | None = None  # a request fails at its token of this number
        self.failure: BaseException = RuntimeError("rank 1 has died")
        self.refuse: Callable[[Request], bool] = lambda request: False
        self.logprob_of: Callable[[int], float] = lambda token: -0.5 - token / 1000
        self.loaded: list[tuple[str, str]] = []
        self.load_gate = threading.Event()
        self.load_gate.set()
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.totals = {"prompt_tokens": 0, "generated_tokens": 0, "steps": 0}
        self._lock = threading.Condition()
        self._running: list[Job] = []
        self._queued: list[Job] = []
        self._is_stopping = False
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        with self._lock:
            if self._is_stopping:
                raise EngineStopped("the fake engine has ended")
            if self.refuse(request):
                raise RequestRefused(f"{request.request_id} is refused by the test")
            if len(self._queued) >= self.max_queue:
                raise QueueFull(f"{len(self._queued)} requests wait, which is the most")
            self.seen.append(request)
            job = Job(request, listener, open=set(range(request.params.n)))
            job.texts = [""] * request.params.n
            if request.timeout_s is not None:
                job.end_s = time.monotonic() + request.timeout_s
            self._queued.append(job)
            self._lock.notify_all()

    def abort(self, request_id: str) -> None:
        with self._lock:
            for jobs in (self._running, self._queued):
                for job in [each for each in jobs if each.request.request_id == request_id]:
                    jobs.remove(job)
                    self.aborted.append(request_id)
                    for index in sorted(job.open):
                        job.listener(Delta(request_id=request_id, index=index, finish_reason="abort"))
            self._lock.notify_all()

    def stats(self) -> EngineStats:
        with self._lock:
            if self._is_stopping:
                raise EngineStopped("the fake engine has ended")
            used = 2 * len(self._running)
            return EngineStats(
                running=len(self._running),
                queued=len(self._queued),
                blocks={"used": used, "cached": 1, "free": 2 * self.slots - used},
                **self.totals,
            )

    def update_weights(self, path: str, *, in_flight: str) -> None:
        if path == "missing":
            raise ValueError(f"path={path!r} is no checkpoint of this model")
        kinds = {"torn": RequestFailed, "busy": TimeoutError, "unread": FileNotFoundError}
        if path in kinds:
            raise kinds[path](f"{path}, it said")
        assert self.load_gate.wait(LIMIT_S)
        self.loaded.append((path, in_flight))

    def stop(self, error: BaseException | None = None) -> None:
        """End; what runs hears `error`, or is ended as by an abort."""
        with self._lock:
            self._is_stopping = self._is_ended = True
            for job in (*self._running, *self._queued):
                job.listener(error or EngineStopped("the fake engine has ended"))
            self._running, self._queued = [], []
            self._lock.notify_all()
        self._thread.join(LIMIT_S)

    def hold(self, steps: int = 0) -> None:
        """Run no more than some steps, until `release`."""
        with self._lock:
            self.steps_allowed = steps
            self._lock.notify_all()

    def release(self) -> None:
        with self._lock:
            self.steps_allowed = None
            self._lock.notify_all()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until something of the engine is so."""
        with self._lock:
            assert self._lock.wait_for(what, LIMIT_S), (
                f"it did not come to that: of {len(self.seen)} requests {self.num_running} run, "
                f"{self.num_queued} wait, {len(self.aborted)} were aborted; {self.steps_allowed=}"
            )

    def is_idle(self) -> bool:
        return not self._running and not self._queued

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def answer_ids(self, prompt: tuple[int, ...], num: int, index: int = 0) -> list[int]:
        """Return the tokens of an answer."""
        start = sum(prompt) + index
        return [self.sentence[(start + place) % len(self.sentence)] for place in range(num)]

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_ended or (self._has_work() and self.steps_allowed != 0))
                if self._is_ended:
                    return
                while self._queued and len(self._running) < self.slots:
                    job = self._queued.pop(0)
                    self.totals["prompt_tokens"] += len(job.request.prompt_token_ids)
                    self._running.append(job)
                if self.steps_allowed is not None:
                    self.steps_allowed -= 1
                self.totals["steps"] += 1
                for job in list(self._running):
                    self._step(job)
                self._lock.notify_all()
            if self.step_s:
                time.sleep(self.step_s)

    def _has_work(self) -> bool:
        return bool(self._running or self._queued)

    def _step(self, job: Job) -> None:
        request, place = job.request, len(job.made)
        params = request.params
        if self.fail_at == place:
            self._running.remove(job)
            job.listener(self.failure)
            return
        job.made.append(0)
        most = params.max_tokens if params.max_tokens is not None else self.info.max_length
        for index in sorted(job.open):
            token = self.answer_ids(request.prompt_token_ids, place + 1, index)[place]
            text = self._text(token)
            finish = "length" if place + 1 >= most else None
            if job.end_s is not None and time.monotonic() > job.end_s:
                finish = "timeout"
            stop = next((each for each in params.stop if each in job.texts[index] + text), None)
            if stop is not None:
                whole = job.texts[index] + text
                text, finish = whole[: whole.index(stop)][len(job.texts[index]) :], "stop"
            job.texts[index] += text
            is_empty = most == 0
            prompt = request.prompt_token_ids
            job.listener(
                Delta(
                    request_id=request.request_id,
                    index=index,
                    token_ids=() if is_empty else (token,),
                    text="" if is_empty else text,
                    logprobs=None if params.logprobs is None else self._logprobs((token,), params.logprobs),
                    prompt_logprobs=self._logprobs(prompt[1:], params.prompt_logprobs)
                    if params.prompt_logprobs is not None and place == 0 and index == 0
                    else None,
                    finish_reason=finish,
                    stop_reason=stop,
                    cached_tokens=min(self.cached_tokens, len(prompt)),
                )
            )
            self.totals["generated_tokens"] += not is_empty
            if finish is not None:
                job.open.discard(index)
        if not job.open:
            self._running.remove(job)
            self.ended.append(request.request_id)

    def _logprobs(self, tokens: tuple[int, ...], num: int) -> tuple[TokenLogprobs, ...]:
        return tuple(
            TokenLogprobs(
                token_id=token,
                logprob=self.logprob_of(token),
                top=tuple(((token + k) % self.info.vocab_size, -0.5 - token / 1000 - k) for k in range(num)),
            )
            for token in tokens
        )

    def _text(self, token: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode([token])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def totals(text: str) -> Mapping[str, float]:
    """Return the requests of a page of metrics by outcome, and those that were received."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "colossalai_requests_total":
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0.0) + sample.value
            elif sample.name == "colossalai_requests_received_total":
                found["received"] = found.get("received", 0.0) + sample.value
    return found
