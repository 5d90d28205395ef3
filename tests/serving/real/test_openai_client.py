"""The openai client against a server and a model: what it reads is what the engine computes."""

import json
from collections.abc import Iterator

import openai
import pytest

from colossalai.inference import LLM, SamplingParams
from tests.serving.real.conftest import KEY, Reached

pytestmark = pytest.mark.unit

PROMPT = "the quick"
CHAT = [{"role": "user", "content": "fox"}]
CHAT_PROMPT = "user: fox\nassistant:"
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture
def client(reached: Reached) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{reached.port}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_a_completion_is_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, GREEDY)
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert found.choices[0].text == expected.text != ""
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    tokens = client.completions.create(
        model="tiny", prompt=list(expected.prompt_token_ids), max_tokens=24, temperature=0
    )
    assert tokens.choices[0].text == expected.text


def test_a_stream_is_the_same_text(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, GREEDY)
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == expected.finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)


def test_a_chat_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(CHAT_PROMPT, GREEDY)
    asked = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 24, "temperature": 0}
    found = client.chat.completions.create(**asked)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(pieces) == expected.text
    assert len([piece for piece in pieces if piece]) > 1


def test_log_probabilities_are_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, logprobs=2))
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2)
    assert expected.logprobs is not None
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([each.logprob for each in expected.logprobs], abs=1e-4)
    assert all(
        max(top.values()) == pytest.approx(value, abs=1e-4)
        for top, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    (expected,) = llm.generate(CHAT_PROMPT, SamplingParams(max_tokens=8, temperature=0, logprobs=3))
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    for ours, theirs in zip(expected.logprobs or (), chat.choices[0].logprobs.content, strict=True):
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)
        assert [each.logprob for each in theirs.top_logprobs] == pytest.approx(
            [value for _, value in ours.top], abs=1e-4
        )


def test_seeds_and_several_answers(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=16, seed=5, n=2))
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "n": 2}
    found, again, other = (
        [choice.text for choice in client.completions.create(**asked, seed=seed).choices]
        for seed in (5, 5, 6)
    )
    assert found == again == [each.text for each in expected.outputs]
    assert found[0] != found[1]
    assert other != found
    parts = ["", ""]
    for chunk in client.completions.create(**asked, seed=5, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == found


def test_a_text_ends_before_its_stop(client: openai.OpenAI, llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY)
    stop = whole.text[len(whole.text) // 2 :][:2]
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=["never of this", stop]
    )
    assert found.choices[0].text == whole.text[: whole.text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    found = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert json.loads(found.choices[0].message.content)["n"] in (1, 22)


def test_what_is_not_there_is_refused_by_name(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported: this server calls no tools"):
        client.chat.completions.create(model="tiny", messages=CHAT, tools=[tool])
    with pytest.raises(openai.BadRequestError, match=r"suffix is not supported|best_of is not supported"):
        client.completions.create(model="tiny", prompt=PROMPT, suffix="b", best_of=2)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'; known ones are 'tiny'"):
        client.completions.create(model="gpt-4", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match=r"the model's window is 512 tokens"):
        client.completions.create(model="tiny", prompt=[5] * 600)
    with pytest.raises(openai.BadRequestError, match="regular expression"):
        client.completions.create(
            model="tiny", prompt=PROMPT, extra_body={"response_format": {"type": "regex", "regex": "(("}}
        )


def test_a_key_is_asked_for(reached: Reached, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    wrong = openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    for ask in (
        wrong.models.list,
        lambda: wrong.completions.create(model="tiny", prompt=PROMPT),
        lambda: wrong.chat.completions.create(model="tiny", messages=CHAT, stream=True),
    ):
        with pytest.raises(openai.AuthenticationError):
            ask()
    wrong.close()
    log = reached.log()
    assert "/v1/completions 401" in log
    assert KEY not in log
