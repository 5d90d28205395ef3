"""The key: what asks for it, that no log and no error has it, and that without one nobody else is served."""

import socket
from typing import Any

import httpx2 as httpx
import pytest

from colossalai.serving import ServerOptions
from tests.serving.conftest import wait_until
from tests.serving.fake import LIMIT_S
from tests.serving.test_leaving import head_of
from tests.tiers import further

pytestmark = pytest.mark.unit

KEY = "sk-a-key-that-nobody-guesses"
OPEN = (
    "/",
    "/health",
    "/ready",
    "/docs",
    "/page/docs.js",
    "/page/style.css",
    "/page/chat.js",
    "/page/wire.js",
)
CLOSED = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "/docs/"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/generation"),
    ("POST", "/v1/load_weights"),
    ("PUT", "/generation"),
)


def test_what_asks_for_the_key(start: Any) -> None:
    site = start(options={"api_key": KEY, "allow_weight_updates": True})
    with httpx.Client(base_url=site.url, trust_env=False) as stranger:
        for path in OPEN:
            assert stranger.get(path).status_code == 200, path
        for method, path in CLOSED:
            for authorization in (
                None,
                KEY,
                f"Bearer {KEY[:-1]}",
                f"Bearer {KEY}x",
                "Bearer",
                f"Basic {KEY}",
                "\xe9",
            ):
                headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
                answer = stranger.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, authorization)
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert KEY not in answer.text
        for scheme in ("Bearer", "bearer"):
            assert stranger.get("/version", headers={"authorization": f"{scheme} {KEY}"}).status_code == 200
    assert site.client.post("/generation", json={"prompt": "the", "max_tokens": 1}).status_code == 200
    refused = site.outcomes()
    assert refused["rejected"] == 3 * 7
    assert site.service.loaded == []


def test_metrics_can_be_open(start: Any) -> None:
    site = start(options={"api_key": KEY, "open_metrics": True})
    assert httpx.get(f"{site.url}/metrics", trust_env=False).status_code == 200
    assert httpx.get(f"{site.url}/version", trust_env=False).status_code == 401


@pytest.mark.parametrize("key", [KEY, further(None)])
def test_a_refused_client_that_still_sends_its_body_hears_why(start: Any, key: str | None) -> None:
    """A connection that is closed while a client writes may take the answer with it."""
    site = start(options={"api_key": key})
    body = b"a" * 30 * 2**20
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=LIMIT_S) as connection:
        connection.sendall(head_of("/v1/completions", body) + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 " if key else b"HTTP/1.1 413 ")


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log(start: Any, capfd: pytest.CaptureFixture[str], log_prompts: bool) -> None:
    """One line for each request, with neither key nor prompt, whatever a client puts where."""
    site = start(options={"api_key": KEY, "log_prompts": log_prompts})
    secret = "the river\nof " + KEY
    names = []
    for path, body in (
        ("/v1/completions", {"prompt": secret, "max_tokens": 2}),
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the sea"}], "max_tokens": 2}),
        ("/generation", {"prompt": "it ends", "max_tokens": 2}),
        ("/generation", {"prompt": "it ends", KEY: 2}),
        (f"/{KEY}%0AINFO forged line", {}),
    ):
        names.append(site.client.post(path, json=body).headers["x-request-id"])
    wrong = {"authorization": f"Basic {KEY}"}
    names.append(
        httpx.get(f"{site.url}/version?key={KEY}", headers=wrong, trust_env=False).headers["x-request-id"]
    )
    site.outcomes()
    text = ""

    def is_written() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return all(name in text for name in names)

    wait_until(is_written)
    for name in names:
        assert sum(name in line for line in text.splitlines()) == 1
    assert KEY not in text
    assert "forged" not in [line.split()[0] for line in text.splitlines()]
    assert ("it ends" in text and "the sea" in text and "(5, 6)" in text) == log_prompts
    if log_prompts:
        assert r"the river\nof ***" in text
    line = next(line for line in text.splitlines() if names[0] in line)
    assert " POST /v1/completions 200 finished model=fake prompt=" in line
    assert " generated=2 first=0." in line


def test_the_options_do_not_show_the_key() -> None:
    assert KEY not in repr(ServerOptions(api_key=KEY))
    with pytest.raises(ValueError, match="api_key must be printable ASCII") as caught:
        ServerOptions(api_key=f"{KEY}\n")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "example.org", "localhost.example.org"])
def test_nobody_else_is_served_without_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other machines"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, no_auth=True).host == host
    assert ServerOptions(host=host, api_key=KEY).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_is_served_without_a_key(host: str) -> None:
    assert ServerOptions(host=host).host == host


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"api_key": ""}, "api_key must be"),
        ({"api_key": "a b"}, "api_key must be"),
        ({"api_key": "a", "no_auth": True}, "contradict each other"),
        ({"ssl_keyfile": "a"}, "https needs both"),
        ({"port": 70_000}, "port=70000; it must be from 0 to 65535"),
        ({"drain_s": -1.0}, "drain_s=-1"),
        ({"drain_s": float("nan")}, "drain_s=nan"),
        ({"num_tokenizer_threads": 0}, "num_tokenizer_threads=0"),
    ],
)
def test_wrong_options(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ServerOptions(**given)


def test_pages_of_other_origins(start: Any) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    closed = start(options={"api_key": KEY})
    answer = httpx.options(f"{closed.url}/v1/completions", headers=asked, trust_env=False)
    assert "access-control-allow-origin" not in answer.headers
    site = start(options={"api_key": KEY, "allow_cors": True})
    answer = httpx.options(f"{site.url}/v1/completions", headers=asked, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
    refused = httpx.get(f"{site.url}/version", headers={"origin": "https://example.org"}, trust_env=False)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"
