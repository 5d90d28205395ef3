"""/v1/completions: what is asked reaches the engine, and what it says reaches the client, field by field."""

import itertools
import json
import math
from typing import Any

import pytest

from colossalai.inference import Delta, SamplingParams, Structure
from colossalai.serving._request_record import RequestRecord
from colossalai.serving.routes._openai import _DeltaBuffer
from tests.serving.conftest import Site
from tests.serving.fake import FakeService

pytestmark = pytest.mark.unit


def complete(site: Site, **body: Any) -> dict[str, Any]:
    answer = site.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected_text(service: FakeService, prompt: tuple[int, ...], num: int, index: int = 0) -> str:
    return service.tokenizer.decode(service.answer_ids(prompt, num, index))


def events(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream."""
    parts = text.removesuffix("\n\n").split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def streamed(site: Site, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    answer = site.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    return events(answer.text)


def test_a_text_is_continued(site: Site) -> None:
    site.service.cached_tokens = 1
    answer = complete(site, prompt="the longest river", max_tokens=5)
    prompt = site.service.seen[0].prompt_token_ids
    assert prompt == tuple(site.service.tokenizer("the longest river")["input_ids"])
    assert answer["choices"] == [
        {
            "index": 0,
            "text": expected_text(site.service, prompt, 5),
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 5,
        "total_tokens": len(prompt) + 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["id"] == site.service.seen[0].request_id


def test_every_form_of_a_prompt(site: Site) -> None:
    texts_as_tokens = [tuple(site.service.tokenizer(text)["input_ids"]) for text in ("the", "river")]
    forms: list[tuple[Any, list[tuple[int, ...]]]] = [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["the", "river"], texts_as_tokens),
    ]
    for prompt, expected in forms:
        num_seen = len(site.service.seen)
        answer = complete(site, prompt=prompt, max_tokens=3, n=2)
        found = sorted((each.request_id, each.prompt_token_ids) for each in site.service.seen[num_seen:])
        given = [tokens for _, tokens in found]
        assert given == expected
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [
            expected_text(site.service, tokens, 3, index) for tokens in given for index in range(2)
        ]
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, given))
        assert answer["usage"]["completion_tokens"] == 3 * len(texts)


def test_all_arguments_reach_the_engine(start: Any) -> None:
    site = start(options={"request_timeout_s": 50.0}, adapters=("poems",))
    complete(
        site,
        model="poems",
        prompt="the",
        n=2,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.8,
        top_k=3,
        min_p=0.1,
        min_tokens=1,
        stop=["xyz", "abc"],
        stop_token_ids=[4],
        ignore_eos=True,
        seed=11,
        logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.5,
        logit_bias={"5": -1, "6": 2.5},
        response_format={"type": "regex", "regex": "a+"},
        priority=-3,
        user="u",
        store=True,
        metadata={"a": {"b": 1}},
        service_tier="auto",
        safety_identifier="someone",
        prompt_cache_key="some",
        prompt_cache_retention="24h",
    )
    (request,) = site.service.seen
    assert (request.adapter, request.priority, request.timeout_s) == ("poems", -3, 50.0)
    assert request.params == SamplingParams(
        n=2,
        max_tokens=7,
        temperature=0.5,
        top_p=0.8,
        top_k=3,
        min_p=0.1,
        min_tokens=1,
        stop=("xyz", "abc"),
        stop_token_ids=(4,),
        ignore_eos=True,
        seed=11,
        logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.5,
        logit_bias={5: -1.0, 6: 2.5},
        structure=Structure(kind="regex", source="a+"),
    )


def test_structures(site: Site) -> None:
    schema = {"name": "x", "strict": True, "schema": {"type": "array"}}
    forms: list[tuple[dict[str, Any], Structure | None]] = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Structure(kind="json", source='{"type": "object"}')),
        (
            {"type": "json_schema", "json_schema": schema},
            Structure(kind="json", source='{"type": "array"}'),
        ),
    ]
    for number, (form, expected) in enumerate(forms):
        complete(site, prompt="the", max_tokens=1, response_format=form)
        assert site.service.seen[number].params.structure == expected


def test_the_defaults_are_openais(site: Site) -> None:
    complete(site, prompt="the")
    assert site.service.seen[0].params == SamplingParams(max_tokens=16)
    complete(site, prompt="the", temperature=None, stop=None, n=None, tools=None, best_of=None)
    assert site.service.seen[1].params == SamplingParams(max_tokens=16)


def test_max_tokens_is_cut_at_the_window(site: Site) -> None:
    answer = complete(site, prompt=[5] * 60, max_tokens=1000)
    assert site.service.seen[0].params.max_tokens == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    complete(site, prompt=[5] * 63, max_tokens=1000)
    assert site.service.seen[1].params.max_tokens == 1


def test_stop_and_timeout_are_told(start: Any) -> None:
    site = start()
    full = complete(site, prompt=[5], max_tokens=20)["choices"][0]["text"]
    stop = " and"
    answer = complete(site, prompt=[5], max_tokens=20, stop=stop)
    assert answer["choices"][0] == {
        "index": 0,
        "text": full[: full.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }
    hurried = start(options={"request_timeout_s": 0.0}, step_s=0.01)
    assert complete(hurried, prompt=[5], max_tokens=50)["choices"][0]["finish_reason"] == "timeout"
    assert hurried.outcomes()["finished"] == 1


def test_logprobs(site: Site) -> None:
    answer = complete(site, prompt=[5, 6], max_tokens=3, logprobs=1)
    found = answer["choices"][0]["logprobs"]
    ids = site.service.answer_ids((5, 6), 3)
    texts = [site.service.tokenizer.decode([token]) for token in ids]
    assert found["tokens"] == texts
    assert "".join(texts) == answer["choices"][0]["text"]
    assert found["token_logprobs"] == [-0.5 - token / 1000 for token in ids]
    assert found["text_offset"] == [0, len(texts[0]), len(texts[0] + texts[1])]
    assert found["top_logprobs"] == [
        {text: -0.5 - token / 1000} for text, token in zip(texts, ids, strict=True)
    ]
    bare = complete(site, prompt=[5, 6], max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert bare == {**found, "top_logprobs": None}


def test_echo_with_logprobs(site: Site) -> None:
    for stream, max_tokens in itertools.product((False, True), (0, 2)):
        echoes_with_logprobs(site, stream, max_tokens)


def echoes_with_logprobs(site: Site, stream: bool, max_tokens: int) -> None:
    text = "the river"
    prompt = site.service.tokenizer(text)["input_ids"]
    body = {"prompt": text, "max_tokens": max_tokens, "n": 2, "logprobs": 1, "echo": True}
    if stream:
        parts = [choice for chunk in streamed(site, **body) for choice in chunk["choices"]]
    else:
        parts = complete(site, **body)["choices"]
    for index in range(2):
        own = [part for part in parts if part["index"] == index]
        added = site.service.answer_ids(tuple(prompt), max_tokens, index)
        assert "".join(part["text"] for part in own) == text + site.service.tokenizer.decode(added)
        logprobs = [part["logprobs"] for part in own]
        tokens = [token for each in logprobs for token in each["tokens"]]
        assert tokens[: len(prompt)] == [site.service.tokenizer.decode([token]) for token in prompt]
        values = [value for each in logprobs for value in each["token_logprobs"]]
        assert values[: len(prompt)] == [None] + [-0.5 - token / 1000 for token in prompt[1:]]
        assert logprobs[0]["top_logprobs"][0] is None
        offsets = [offset for each in logprobs for offset in each["text_offset"]]
        assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
        if max_tokens:
            assert tokens[len(prompt) :] == [site.service.tokenizer.decode([token]) for token in added]


def test_what_cannot_be_has_a_number(site: Site) -> None:
    site.service.logprob_of = lambda token: -math.inf
    body = {"prompt": [5, 6], "max_tokens": 2, "logprobs": 0}
    for last in (complete(site, **body), streamed(site, **body)[-1]):
        assert set(last["choices"][0]["logprobs"]["token_logprobs"]) == {-9999.0}


def test_other_answers_wait_for_the_prompts_own_part() -> None:
    record = RequestRecord({"type": "http", "method": "POST", "path": "/v1/completions"})
    holder = _DeltaBuffer(True)

    def delta(index: int, text: str) -> Delta:
        return Delta(request_id=record.request_id, index=index, text=text)

    assert holder.pass_on([(0, delta(1, "a")), (1, delta(0, "b"))]) == [(1, delta(0, "b"))]
    assert holder.pass_on([(0, delta(1, "c")), (1, delta(1, "d"))]) == [(1, delta(1, "d"))]
    expected = [(0, delta(0, "e")), (0, delta(1, "a")), (0, delta(1, "c")), (0, delta(1, "f"))]
    assert holder.pass_on([(0, delta(0, "e")), (0, delta(1, "f"))]) == expected
    assert _DeltaBuffer(False).pass_on([(0, delta(1, "a"))]) == [(0, delta(1, "a"))]


def test_echo_of_tokens_without_logprobs(site: Site) -> None:
    prompt = tuple(site.service.tokenizer("the river")["input_ids"])
    answer = complete(site, prompt=list(prompt), max_tokens=2, echo=True)
    assert answer["choices"][0]["text"] == "the river" + expected_text(site.service, prompt, 2)
    assert answer["choices"][0]["logprobs"] is None
    alone = complete(site, prompt="the river", max_tokens=0, echo=True)
    assert alone["choices"][0]["text"] == "the river"
    assert alone["usage"]["completion_tokens"] == 0


def test_a_stream_is_the_whole_in_pieces(site: Site) -> None:
    body = {"prompt": ["the longest", "river of all"], "max_tokens": 6, "n": 2, "seed": 1}
    whole = complete(site, **body)
    chunks = streamed(site, **body, stream_options={"include_usage": True})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
    assert "usage" not in streamed(site, **body)[0]


def test_chunks_come_when_the_engine_makes_them(site: Site) -> None:
    site.service.hold(2)
    with site.client.stream("POST", "/v1/completions", json={"prompt": [5], "stream": True}) as answer:
        found = answer.iter_lines()
        texts = []
        while len(texts) < 2:
            line = next(found)
            if line:
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        ids = site.service.answer_ids((5,), 2)
        assert texts == [site.service.tokenizer.decode([token]) for token in ids]
        assert site.service.num_running == 1
        site.service.release()
        assert list(found)[-2:] == ["data: [DONE]", ""]


def test_tokens_alone_without_a_tokenizer(start: Any) -> None:
    site = start(tokenizer=None)
    answer = complete(site, prompt=[5, 6], max_tokens=3, logprobs=0)
    assert answer["choices"][0]["logprobs"]["tokens"] == [
        f"token:{token}" for token in site.service.answer_ids((5, 6), 3)
    ]
    for path, body in (
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
        ("/generation", {"prompt": "the"}),
    ):
        refused = site.client.post(path, json=body)
        assert refused.status_code == 400
        assert "no tokenizer" in refused.json()["error"]["message"]


def test_models(start: Any) -> None:
    site = start(adapters=("poems", "a/b"))
    found = site.client.get("/v1/models").json()
    assert found["object"] == "list"
    assert [card["id"] for card in found["data"]] == ["fake", "poems", "a/b"]
    one = site.client.get("/v1/models/a/b").json()
    assert one == {
        "id": "a/b",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "colossalai",
        "max_length": 64,
        "has_chat_template": True,
        "parent": "fake",
    }
    assert found["data"][0]["parent"] is None
    assert site.client.get("/v1/models/c").status_code == 404
