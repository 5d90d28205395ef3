"""/v1/chat/completions by the tokenizer's template, and the openai client against the server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving.conftest import Site
from tests.serving.fake import make_tokenizer
from tests.serving.test_completions import streamed

pytestmark = pytest.mark.unit

ASKED = [{"role": "user", "content": "the river?"}]


def chat(site: Site, **body: Any) -> Any:
    answer = site.client.post("/v1/chat/completions", json=body)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (ASKED, "<|user|>the river?<|assistant|>"),
        (
            [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
                },
                {"role": "user", "content": "the"},
                {"role": "assistant", "content": "sea", "refusal": None, "tool_calls": None},
                {"role": "user", "content": "ends", "name": "she"},
            ],
            "<|system|>be brief<|user|>the<|assistant|>sea<|user|>ends<|assistant|>",
        ),
    ],
)
def test_the_template_writes_the_prompt(start: Any, messages: Any, text: str) -> None:
    site = start(window=200)
    answer = chat(site, messages=messages, max_tokens=4)
    (request,) = site.service.seen
    assert request.prompt_token_ids == tuple(site.service.tokenizer(text)["input_ids"])
    message = answer["choices"][0]["message"]
    ids = site.service.answer_ids(request.prompt_token_ids, 4)
    assert message == {"role": "assistant", "content": site.service.tokenizer.decode(ids), "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")


def test_without_max_tokens_it_goes_on_to_the_window(site: Site) -> None:
    answer = chat(site, messages=ASKED)
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


def test_refusals(start: Any, tmp_path: Any) -> None:
    site = start()
    status, error = chat(site, messages=[*ASKED, {"role": "system", "content": "late"}])
    assert (status, error["param"]) == (400, "messages")
    assert "the system speaks first" in error["message"]
    assert chat(site, messages=[])[0] == 400
    assert chat(site, messages=ASKED, top_logprobs=1)[1]["param"] == "top_logprobs"
    assert chat(site, messages=ASKED, max_tokens=0)[1]["param"] == "max_tokens"
    status, error = chat(site, messages=[{"role": "tool", "content": "x"}])
    assert (status, error["param"]) == (400, "messages[0].role")
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    status, error = chat(site, messages=[{"role": "user", "content": [picture]}])
    assert (status, error["param"]) == (400, "messages[0].content")
    assert "images, audio and files are not read" in error["message"]
    plain = start(tokenizer=make_tokenizer(tmp_path, template=None))
    status, error = chat(plain, messages=ASKED)
    assert (status, error["code"]) == (400, "no_chat_template")
    assert "no chat template, so messages cannot be written for it; use /generate" in error["message"]
    assert plain.service.seen == []


def test_a_stream_is_the_whole_in_pieces(site: Site) -> None:
    body = {"messages": ASKED, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = chat(site, **body)
    chunks = streamed(site, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        content = [token for c in own if c["logprobs"] for token in c["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_logprobs_name_tokens_and_their_bytes(site: Site) -> None:
    (choice,) = chat(site, messages=ASKED, max_tokens=2, logprobs=True, top_logprobs=2)["choices"]
    ids = site.service.answer_ids(site.service.seen[0].prompt_token_ids, 2)
    for found, token in zip(choice["logprobs"]["content"], ids, strict=True):
        text = site.service.tokenizer.decode([token])
        assert (found["token"], found["logprob"]) == (text, -0.5 - token / 1000)
        assert bytes(found["bytes"]).decode() == text
        assert [each["logprob"] for each in found["top_logprobs"]] == [
            -0.5 - token / 1000,
            -1.5 - token / 1000,
        ]
    (bare,) = chat(site, messages=ASKED, max_tokens=2, logprobs=True)["choices"]
    assert [each["top_logprobs"] for each in bare["logprobs"]["content"]] == [[], []]
    (none,) = chat(site, messages=ASKED, max_tokens=2)["choices"]
    assert none["logprobs"] is None


def test_the_bytes_of_half_a_character_are_not_told(site: Site) -> None:
    half = site.service.tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(half) == 2
    site.service.sentence = half
    (choice,) = chat(site, messages=ASKED, max_tokens=2, logprobs=True)["choices"]
    assert [each["bytes"] for each in choice["logprobs"]["content"]] == [None, None]


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_openai_client_completes(site: Site, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="the river", max_tokens=4, logprobs=2, seed=1)
    prompt = tuple(site.service.tokenizer("the river")["input_ids"])
    assert answer.choices[0].text == site.service.tokenizer.decode(site.service.answer_ids(prompt, 4))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert len(answer.choices[0].logprobs.top_logprobs) == 4
    assert answer._request_id == answer.id
    parts = client.completions.create(model="fake", prompt="the river", max_tokens=4, stream=True)
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_the_openai_client_chats(site: Site, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=ASKED, max_completion_tokens=4, logprobs=True, top_logprobs=1, temperature=0
    )
    assert len(answer.choices[0].logprobs.content) == 4
    parts = list(
        client.chat.completions.create(
            model="fake",
            messages=ASKED,
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == answer.choices[0].message.content
    assert parts[-1].usage.completion_tokens == 4
    again = [*ASKED, answer.choices[0].message.model_dump(), *ASKED]
    assert client.chat.completions.create(model="fake", messages=again, max_tokens=1).choices
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_the_openai_client_hears_why_tools_are_refused(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(
        openai.BadRequestError, match="tools is not supported: this server calls no tools"
    ) as caught:
        client.chat.completions.create(model="fake", messages=ASKED, tools=[tool])
    assert caught.value.param == "tools"


def test_the_openai_client_knows_the_errors(start: Any) -> None:
    site = start(options={"api_key": "right"}, slots=1, max_queue=0)
    stranger = openai.OpenAI(base_url=f"{site.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="right", max_retries=0) as friend:
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            friend.completions.create(model="other", prompt="the")
        with pytest.raises(openai.RateLimitError):
            friend.completions.create(model="fake", prompt="the")
        site.service.max_queue = 1
        site.service.fail_at = 2
        parts = friend.completions.create(model="fake", prompt="the", stream=True)
        with pytest.raises(openai.APIError, match="rank 1 has died"):
            list(parts)
