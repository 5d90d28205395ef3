"""The server: ports, https, and its end, in which running requests finish and nothing new is taken."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from colossalai.serving import Server, ServerOptions, make_app
from colossalai.serving._server import reserved_port
from tests.serving.conftest import Site, wait_until
from tests.serving.fake import LIMIT_S, FakeService
from tests.serving.test_errors import refused
from tests.tiers import further

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def in_background(function: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def start_draining(site: Site, seconds: float) -> tuple[threading.Thread, list[Any]]:
    thread, results = in_background(lambda: site.server.stop(seconds))
    wait_until(lambda: site.server._app.front.is_draining)
    return thread, results


@pytest.mark.parametrize("stream", [False, further(True)])  # the next test begins with the other one
def test_running_and_queued_requests_finish(start: Any, stream: bool) -> None:
    site = start(slots=1)
    site.service.hold(1)
    body = {"prompt": [5], "max_tokens": 4, "stream": stream}
    asked = [in_background(lambda: site.client.post("/v1/completions", json=body)) for _ in range(3)]
    site.service.wait_for(lambda: site.service.num_running == 1 and site.service.num_queued == 2)
    ending, _ = start_draining(site, LIMIT_S)
    assert refused(site.client.get("/ready"))[0] == 503
    for path in ("/v1/completions", "/v1/chat/completions", "/generation"):
        answer = site.client.post(path, json={})
        assert refused(answer)[0] == 503
        assert answer.headers["retry-after"] == "1"
    assert site.client.get("/health").status_code == 200
    assert 'outcome="rejected"} 3.0' in site.client.get("/metrics").text
    site.service.release()
    for thread, results in asked:
        thread.join()
        assert results[0].status_code == 200
        assert '"length"' in results[0].text
    ending.join()
    assert site.service.aborted == []
    with pytest.raises(httpx.ConnectError):
        site.client.get("/health")


@pytest.mark.parametrize("stream", [True, further(False)])
def test_after_the_drain_the_rest_is_aborted_and_told_so(start: Any, stream: bool) -> None:
    site = start(slots=1)
    site.service.hold(2)
    body = {"prompt": [5], "max_tokens": 9, "stream": stream}
    asked = [in_background(lambda: site.client.post("/v1/completions", json=body)) for _ in range(2)]
    site.service.wait_for(lambda: site.service.num_queued == 1 and site.service.steps_allowed == 0)
    front = site.server._app.front
    front.abort_s = LIMIT_S  # for two aborted requests to end, on a busy machine
    ending, _ = start_draining(site, 0.05)
    ending.join()
    for thread, results in asked:
        thread.join()
        assert results[0].status_code == 200
        assert '"finish_reason":"abort"' in results[0].text
    assert sum(len(results[0].text) for _, results in asked) > 0
    assert len(site.service.aborted) == 2
    assert 'outcome="aborted"} 2.0' in front.metrics.text().decode()
    assert not front._records


def test_what_never_says_its_last_word_is_cut_off(start: Any) -> None:
    site = start()
    site.server._app.front.abort_s = 0.05
    site.server._uvicorn.config.timeout_graceful_shutdown = 0.2
    site.service.hold(1)
    site.service.abort = lambda request_id: None
    thread, results = in_background(lambda: _try(site, {"prompt": [5], "max_tokens": 9}))
    site.service.wait_for(lambda: site.service.num_running == 1)
    front = site.server._app.front
    site.server.stop(0.0)
    thread.join()
    assert results[0] != 200
    assert 'outcome="aborted"} 1.0' in front.metrics.text().decode()


def _try(site: Site, body: Any) -> Any:
    try:
        return site.client.post("/v1/completions", json=body).status_code
    except httpx.TransportError as error:
        return type(error).__name__


def test_ports(start: Any) -> None:
    first, second = start(), start()
    assert first.server.port != second.server.port
    assert first.url == f"http://127.0.0.1:{first.server.port}"
    taken = Server(first.service, ServerOptions(port=first.server.port))
    with pytest.raises(
        ValueError, match=f"port={first.server.port} cannot be listened on.*port=0 takes a free one"
    ):
        taken.start()
    with pytest.raises(RuntimeError, match="no port before start"):
        _ = taken.port
    taken.stop()
    with pytest.raises(RuntimeError, match="was started before"):
        first.server.start()


def test_a_port_that_is_kept_is_listened_on_again_and_again_and_given_to_nobody_else(tokenizer: Any) -> None:
    with reserved_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):
            service = FakeService(tokenizer)
            with Server(service, ServerOptions(port=port)) as server:
                assert httpx.get(f"{server.url}/ready", trust_env=False).status_code == 200
            service.stop()


def test_tokens_wait_for_no_acknowledgement(site: Site) -> None:
    site.service.hold(1)
    with site.client.stream("POST", "/v1/completions", json={"prompt": [5], "stream": True}):
        (connection,) = site.server._uvicorn.server_state.connections
        opened = connection.transport.get_extra_info("socket")
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        site.service.release()


def test_ipv6_and_a_context_manager(tokenizer: Any) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    service = FakeService(tokenizer)
    try:
        with Server(service, ServerOptions(host="::1", port=0)) as server:
            assert server.url.startswith("http://[::1]:")
            assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    except ValueError as error:
        if "cannot be listened on" not in str(error):
            raise
        pytest.skip(f"no IPv6 here: {error}")
    finally:
        service.stop()


def test_no_file_descriptor_and_no_thread_stays(tokenizer: Any) -> None:
    service = FakeService(tokenizer)

    def record() -> int:
        with Server(service, ServerOptions(port=0)) as server, httpx.Client(trust_env=False) as client:
            for _ in range(20):
                client.post(f"{server.url}/generation", json={"prompt": "the", "max_tokens": 1})
            client.get(f"{server.url}/metrics")
        return len(os.listdir("/proc/self/fd"))

    record()
    threads = threading.active_count()
    assert record() == record()
    assert threading.active_count() == threads
    service.stop()


def test_https(start: Any, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"openssl makes no certificate here: {made.stderr.decode()}")
    site = start(options={"ssl_keyfile": str(key), "ssl_certfile": str(certificate)})
    assert site.url.startswith("https://")
    import ssl

    trust = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=site.url, verify=trust, trust_env=False) as client:
        assert client.post("/generation", json={"prompt": "the", "max_tokens": 1}).status_code == 200
    broken = Server(site.service, ServerOptions(port=0, ssl_keyfile="no.pem", ssl_certfile=str(certificate)))
    with pytest.raises(ValueError, match=r"ssl_keyfile='no.pem'.*cannot be used"):
        broken.start()
    broken.stop()


SCRIPT = """
import sys, pathlib, threading
from colossalai.serving import Server, ServerOptions
from tests.serving.fake import FakeService, make_tokenizer
service = FakeService(make_tokenizer(pathlib.Path(sys.argv[1])), step_s=0.02, window=200)
server = Server(service, ServerOptions(port=0, drain_s=float(sys.argv[2])))
def tell():
    while not server._uvicorn.started:
        pass
    print(server.port, flush=True)
threading.Thread(target=tell, daemon=True).start()
server.serve()
service.stop()
print("ended", flush=True)
"""


@pytest.mark.long  # the same of a whole command is in test_serve_command
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm(tmp_path: Path, signals: int) -> None:
    """One lets the running request finish; a second one, in the drain, ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "60"],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
            body = {"prompt": [5], "max_tokens": 100, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 503)
                if signals == 2:
                    process.send_signal(signal.SIGTERM)
                text = "\n".join(lines)
        assert text.rstrip().endswith("data: [DONE]")
        assert ('"finish_reason":"abort"' in text) == (signals == 2)
        assert ('"finish_reason":"length"' in text) == (signals == 1)
        assert process.wait(LIMIT_S) == 0
        assert process.stdout.read() == "ended\n"
        log = (tmp_path / "log").read_text()
        assert ("1 requests are aborted: a second signal asked for the end at once" in log) == (signals == 2)
        assert "were not enough" not in log
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_an_application_for_any_server(tokenizer: Any) -> None:
    from starlette.testclient import TestClient

    service = FakeService(tokenizer)
    with TestClient(make_app(service)) as client:
        answer = client.post("/generation", json={"prompt": "the", "max_tokens": 2})
        assert answer.status_code == 200
    service.stop()
