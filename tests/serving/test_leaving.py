"""Clients that go away, in every state of their request: the engine works for them no longer."""

import asyncio
import json
import socket
from typing import Any

import pytest

from colossalai.serving._gate import ClientLeft, _with_request_id
from colossalai.serving._request_record import RequestRecord
from tests.serving.conftest import Site, wait_until
from tests.serving.fake import LIMIT_S

pytestmark = pytest.mark.unit

PATHS = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 50},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}]},
    "/generation": {"prompt": "the"},
}


def head_of(path: str, content: bytes) -> bytes:
    kind = f"content-type: application/json\r\ncontent-length: {len(content)}"
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{kind}\r\n\r\n".encode()


def open_request(site: Site, path: str, body: dict[str, Any], *, missing: int = 0) -> socket.socket:
    """Send a request, all but some bytes at its end, and keep the connection."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", site.server.port), timeout=LIMIT_S)
    connection.sendall(head_of(path, content) + content[: len(content) - missing])
    return connection


def assert_all_is_back(site: Site, aborted: int) -> None:
    assert site.outcomes() == {
        "received": aborted,
        "aborted": aborted,
        "finished": 0,
        "rejected": 0,
        "failed": 0,
    }
    assert site.service.is_idle()
    assert sorted(site.service.aborted) == sorted(request.request_id for request in site.service.seen)
    front = site.server._app.front
    assert not front._records
    assert not front._replies


@pytest.mark.parametrize("path", PATHS)
def test_while_it_waits_for_the_whole_answer(
    site: Site, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    site.service.hold(2)
    connection = open_request(site, path, PATHS[path])
    site.service.wait_for(lambda: site.service.num_running == 1 and site.service.steps_allowed == 0)
    connection.close()
    site.service.wait_for(site.service.is_idle)
    assert_all_is_back(site, 1)
    wait_until(lambda: "aborted model=" in (text := capfd.readouterr().err) and "the client has left" in text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_while_it_streams(site: Site, path: str) -> None:
    site.service.hold(2)
    connection = open_request(site, path, {**PATHS[path], "stream": True})
    found = b""
    while b"data: " not in found:
        found += connection.recv(100_000)
    connection.close()
    site.service.wait_for(site.service.is_idle)
    assert_all_is_back(site, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_is_queued(start: Any, stream: bool) -> None:
    site = start(slots=1)
    site.service.hold()
    connections = [
        open_request(site, "/v1/completions", {"prompt": [5, place], "stream": stream}) for place in range(4)
    ]
    site.service.wait_for(lambda: site.service.num_queued == 4)
    connections[2].close()
    site.service.wait_for(lambda: site.service.num_queued == 3)
    assert [
        request.prompt_token_ids
        for request in site.service.seen
        if request.request_id in site.service.aborted
    ] == [(5, 2)]
    for connection in connections:
        connection.close()
    site.service.wait_for(site.service.is_idle)
    assert_all_is_back(site, 4)


def test_all_prompts_of_a_list_are_aborted(start: Any) -> None:
    site = start(slots=2)
    site.service.hold(1)
    connection = open_request(site, "/v1/completions", {"prompt": [[5], [6], [7]], "n": 2, "max_tokens": 9})
    site.service.wait_for(lambda: site.service.num_running == 2 and site.service.num_queued == 1)
    connection.close()
    site.service.wait_for(site.service.is_idle)
    assert len(site.service.aborted) == 3
    assert_all_is_back(site, 1)


def test_before_its_body_is_complete(site: Site) -> None:
    connection = open_request(site, "/v1/completions", PATHS["/v1/completions"], missing=1)
    wait_until(lambda: 'received_total{model="fake"} 1.0' in site.client.get("/metrics").text)
    connection.close()
    assert_all_is_back(site, 1)
    assert site.service.seen == []


def test_between_its_body_and_the_engine(site: Site) -> None:
    """Its tokens are being made when it leaves: the engine never hears of it."""
    prompts = site.server._app.front.prompts
    tokenizers = [prompts._copies.get() for _ in range(2)]  # whoever tokenizes waits for one
    connection = open_request(site, "/generation", {"prompt": "the"})
    wait_until(lambda: 'received_total{model="fake"} 1.0' in site.client.get("/metrics").text)
    connection.close()
    assert site.outcomes()["aborted"] == 1
    for each in tokenizers:
        prompts._copies.put(each)
    assert site.client.post("/generation", json={"prompt": "river", "max_tokens": 1}).status_code == 200
    assert len(site.service.seen) == 1


def test_a_reader_that_stops_reading_stops_nobody_else(site: Site) -> None:
    slow = socket.create_connection(("127.0.0.1", site.server.port), timeout=LIMIT_S)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    body = json.dumps(
        {"prompt": [[5]] * 20, "n": 20, "max_tokens": 40, "stream": True, "logprobs": 20}
    ).encode()
    slow.sendall(head_of("/v1/completions", body) + body)
    site.service.wait_for(lambda: len(site.service.ended) == 20)  # the engine waits for no reader
    assert site.client.post("/generation", json={"prompt": "the", "max_tokens": 2}).status_code == 200
    slow.close()
    assert site.outcomes() == {"received": 2, "finished": 1, "aborted": 1, "rejected": 0, "failed": 0}


def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    """The server would take it without a word, and the stream would seem to have been read."""
    record = RequestRecord({"type": "http", "method": "POST", "path": "/generation"})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    named = _with_request_id(record, send)
    part = {"type": "http.response.body", "body": b"a", "more_body": True}
    asyncio.run(named(part))
    record.has_left = True
    with pytest.raises(ClientLeft):
        asyncio.run(named(part))
    assert sent == [part]
