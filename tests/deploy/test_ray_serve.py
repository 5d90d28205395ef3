"""Two replicas on Ray, one of which is killed under load: what had not begun is answered by the other."""

import http.client
import importlib.util
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.serving.served_folder import save_tiny

pytestmark = [
    pytest.mark.unit,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="not installed: pip install colossalai[ray]"
    ),
]
ROOT = Path(__file__).parents[2]
START_S = 240.0
NUM_REQUESTS, NUM_CLIENTS, NUM_TOKENS, KILLED_AFTER = 80, 8, 150, 12
NUM_KILLS = 5  # at most
KEY = "key-of-the-test"


class Load:
    """Clients that ask again where nothing has come yet."""

    def __init__(self, port):
        self.port = port
        self.texts: dict[int, str] = {}
        self.cut: list[int] = []  # requests that had begun
        self.asked_again: list[int] = []
        self.ended = threading.Condition()

    def ask(self, number):
        for _ in range(20):
            parts = []
            try:
                self._stream(number, parts)
            except (OSError, http.client.HTTPException, ConnectionError):
                if parts:
                    self.cut.append(number)
                    return
                self.asked_again.append(number)
                continue
            with self.ended:
                self.texts[number] = "".join(parts)
                self.ended.notify_all()
            return

    def _stream(self, number, parts):
        body = {
            "prompt": f"request {number % 7}", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(f"{answer.status} {answer.read()}")
            is_done = False
            while line := answer.readline():
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    parts.extend(choice["text"] for choice in json.loads(line[6:])["choices"])
            if not is_done:
                raise ConnectionError("the stream was cut")
        finally:
            connection.close()


def replicas_of(process):
    """Return the processes of the replicas."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if any("ServeReplica" in word for word in [*child.cmdline(), child.name()]):
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


def status(port, path, key=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
    found = connection.getresponse().status
    connection.close()
    return found


def kill_under_load(process, port):
    """Kill a replica and wait for another one; return whether the killed one had requests."""
    before = replicas_of(process)
    assert len(before) == 2
    load = Load(port)
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        asked = [clients.submit(load.ask, number) for number in range(NUM_REQUESTS)]
        with load.ended:
            assert load.ended.wait_for(lambda: len(load.texts) >= KILLED_AFTER, 120)
        psutil.Process(before[0]).kill()
        for each in asked:
            each.result(timeout=120)
    print(f"answered {len(load.texts)}, cut {load.cut}, asked again {len(load.asked_again)} times")
    # The killed replica had some of the clients' requests; each of the others has its answer.
    assert len(load.cut) <= NUM_CLIENTS
    assert sorted([*load.texts, *load.cut]) == list(range(NUM_REQUESTS))
    for number, text in load.texts.items():
        assert text == load.texts[next(n for n in load.texts if n % 7 == number % 7)]
        assert len(text) > 0
    for _ in range(600):  # Ray starts another one
        now = replicas_of(process)
        if len(now) == 2 and before[0] not in now:
            break
        threading.Event().wait(0.1)
    assert len(now) == 2
    return bool(load.cut or load.asked_again)


def test_a_replica_that_is_killed_loses_nothing_that_had_not_begun(tmp_path, job_port):
    folder = save_tiny(tmp_path / "tiny")
    key_file = tmp_path / "key.txt"
    key_file.write_text(KEY)
    port = job_port
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    log = (tmp_path / "log.txt").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.deploy.ray_site", str(folder), str(port), str(key_file)],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        assert "ready" in line, (tmp_path / "log.txt").read_text()[-3000:]
        assert (status(port, "/ready"), status(port, "/v1/models")) == (200, 401)
        assert status(port, "/v1/models", KEY) == 200
        # Which replica has a request at a given moment is Ray's choice, and it may be the other one.
        assert any(kill_under_load(process, port) for _ in range(NUM_KILLS)), "no replica was killed at work"
    finally:
        timer.cancel()
        if process.poll() is None:
            process.stdin.write("end\n")
            process.stdin.flush()
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            log.close()
    assert process.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
