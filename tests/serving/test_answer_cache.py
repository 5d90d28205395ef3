"""The cache of answers: what would be answered the same again, by all that shapes it."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from colossalai.inference import (
    Delta,
    Request,
    SamplingParams,
    Structure,
    TokenLogprobs,
)
from colossalai.serving.command._answer_cache import AnswerCache, key_of
from tests.serving.conftest import Site, wait_until
from tests.serving.fake import FakeService

pytestmark = pytest.mark.unit
GREEDY = SamplingParams(max_tokens=4, temperature=0)


class Asker:
    """A cache before an engine, and what is heard."""

    def __init__(self, service: FakeService, **options: Any) -> None:
        self.service = service
        self.cache = AnswerCache(service, **{"num_requests": 2, **options})
        self._number = 0

    def ask(self, prompt: tuple[int, ...] = (5, 6), params: SamplingParams = GREEDY) -> list[Any]:
        """Return all that is said of a request, to its end."""
        heard: list[Any] = []
        self._number += 1
        request = Request(request_id=f"asked-{self._number}", prompt_token_ids=prompt, params=params)
        self.cache.submit(request, heard.append)

        def is_over() -> bool:
            ends = sum(isinstance(each, BaseException) or each.finish_reason is not None for each in heard)
            return ends >= (1 if any(isinstance(each, BaseException) for each in heard) else params.n)

        wait_until(is_over)
        assert all(isinstance(each, BaseException) or each.request_id == request.request_id for each in heard)
        return heard

    def is_hit(self, prompt: tuple[int, ...] = (5, 6), params: SamplingParams = GREEDY) -> bool:
        """Ask, and return whether the engine was left alone; `hits` says the same."""
        before, hits = len(self.service.seen), self.cache.stats().answer_cache_hits
        self.ask(prompt, params)
        is_hit = len(self.service.seen) == before
        assert self.cache.stats().answer_cache_hits == hits + is_hit
        return is_hit


@pytest.fixture
def make(tokenizer: Any, request: pytest.FixtureRequest) -> Callable[..., Asker]:
    def make(**options: Any) -> Asker:
        service = FakeService(tokenizer)
        request.addfinalizer(service.stop)
        return Asker(service, **options)

    return make


def joined(heard: list[Delta]) -> tuple[str, tuple[int, ...], Any]:
    return (
        "".join(each.text for each in heard),
        sum((each.token_ids for each in heard), ()),
        heard[-1].finish_reason,
    )


def test_the_same_request_is_answered_in_one_piece(make: Callable[..., Asker]) -> None:
    asker = make()
    first, second = asker.ask(), asker.ask()
    assert len(first) > 1
    assert len(second) == 1
    assert joined(second) == joined(first)
    assert second[0].cached_tokens == 2
    assert asker.cache.stats().answer_cache_hits == 1
    assert len(asker.service.seen) == 1


def test_only_determined_answers_are_kept(make: Callable[..., Asker]) -> None:
    asker = make(num_requests=10)
    drawn = SamplingParams(max_tokens=4, temperature=0.7)
    assert not any(asker.is_hit(params=drawn) for _ in range(3))
    seeded = SamplingParams(max_tokens=4, temperature=0.7, seed=3)
    assert [asker.is_hit(params=seeded) for _ in range(3)] == [False, True, True]
    assert not asker.is_hit(params=drawn)


CHANGES: dict[str, Any] = {
    "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop": ("x",),
    "stop_token_ids": (3,), "ignore_eos": True, "min_tokens": 1, "seed": 2, "logprobs": 1,
    "prompt_logprobs": 1, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5,
    "logit_bias": {4: 1.0}, "structure": Structure(kind="regex", source="a*"),
}  # fmt: skip


def test_all_that_shapes_an_answer_is_in_its_key() -> None:
    assert set(CHANGES) == {field.name for field in fields(SamplingParams)}
    plain = {"max_tokens": 4, "temperature": 0.7, "seed": 1}

    def key(prompt: tuple[int, ...] = (5, 6), adapter: str | None = None, **changes: Any) -> Any:
        params = SamplingParams(**{**plain, **changes})
        return key_of(Request(request_id="a", prompt_token_ids=prompt, params=params, adapter=adapter))

    keys = [key(), key((5,)), key(adapter="b"), *(key(**{name: value}) for name, value in CHANGES.items())]
    assert len(set(keys)) == len(keys)
    assert key() == key()
    assert key(logit_bias={1: 2.0, 3: 4.0}) == key(logit_bias={3: 4.0, 1: 2.0})
    assert key(temperature=0, seed=1) == key(temperature=0, seed=2) == key(temperature=0, seed=None)


def test_the_least_recently_used_goes_first(make: Callable[..., Asker]) -> None:
    asker = make(num_requests=2)
    assert not asker.is_hit((5,))
    assert not asker.is_hit((6,))
    assert asker.is_hit((5,))
    assert not asker.is_hit((7,))  # 6 goes
    assert asker.is_hit((5,))
    assert asker.is_hit((7,))
    assert not asker.is_hit((6,))


def test_as_many_answers_of_one_request_as_may_be(make: Callable[..., Asker]) -> None:
    asker = make(most_answers=2)
    two, three = (SamplingParams(max_tokens=3, temperature=1, seed=1, n=n) for n in (2, 3))
    first, second = asker.ask(params=two), asker.ask(params=two)
    assert [each.index for each in second] == [0, 1]
    for index in range(2):
        same = [[each for each in heard if each.index == index] for heard in (first, second)]
        assert joined(same[0]) == joined(same[1])
    assert not any(asker.is_hit(params=three) for _ in range(2))


def test_fixed_prompts_stay(make: Callable[..., Asker], tokenizer: Any) -> None:
    prompt = tuple(tokenizer(" the longest")["input_ids"])
    asker = make(num_requests=1, fixed=[(" the longest", 4)])
    assert not asker.is_hit(prompt)
    for other in range(5, 9):
        assert not asker.is_hit((other,))
    assert asker.is_hit(prompt)
    shorter = SamplingParams(max_tokens=3, temperature=0)
    assert not asker.is_hit(prompt, shorter)  # another number of tokens is not fixed
    assert not asker.is_hit((5,))
    assert not asker.is_hit(prompt, shorter)
    asker.cache.update_weights("new", in_flight="finish")
    assert not asker.is_hit(prompt)


def test_fixed_prompts_need_a_tokenizer() -> None:
    service = FakeService(None)
    try:
        with pytest.raises(ValueError, match="no tokenizer: leave them out"):
            AnswerCache(service, num_requests=1, fixed=[("a", 1)])
    finally:
        service.stop()


def test_new_weights_void_it_also_for_what_is_under_way(make: Callable[..., Asker]) -> None:
    asker = make()
    asker.ask()
    asker.cache.update_weights("new", in_flight="finish")
    assert asker.service.loaded == [("new", "finish")]
    assert not asker.is_hit()
    heard: list[Any] = []
    asker.service.hold(1)
    asker.cache.submit(Request(request_id="old", prompt_token_ids=(9,), params=GREEDY), heard.append)
    wait_until(lambda: len(heard) > 0)
    asker.cache.update_weights("newer", in_flight="restart")
    asker.service.release()
    wait_until(lambda: heard[-1].finish_reason is not None)
    assert not asker.is_hit((9,))


def test_what_was_cut_short_or_has_failed_is_not_kept(make: Callable[..., Asker]) -> None:
    asker = make()
    heard: list[Any] = []
    asker.service.hold(1)
    asker.cache.submit(Request(request_id="left", prompt_token_ids=(5, 6), params=GREEDY), heard.append)
    wait_until(lambda: len(heard) > 0)
    asker.cache.abort("left")
    asker.service.release()
    wait_until(lambda: heard[-1].finish_reason is not None)
    assert heard[-1].finish_reason == "abort"
    asker.service.fail_at = 1
    assert isinstance(asker.ask()[-1], BaseException)
    asker.service.fail_at = None
    assert not asker.is_hit()
    assert asker.is_hit()


def test_log_probabilities_are_kept(make: Callable[..., Asker]) -> None:
    asker = make()
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1)
    first, second = asker.ask(params=params), asker.ask(params=params)
    found: tuple[TokenLogprobs, ...] = sum((each.logprobs for each in first), ())
    assert len(found) == 3
    assert second[0].logprobs == found


def test_over_http_it_streams_as_one_delta_and_is_counted(start: Callable[..., Site]) -> None:
    site = start()
    front = site.server._app.front
    front.service = AnswerCache(site.service, num_requests=4)
    front.metrics._service = front.service
    body = {"prompt": " the longest", "max_tokens": 6, "temperature": 0}
    texts = [site.client.post("/v1/completions", json=body).json() for _ in range(2)]
    assert texts[0]["choices"] == texts[1]["choices"]
    assert texts[1]["usage"]["completion_tokens"] == 6
    lines = site.client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    assert len([line for line in lines if line.startswith("data: {")]) == 1
    assert 'colossalai_answer_cache_hits_total{model="fake"} 2.0' in site.client.get("/metrics").text
