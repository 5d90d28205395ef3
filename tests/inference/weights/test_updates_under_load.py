"""Updates while requests run: which texts are of old weights, which of new ones, and that none is mixed."""

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from colossalai.inference import EngineStopped, ModelInfo, Request, SamplingParams, ThreadedEngine
from colossalai.inference._build import build_engine
from colossalai.inference._engine import InferenceEngine
from colossalai.inference._llm import LLM, Collector
from colossalai.inference._load import EngineOptions
from tests.inference.models import prompts
from tests.inference.weights.pairs import POOL, new_model, old_model, texts

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
LENGTHS = (5, 60, 17, 33, 8, 40, 1, 64)
LONG = SamplingParams(max_tokens=24, temperature=0)
LIMIT_S = 60.0


class Notes(Collector):
    """Notes an answer, and how many tokens of it were known when."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.over = threading.Event()
        self.num_restarts = 0
        self.heard: list[int] = []

    def on_delta(self, heard: Any) -> None:
        super().on_delta(heard)
        if not isinstance(heard, BaseException):
            self.num_restarts += heard.is_restart
            self.heard += heard.token_ids
        if self.is_over:
            self.over.set()


def engine(family: str = "Llama", **options: Any) -> InferenceEngine:
    settings = EngineOptions(kv_memory=POOL, is_owned=True, **options)
    return build_engine(old_model(family), None, settings)


def submitted(
    made: InferenceEngine, params: SamplingParams = LONG, *, is_streamed: bool = False
) -> list[Notes]:
    notes = []
    for number, prompt in enumerate(prompts(*LENGTHS)):
        request = Request(
            request_id=str(number), prompt_token_ids=tuple(prompt), params=params, is_streamed=is_streamed
        )
        notes.append(Notes(request))
        made.submit(request, notes[-1].on_delta)
    return notes


@cache
def expected() -> tuple[Any, Any]:
    old, new = (LLM(make("Llama"), kv_memory=POOL, is_owned=True) for make in (old_model, new_model))
    return texts(old, LENGTHS, LONG), texts(new, LENGTHS, LONG)


def finish(made: InferenceEngine) -> None:
    while made.has_work:
        assert made.step()
    made.scheduler.pool.check([])


@pytest.mark.parametrize("num_blocks", [None, 7], ids=["room for all", "preempted"])
def test_finish_lets_what_runs_end_with_old_weights(num_blocks: int | None) -> None:
    memory = {} if num_blocks is None else {"max_running": 4}
    made = engine(**memory)
    if num_blocks is not None:  # so few that those who run throw each other out
        bytes_per_block = made.executor.runner.bytes_per_block
        made = build_engine(
            old_model("Llama"),
            None,
            EngineOptions(
                kv_memory=num_blocks * bytes_per_block, is_owned=True, max_length=100, max_running=4
            ),
        )
    before, after = expected()
    notes = submitted(made)
    for _ in range(3):
        made.step()
    begun = [note for note in notes if made._open[note.request.request_id].answers[0].sequence.has_begun]
    assert begun
    if num_blocks is not None:
        assert len(begun) < len(notes)
    made.update_weights(new_model("Llama"))
    assert all(note.is_over for note in begun)
    finish(made)
    for note, old, new in zip(notes, before, after, strict=True):
        assert note.output().token_ids == (old if note in begun else new)
        assert note.num_restarts == 0
    if num_blocks is not None:
        assert made.stats().preemptions


def test_nobody_is_let_in_while_others_finish() -> None:
    made = engine(max_running=3)
    before, after = expected()
    notes = submitted(made)
    for _ in range(3):
        made.step()
    made.abort("1")  # there is room for another one
    made.update_weights(new_model("Llama"))
    finish(made)
    found = [note.output().token_ids for note in notes]
    assert [found[0], *found[2:]] == [before[0], before[2], *after[3:]]


@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=24, seed=3, n=2)], ids=["greedy", "n=2"])
def test_restart_answers_anew_from_the_prompt(params: SamplingParams) -> None:
    made = engine()
    notes = submitted(made, params)
    for _ in range(9):
        made.step()
    assert any(note.heard for note in notes)
    made.update_weights(new_model("Llama"), in_flight="restart")
    finish(made)
    fresh = build_engine(new_model("Llama"), None, EngineOptions(kv_memory=POOL, is_owned=True))
    wanted = submitted(fresh, params)
    finish(fresh)
    for note, other in zip(notes, wanted, strict=True):
        assert note.output().outputs == other.output().outputs
        assert note.output().usage.completion_tokens == other.output().usage.completion_tokens
    assert sum(note.num_restarts for note in notes) >= 1


def test_restart_goes_on_behind_what_was_streamed() -> None:
    made = engine()
    notes = submitted(made, is_streamed=True)
    for _ in range(9):
        made.step()
    sent = [tuple(note.heard) for note in notes]
    assert any(sent)
    made.update_weights(new_model("Llama"), in_flight="restart")
    finish(made)
    fresh = LLM(new_model("Llama"), kv_memory=POOL, is_owned=True)
    for note, prompt, first in zip(notes, prompts(*LENGTHS), sent, strict=True):
        assert note.num_restarts == 0
        rest = SamplingParams(max_tokens=24 - len(first), temperature=0)
        wanted = fresh.generate([*prompt, *first], rest)[0].token_ids
        assert note.output().token_ids == first + wanted


def test_an_unknown_way_is_refused_and_holds_nobody() -> None:
    made = engine()
    with pytest.raises(ValueError, match="in_flight='drop'; it must be 'finish' or 'restart'"):
        made.update_weights(new_model("Llama"), in_flight="drop")
    submitted(made)
    finish(made)


@pytest.fixture
def service() -> Iterator[ThreadedEngine]:
    made = engine()
    info = ModelInfo(name="tiny", max_length=512, vocab_size=200, created=0)
    threaded = ThreadedEngine(made, info)
    thread = threading.Thread(target=threaded.run)
    thread.start()
    yield threaded
    threaded.stop()
    thread.join(LIMIT_S)


@pytest.mark.parametrize("in_flight", ["finish", "restart"])
def test_under_load_no_text_is_mixed(service: ThreadedEngine, in_flight: str, tmp_path: Path) -> None:
    for name, make in (("old", old_model), ("new", new_model)):
        make("Llama").save_pretrained(tmp_path / name)
    before, after = expected()
    notes: list[tuple[int, Notes]] = []
    ended = threading.Event()

    def ask() -> None:
        number = 0
        while not ended.is_set():
            for place, prompt in enumerate(prompts(*LENGTHS)):
                request = Request(
                    request_id=str(number), prompt_token_ids=tuple(prompt), params=LONG, is_streamed=False
                )
                number += 1
                notes.append((place, Notes(request)))
                service.submit(request, notes[-1][1].on_delta)
            assert notes[-1][1].over.wait(LIMIT_S)

    asker = threading.Thread(target=ask)
    asker.start()
    for number in range(6):
        service.update_weights(str(tmp_path / ("new", "old")[number % 2]), in_flight=in_flight)
    with pytest.raises(ValueError, match="it must be"):
        service.update_weights(str(tmp_path / "new"), in_flight="drop")
    with pytest.raises((ValueError, OSError)):
        service.update_weights(str(tmp_path / "missing"), in_flight=in_flight)
    ended.set()
    asker.join(LIMIT_S)
    for place, note in notes:
        assert note.over.wait(LIMIT_S)
        assert note.output().token_ids in (before[place], after[place])
    assert service.stats().weight_updates == 6


def test_an_update_waits_so_long_and_no_longer() -> None:
    info = ModelInfo(name="tiny", max_length=2048, vocab_size=200, created=0)
    threaded = ThreadedEngine(engine(), info, finish_limit_s=0)
    thread = threading.Thread(target=threaded.run)
    thread.start()
    begun = threading.Event()
    params = SamplingParams(max_tokens=2000, temperature=0)
    request = Request(request_id="a", prompt_token_ids=(5, 6), params=params)
    threaded.submit(request, lambda heard: begun.set())
    try:
        assert begun.wait(LIMIT_S)
        with pytest.raises(TimeoutError, match="1 requests still run after 0 s, and nothing has changed"):
            threaded.update_weights(new_model("Llama"), in_flight="finish")
        threaded.abort("a")
        threaded.update_weights(new_model("Llama"), in_flight="finish")
        assert threaded.stats().weight_updates == 1
    finally:
        threaded.stop()
        thread.join(LIMIT_S)
    with pytest.raises(EngineStopped):
        threaded.update_weights("x", in_flight="finish")
