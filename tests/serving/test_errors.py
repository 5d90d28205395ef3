"""Everything that is wrong with a request is told in OpenAI's form, with its field and what is allowed."""

import json
import socket
from typing import Any

import pytest

from colossalai.serving._errors import ErrorBody
from tests.serving.conftest import Site, wait_until
from tests.serving.fake import LIMIT_S
from tests.serving.test_completions import complete

pytestmark = pytest.mark.unit

JSON = {"content-type": "application/json"}
NAN = '{"prompt": "a", "temperature": NaN}'
NESTED = '{"prompt": ' + "[" * 50_000


def refused(answer: Any) -> tuple[int, dict[str, Any]]:
    error = ErrorBody.model_validate_json(answer.content, strict=True).error
    assert answer.headers["x-request-id"]
    return answer.status_code, error.model_dump()


# body: (status, field, what the message says)
WRONG: dict[str, tuple[Any, int, str | None, str]] = {
    "unknown field": ({"prompt": "a", "temprature": 1}, 400, "temprature", "did you mean temperature?"),
    "unknown field like none": (
        {"prompt": "a", "xyzxyz": 1},
        400,
        "xyzxyz",
        "known ones are echo, frequency",
    ),
    "unknown field within": (
        {"prompt": "a", "stream": True, "stream_options": {"includeusage": True}},
        400,
        "stream_options.includeusage",
        "did you mean include_usage?",
    ),
    "half a character": ('{"prompt": "a", "\\ud800": 1}', 400, "\\ud800", "there is no field '\\ud800'"),
    "half a character in the prompt": ('{"prompt": "\\ud800"}', 400, None, "prompt: it has half a character"),
    "half a character in a list": ('{"prompt": ["a", "\\ud800"]}', 400, None, "prompt: it has half a"),
    "no prompt": ({}, 400, "prompt", "it is missing"),
    "null prompt": ({"prompt": None}, 400, "prompt", "it must be a text"),
    "empty prompt": ({"prompt": ""}, 400, "prompt", "at least one character"),
    "empty list": ({"prompt": []}, 400, "prompt", "at least one"),
    "empty tokens": ({"prompt": [[]]}, 400, "prompt", "at least one"),
    "empty text in a list": ({"prompt": ["a", ""]}, 400, "prompt", "at least one character"),
    "too many prompts": (
        {"prompt": ["a"] * 1025},
        400,
        "prompt",
        "a list of 1025 prompts; a call takes at most",
    ),
    "mixed list": ({"prompt": ["a", 1]}, 400, "prompt", "it must be a text, a list of texts"),
    "true for a token": ({"prompt": [True]}, 400, "prompt", "it must be a text, a list of texts"),
    "unknown token": (
        {"prompt": [5, 10_000]},
        400,
        "prompt",
        "there is no token 10000; tokens are from 0 to",
    ),
    "token below 0": ({"prompt": [-1]}, 400, "prompt", "there is no token -1"),
    "too long": (
        {"prompt": [5] * 64},
        400,
        "prompt",
        "it has 64 tokens, and the model's window is 64 tokens",
    ),
    "unknown model": (
        {"prompt": "a", "model": "b"},
        404,
        "model",
        "there is no model 'b'; known ones are 'fake'",
    ),
    "text for a number": ({"prompt": "a", "temperature": "1"}, 400, "temperature", "valid number"),
    "NaN": (NAN, 400, "temperature", "finite"),
    "infinity": ('{"prompt": "a", "top_p": 1e999}', 400, "top_p", "finite"),
    "out of range": (
        {"prompt": "a", "top_p": 1.5},
        400,
        "top_p",
        "top_p=1.5; it must be a number from 0 to 1",
    ),
    "n below 1": ({"prompt": "a", "n": 0}, 400, "n", "n=0; it must be a whole number from 1"),
    "n as a fraction": ({"prompt": "a", "n": 1.5}, 400, "n", "integer"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1, unless echo=true"),
    "two max_tokens": (
        {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2},
        400,
        "max_tokens",
        "two names of the same",
    ),
    "too many logprobs": ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    "stop as a number": ({"prompt": "a", "stop": 3}, 400, "stop", "it must be a text, or a list of texts"),
    "empty stop": ({"prompt": "a", "stop": ""}, 400, "stop", "texts that are not empty"),
    "bias of no token": ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "names the token 'x'"),
    "bias of another token": (
        {"prompt": "a", "logit_bias": {"9999": 1}},
        400,
        "logit_bias",
        "tokens are from 0",
    ),
    "bias too large": ({"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias", "from -100 to 100"),
    "unknown format": (
        {"prompt": "a", "response_format": {"type": "xml"}},
        400,
        "response_format",
        "json_schema",
    ),
    "options without a stream": (
        {"prompt": "a", "stream_options": {"include_usage": True}},
        400,
        "stream_options",
        "are for streamed answers",
    ),
    "NaN in a schema": (
        '{"prompt": "a", "response_format": {"type": "json_schema", '
        '"json_schema": {"schema": {"const": NaN}}}}',
        400,
        "response_format",
        "schema that is not JSON",
    ),
    "tools": (
        {"prompt": "a", "tools": []},
        400,
        "tools",
        "tools is not supported: this server calls no tools",
    ),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix is not supported"),
    "best_of": ({"prompt": "a", "best_of": 2}, 400, "best_of", "best_of is not supported"),
    "no JSON": ('{"prompt": ', 400, None, "the body is not JSON"),
    "deeply nested": (NESTED, 400, None, "not JSON: its lists and objects are nested too deeply"),
    "not in UTF-8": (b'{"prompt": "\xff"}', 400, None, "not in UTF-8 (invalid start byte at byte 12)"),
    "a number of 5000 digits": ('{"seed": ' + "9" * 5000 + "}", 400, None, "has too many digits"),
    "padded chunks": (
        {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
        "should be False",
    ),
    "a list": ([1], 400, None, "must be a JSON object"),
    "nothing": ("", 400, None, "the body is missing"),
}


def test_wrong_bodies(site: Site) -> None:
    """All are asked of one server, of which a start takes twenty times as long as an answer."""
    for number, (name, (body, status, param, text)) in enumerate(WRONG.items(), start=1):
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        found, error = refused(site.client.post("/v1/completions", content=content, headers=JSON))
        assert (found, error["param"]) == (status, param), name
        assert text in error["message"], name
        assert site.service.seen == [], name
        outcomes = {"received": number, "rejected": number, "finished": 0, "aborted": 0, "failed": 0}
        assert site.outcomes() == outcomes, name


def test_chat_refuses_by_name(site: Site) -> None:
    for name in (
        *("tools", "tool_choice", "functions", "parallel_tool_calls"),
        *("suffix", "best_of", "modalities"),
    ):
        body = {"messages": [{"role": "user", "content": "a"}], name: "x"}
        status, error = refused(site.client.post("/v1/chat/completions", json=body))
        assert (status, error["param"]) == (400, name)
        assert error["message"].startswith(f"{name} is not supported: ")


def test_a_page_of_another_origin_cannot_ask(site: Site) -> None:
    """Such content types go without asking the server first, from any page that a user of it opens."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {"content-type": kind} if kind else {}
        answer = site.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        status, error = refused(answer)
        assert status == 400, kind
        assert "Content-Type must be application/json" in error["message"], kind


def test_paths_and_methods(site: Site) -> None:
    assert refused(site.client.get("/v1/nothing%0Ahere"))[1]["message"].startswith(
        "there is no '/v1/nothing\\nhere'"
    )
    answer = site.client.get("/v1/completions")
    assert refused(answer)[0] == 405
    assert answer.headers["allow"] == "POST"
    assert site.client.head("/v1/completions").status_code == 405
    for path in ("/", "/health", "/v1/models"):
        asked, got = site.client.head(path), site.client.get(path)
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-length"] == got.headers["content-length"]
    assert refused(site.client.post("/v1/load_weights", json={"path": "x"}))[0] == 404


def test_a_body_that_is_too_large(start: Any) -> None:
    site = start(options={"max_body_bytes": 1000})
    fitting = json.dumps({"prompt": "a", "max_tokens": 1}).ljust(1000)
    assert site.client.post("/v1/completions", content=fitting, headers=JSON).status_code == 200
    body = (fitting + " ").encode()
    for content in (body, iter([body[:500], body[500:]])):  # in one piece, and in chunks
        status, error = refused(site.client.post("/v1/completions", content=content, headers=JSON))
        assert status == 413
        assert "larger than 1000 bytes" in error["message"]


def test_a_client_that_asks_before_it_sends_is_not_asked_for_too_much(site: Site) -> None:
    fields = f"host: x\r\ncontent-length: {50 * 2**20}\r\nexpect: 100-continue"
    head = f"POST /generation HTTP/1.1\r\n{fields}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_closes_its_connection_sees_why_its_body_is_refused(start: Any) -> None:
    """As urllib does: a server that closes before it has read all resets the connection."""
    site = start(options={"api_key": "key", "max_body_bytes": 1000})
    body = b"x" * (10 * 2**20)
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for status, key, kind, sent in (
        (413, "key", f"content-length: {len(body)}", body),
        (413, "key", "transfer-encoding: chunked", chunk),
        (401, "other", f"content-length: {len(body)}", body),
    ):
        fields = f"host: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n{kind}"
        with socket.create_connection(("127.0.0.1", site.server.port), timeout=LIMIT_S) as connection:
            connection.sendall(f"POST /generation HTTP/1.1\r\n{fields}\r\n\r\n".encode() + sent)
            assert connection.recv(1000).startswith(f"HTTP/1.1 {status} ".encode()), (status, kind)


def test_4_mib_are_the_most_and_10_mb_too_large(site: Site) -> None:
    for size, status in ((4 * 2**20, 400), (4 * 2**20 + 1, 413), (10_000_000, 413)):
        body = b'{"prompt": 1}'.ljust(size)  # no text, so that no time goes into its tokens
        assert site.client.post("/generation", content=body, headers=JSON).status_code == status


def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.requests import Request

    parsed: list[bytes] = []
    parse = Request.json

    async def noted(self: Request) -> Any:
        parsed.append(await self.body())
        return await parse(self)

    monkeypatch.setattr(Request, "json", noted)
    for part in ("[1],", "[],", '{"a":1},', "[[[[[1]]]]],"):
        body = '{"prompt": [' + part * (3 * 2**20 // len(part)) + "[1]]}"
        status, error = refused(site.client.post("/v1/completions", content=body, headers=JSON))
        assert (status, error["code"]) == (400, "too_many_parts")
        assert "opening brackets; this server takes at most 66560" in error["message"]
        assert parsed == []
    status, error = refused(
        site.client.post("/v1/completions", content='{"prompt": [' + "[1]," * 1024 + "[1]]}", headers=JSON)
    )
    assert "at most 1024" in error["message"]
    assert len(parsed) == 1


def test_a_full_queue(start: Any) -> None:
    site = start(slots=1, max_queue=0)
    answer = site.client.post("/v1/completions", json={"prompt": "a"})
    status, error = refused(answer)
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert answer.headers["retry-after"] == "1"
    assert refused(site.client.post("/generation", json={"prompt": "a"}))[0] == 406
    assert site.outcomes()["rejected"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_if_one_prompt_is_refused_the_others_are_aborted(start: Any, stream: bool) -> None:
    site = start()
    site.service.hold()
    site.service.refuse = lambda request: request.prompt_token_ids == (7,)
    body = {"prompt": [[5], [6], [7], [8]], "stream": stream}
    status, error = refused(site.client.post("/v1/completions", json=body))
    assert (status, error["code"]) == (400, "request_refused")
    wait_until(lambda: len(site.service.aborted) == 2)
    assert site.service.aborted == [request.request_id for request in site.service.seen]
    assert site.service.is_idle()


def test_a_failure_of_the_engine(site: Site) -> None:
    site.service.fail_at = 0
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/generation", {"prompt": "a"}),
    ):
        status, error = refused(site.client.post(path, json=body))
        assert (status, error["message"], error["type"]) == (500, "rank 1 has died", "server_error")
    assert site.outcomes() == {"received": 3, "failed": 3, "finished": 0, "aborted": 0, "rejected": 0}


def test_one_failed_prompt_fails_the_call_and_aborts_the_rest(start: Any) -> None:
    site = start(slots=1)
    site.service.fail_at = 0
    site.service.hold(1)
    assert refused(site.client.post("/v1/completions", json={"prompt": [[5], [6], [7]]}))[0] == 500
    wait_until(site.service.is_idle)
    assert len(site.service.aborted) == 2


def test_a_failure_in_a_stream_is_its_last_event(site: Site) -> None:
    site.service.fail_at = 2
    answer = site.client.post("/v1/completions", json={"prompt": "a", "stream": True})
    parts = answer.text.removesuffix("\n\n").split("\n\n")
    assert answer.status_code == 200
    assert len(parts) == 3
    error = ErrorBody.model_validate_json(parts[-1].removeprefix("data: ")).error
    assert (error.message, error.code) == ("rank 1 has died", "engine_failed")
    assert site.outcomes()["failed"] == 1


def test_an_engine_that_has_stopped(site: Site) -> None:
    assert site.client.get("/ready").status_code == 200
    site.service.stop()
    status, error = refused(site.client.post("/v1/completions", json={"prompt": "a"}))
    assert (status, error["code"]) == (503, "engine_stopped")
    assert "the fake engine has ended" in error["message"]
    assert refused(site.client.get("/ready"))[0] == 503
    assert site.client.get("/health").status_code == 200
    assert 'colossalai_engine_up{model="fake"} 0.0' in site.client.get("/metrics").text
    assert site.outcomes()["rejected"] == 1


def test_a_mistake_of_the_server_is_a_500_without_its_details(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(token_ids: Any, param: str) -> Any:
        raise KeyError("a secret place")

    site.server._app.front.prompts.fit = fit  # type: ignore[method-assign]
    status, error = refused(site.client.post("/v1/completions", json={"prompt": [5]}))
    assert status == 500
    assert "secret" not in error["message"]
    wait_until(lambda: site.outcomes()["failed"] == 1)
    assert "Traceback" in capsys.readouterr().err


def test_listeners_of_a_closed_loop_are_harmless(start: Any) -> None:
    site = start()
    site.service.hold(1)
    with site.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
        pass
    site.server.stop(0.0)
    site.service.release()
    site.service.wait_for(site.service.is_idle)
    assert site.service._thread.is_alive()


def test_what_went_wrong_before_does_not_stay(site: Site) -> None:
    site.service.fail_at = 1
    assert site.client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
    site.service.fail_at = None
    assert complete(site, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
