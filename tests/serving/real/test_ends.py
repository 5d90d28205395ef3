"""Each request has one end, whatever comes between: timeouts, failures, the end of the server, of clients."""

import itertools
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.serving.conftest import wait_until
from tests.serving.fake import LIMIT_S
from tests.serving.real.conftest import RealSite
from tests.serving.test_leaving import head_of
from tests.tiers import further

pytestmark = pytest.mark.unit
LONG = {"prompt": "the quick", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 8}


class Pace:
    """Holds the engine between two steps until it is told to go on, or lets a step fail."""

    def __init__(self, site: RealSite) -> None:
        self.runner = site.engine.executor.runner
        self._run = self.runner.run
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: BaseException | None = None
        self.num_steps = 0
        self.runner.run = self.run

    def run(self, arrays: Any, received: Any = None) -> Any:
        self.num_steps += 1
        assert self.may_go.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return self._run(arrays, received)


def asked(site: RealSite, path: str = "/v1/completions", **body: Any) -> tuple[threading.Thread, list[Any]]:
    """Ask in a thread."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(site.client.post(path, json=body)))
    thread.start()
    return thread, answers


def outcomes(**counts: int) -> dict[str, float]:
    named = {name: float(counts.get(name, 0)) for name in ("finished", "aborted", "rejected", "failed")}
    return {**named, "received": sum(named.values())}


def ends_so(site: RealSite, **counts: int) -> None:
    assert site.outcomes() == outcomes(**counts)
    wait_until(site.is_empty)


@pytest.mark.parametrize("n", [2, further(1)])
def test_time_is_over_for_those_who_run_and_those_who_wait(site: Callable[..., RealSite], n: int) -> None:
    it = site(max_running=2, options={"request_timeout_s": 0.5})
    pace = Pace(it)
    pace.may_go.clear()
    threads = [asked(it, **LONG, n=n) for _ in range(4)]
    wait_until(lambda: it.service._num_waiting + len(it.engine._open) >= 4 and pace.num_steps > 0)
    # No step ends before the time of all is over.
    end = threading.Timer(0.6, pace.may_go.set)
    end.start()
    for thread, answers in threads:
        thread.join()
        choices = answers[0].json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["timeout"] * n
    end.join()
    ends_so(it, finished=4)


@pytest.mark.parametrize("stream", [True, further(False)])
def test_an_engine_that_fails_fails_all(site: Callable[..., RealSite], stream: bool) -> None:
    it = site(max_running=1)
    pace = Pace(it)
    pace.may_go.clear()
    running = asked(it, **LONG, stream=stream)
    wait_until(lambda: pace.num_steps == 1)
    queued = asked(it, **LONG, stream=stream)
    wait_until(lambda: it.service._num_waiting == 2)
    # The first step goes through: the stream has begun.
    pace.error = None
    run, pace._run = (
        pace._run,
        lambda *args: (setattr(pace, "error", RuntimeError("a rank is gone")), run(*args))[1],
    )
    pace.may_go.set()
    for thread, _ in (running, queued):
        thread.join()
    first, second = running[1][0], queued[1][0]
    if stream:
        assert first.status_code == 200
        assert json.loads(first.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["message"]
    else:
        assert first.status_code == 500
    assert second.status_code == 500
    assert "a rank is gone" in second.text
    late = it.client.post("/v1/completions", json=LONG)
    assert late.status_code == 503
    ends_so(it, failed=2, rejected=1)
    assert isinstance(it.service.error, RuntimeError)


def test_one_whose_logits_are_nan_fails_alone(site: Callable[..., RealSite]) -> None:
    it = site()
    expected = it.client.post("/v1/completions", json={**SHORT, "prompt": [5, 6]}).json()["choices"]
    parts = it.engine.executor.runner.model.modules()
    embedding = next(part for part in parts if isinstance(part, nn.Embedding))
    with torch.inference_mode():
        embedding.weight.data[9] = torch.nan
    threads = [asked(it, **{**SHORT, "prompt": prompt}) for prompt in ([5, 6], [5, 9], [5, 6], [9])]
    for thread, _ in threads:
        thread.join()
    found = [answers[0] for _, answers in threads]
    assert [answer.status_code for answer in found] == [200, 500, 200, 500]
    assert found[0].json()["choices"] == found[2].json()["choices"] == expected
    error = found[1].json()["error"]
    assert error["code"] == "request_failed"
    assert "have a NaN" in error["message"]
    ends_so(it, finished=3, failed=2)


def test_the_server_ends_while_some_run_and_some_wait(site: Callable[..., RealSite]) -> None:
    it = site(max_running=1)
    pace = Pace(it)
    pace.may_go.clear()
    threads = [asked(it, **LONG) for _ in range(3)]
    wait_until(lambda: it.service._num_waiting == 3)
    stopping = threading.Thread(target=it.server.stop, args=(0.2,))
    stopping.start()
    wait_until(lambda: it.server._app.front._is_over)
    pace.may_go.set()
    for thread, answers in threads:
        thread.join()
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    stopping.join()
    wait_until(it.is_empty)
    text = it.server._app.front.metrics.text().decode()
    assert 'colossalai_requests_total{model="tiny",outcome="aborted"} 3.0' in text
    assert 'colossalai_requests_received_total{model="tiny"} 3.0' in text


@pytest.mark.parametrize("stream", [True, further(False)])
def test_clients_leave_while_they_run_and_while_they_wait(
    site: Callable[..., RealSite], stream: bool
) -> None:
    it = site(max_running=1)
    pace = Pace(it)
    pace.may_go.clear()
    content = json.dumps({**LONG, "n": 1, "stream": stream}).encode()
    connections = []
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", it.server.port), timeout=LIMIT_S)
        connection.sendall(head_of("/v1/completions", content) + content)
        connections.append(connection)
    wait_until(lambda: it.service._num_waiting == 3)
    for connection in connections:
        connection.close()
    wait_until(lambda: it.outcomes()["aborted"] == 3)
    num_steps = pace.num_steps
    pace.may_go.set()
    ends_so(it, aborted=3)
    assert pace.num_steps == num_steps  # the step that was under way, and none for those who have left


BAD_STRUCTURES = (
    {"type": "regex", "regex": "(("},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nobody"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}},
)


def test_structures_that_cannot_be_compiled_are_rejected(site: Callable[..., RealSite]) -> None:
    it = site()
    for stream, structure in itertools.product((False, True), BAD_STRUCTURES):
        answer = it.client.post(
            "/v1/completions", json={**SHORT, "response_format": structure, "stream": stream}
        )
        assert answer.status_code == 400, answer.text
        # A list whose last prompt alone is refused: the others have been taken by then.
        prompts = [[5, 6], [7], [5] * 511]
        refused = it.client.post(
            "/v1/completions",
            json={**SHORT, "prompt": prompts, "response_format": structure, "stream": stream},
        )
        assert refused.status_code == 400
    ends_so(it, rejected=4 * len(BAD_STRUCTURES))
