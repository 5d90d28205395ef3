"""The documented /generation, the loading of weights, and the routes that say how it goes."""

import threading
from typing import Any

import pytest

import colossalai
from colossalai.inference import SamplingParams
from tests.serving.conftest import Site, wait_until
from tests.serving.test_errors import refused

pytestmark = pytest.mark.unit


def test_the_documented_route(site: Site) -> None:
    body = {"prompt": "the river", "max_tokens": 6, "top_k": 50, "top_p": 0.5, "temperature": 0.7}
    answer = site.client.post("/generation", json=body)
    assert answer.status_code == 200
    (request,) = site.service.seen
    ids = site.service.answer_ids(request.prompt_token_ids, 6)
    assert answer.json() == {"text": site.service.tokenizer.decode(ids)}
    assert request.params == SamplingParams(max_tokens=6, top_k=50, top_p=0.5, temperature=0.7)
    assert answer.headers["x-request-id"] == request.request_id
    assert request.request_id.startswith("gen-")


def test_what_may_be_left_out(site: Site) -> None:
    site.client.post("/generation", json={"prompt": "the", "top_k": None})
    assert site.service.seen[0].params == SamplingParams(max_tokens=63)  # 64, cut at the window
    assert site.client.post("/generation", json={"prompt": "the", "max_tokens": 256}).status_code == 200


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 257}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "8"}, "max_tokens"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "the " * 64}, "prompt"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "stream": True}, "stream"),
]


def test_wrong_bodies(site: Site) -> None:
    for body, param in WRONG:
        status, error = refused(site.client.post("/generation", json=body))
        assert (status, error["param"]) == (400, param), body
        assert site.service.seen == [], body


def test_weights_are_loaded_where_that_is_allowed(start: Any) -> None:
    site = start(options={"allow_weight_updates": True})
    answer = site.client.post("/v1/load_weights", json={"path": "new", "in_flight": "restart"})
    assert (answer.status_code, answer.json()) == (200, {"path": "new", "model": "fake"})
    assert site.client.post("/v1/load_weights", json={"path": "newer"}).status_code == 200
    assert site.service.loaded == [("new", "restart"), ("newer", "finish")]
    status, error = refused(site.client.post("/v1/load_weights", json={"path": "missing"}))
    assert (status, error["param"]) == (400, "path")
    assert "is no checkpoint" in error["message"]
    for path, expected in (("torn", (500, None)), ("busy", (409, "in_flight")), ("unread", (400, "path"))):
        status, error = refused(site.client.post("/v1/load_weights", json={"path": path}))
        assert (status, error["param"]) == expected
        assert error["message"] == f"{path}, it said"
    status, error = refused(site.client.post("/v1/load_weights", json={"path": "x", "in_flight": "drop"}))
    assert (status, error["param"]) == (400, "in_flight")
    assert len(site.service.loaded) == 2


def test_one_load_at_a_time_while_requests_go_on(start: Any) -> None:
    site = start(options={"allow_weight_updates": True})
    site.service.load_gate.clear()
    first: list[int] = []
    loading = threading.Thread(
        target=lambda: first.append(site.client.post("/v1/load_weights", json={"path": "a"}).status_code)
    )
    loading.start()
    wait_until(lambda: site.server._app.front.is_updating)
    assert refused(site.client.post("/v1/load_weights", json={"path": "b"}))[0] == 409
    assert site.client.post("/generation", json={"prompt": "the"}).status_code == 200
    site.service.load_gate.set()
    loading.join()
    assert first == [200]
    assert site.client.post("/v1/load_weights", json={"path": "c"}).status_code == 200
    assert [path for path, _ in site.service.loaded] == ["a", "c"]


def test_probes(site: Site) -> None:
    assert site.client.get("/health").json() == {"status": "alive"}
    assert site.client.get("/ready").json() == {"status": "ready"}
    expected = {"version": colossalai.__version__, "weights_version": 0}
    assert site.client.get("/version").json() == expected
