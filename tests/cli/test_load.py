"""`colossalai benchmark --serve`: counts and times against servers that do as the test says."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
from click.testing import CliRunner

from colossalai.cli._load._client import Client, RequestOutcome, Target, find_target
from colossalai.cli._load._figures import figures_of
from colossalai.cli._load._load import LoadResult, LoadSettings, _Load, run_clients
from colossalai.cli._main import main
from tests.harness.clocks import FakeClock
from tests.serving.conftest import description, start, tokenizer  # noqa: F401
from tests.serving.fake import LIMIT_S

pytestmark = pytest.mark.unit
STEP_S = 0.03


def invoke(*args):
    return CliRunner().invoke(main, ["benchmark", *args], env={"COLUMNS": "80"})


def outcome(number, began, first, last, ended, tokens, **more):
    times = {"began_s": began, "first_s": first, "last_s": last, "ended_s": ended}
    return RequestOutcome(number=number, output_tokens=tokens, **times, **more)


def test_figures_of_known_times():
    outcomes = (
        outcome(0, 0.0, 0.5, 1.5, 2.0, 11, prompt_tokens=7),
        outcome(1, 1.0, 1.25, 1.25, 1.5, 1, prompt_tokens=8),  # one token: nothing is between
        outcome(2, 2.0, 3.0, 5.0, 5.0, 5, prompt_tokens=9),
        outcome(3, 0.0, None, None, 0.25, 0, error="429", reason="full"),
    )
    found = figures_of(LoadResult(outcomes=outcomes, elapsed_s=5.0, is_whole=True))
    assert (found.finished, found.failed, found.output_tokens, found.prompt_tokens) == (3, {"429": 1}, 17, 24)
    assert (found.requests_per_s, found.output_tokens_per_s) == (3 / 5, 17 / 5)
    assert (found.first_token_s.p50, found.first_token_s.p99) == (0.5, pytest.approx(0.99))
    assert (found.per_token_s.p50, found.per_token_s.p99) == (pytest.approx(0.3), pytest.approx(0.496))
    assert (found.whole_s.p50, found.whole_s.p99) == (2.0, pytest.approx(2.98))
    nothing = figures_of(LoadResult(outcomes=(), elapsed_s=0.0, is_whole=False))
    assert (nothing.requests_per_s, nothing.first_token_s.p50) == (0.0, None)


def test_the_requests_are_those_of_the_seed():
    settings = LoadSettings(requests=300, prompt_tokens=(3, 9), new_tokens=(2, 5), rate=50.0, seed=4)
    questions = list(settings.questions())
    assert questions == list(settings.questions())
    assert {len(each.draws) for each in questions} == set(range(3, 10))
    assert {each.max_tokens for each in questions} == set(range(2, 6))
    gaps = [later.due_s - each.due_s for each, later in pairwise(questions)]
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.2)
    other = list(LoadSettings(requests=300, prompt_tokens=(3, 9), new_tokens=(2, 5), seed=5).questions())
    assert [each.draws for each in other] != [each.draws for each in questions]
    assert {each.due_s for each in other} == {None}


def test_a_load_counts_what_the_server_has_done(start, tmp_path):  # noqa: F811
    site = start(step_s=STEP_S, slots=4)
    results, picture = tmp_path / "results.json", tmp_path / "times.png"
    result = invoke(
        "--serve", f"{site.url}/v1/", "--clients", "4", "--requests", "12", "--prompt-tokens", "5-9",
        "--new-tokens", "3-6", "--json", str(results), "--plot", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(results.read_text())
    asked = [request for request in site.service.seen if len(request.prompt_token_ids) > 3]  # not the first
    assert len(asked) == found["figures"]["finished"] == 12
    assert found["figures"]["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in asked)
    assert found["figures"]["output_tokens"] == sum(request.params.max_tokens for request in asked)
    assert {request.params.max_tokens for request in asked} <= set(range(3, 7))
    assert (found["prompts"], found["tokens_counted_by"], found["model"]) == ("token ids", "usage", "fake")
    for each in found["outcomes"]:
        assert each["began_s"] <= each["first_s"] <= each["last_s"] <= each["ended_s"]
        # The engine sleeps so long between two tokens; the first may be seen late, never early.
        assert each["ended_s"] - each["began_s"] >= (each["output_tokens"] - 1) * STEP_S
    assert found["figures"]["whole_s"]["p50"] >= 2 * STEP_S
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "12 requests in" in result.output
    assert re.search(r"to the first token +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+", result.output)


def test_time_in_the_queue_is_time_to_the_first_token(start):  # noqa: F811
    site = start()
    target = find_target(Target(site.url, "fake"))
    site.service.hold()

    def release_late():
        site.service.wait_for(lambda: site.service.num_running + site.service.num_queued == 3)
        time.sleep(0.2)
        site.service.release()

    pause = threading.Thread(target=release_late)
    pause.start()
    result = run_clients(
        target,
        LoadSettings(requests=3, clients=3, prompt_tokens=(5, 9), new_tokens=(2, 3)),
        after=lambda outcome: None,
    )
    pause.join()
    found = figures_of(result)
    assert found.finished == 3
    assert min(each.first_s - each.began_s for each in result.outcomes) >= 0.2
    assert found.elapsed_s >= found.first_token_s.p99


def test_a_request_that_waits_for_a_client_is_late(start):  # noqa: F811
    site = start(step_s=STEP_S)
    target = find_target(Target(site.url, "fake"))
    settings = LoadSettings(requests=3, clients=1, prompt_tokens=(5, 9), new_tokens=(4, 4), rate=1000.0)
    found = figures_of(run_clients(target, settings, after=lambda outcome: None))
    # All are due at once, and one client makes them one after the other, three steps each at least.
    assert found.whole_s.p99 >= 2 * 3 * STEP_S


def test_a_duration_ends_a_load(start):  # noqa: F811
    site = start(step_s=0.01)
    target = find_target(Target(site.url, "fake"))
    settings = LoadSettings(requests=None, duration_s=0.5, clients=2, prompt_tokens=(5, 9), new_tokens=(2, 2))
    result = run_clients(target, settings, after=lambda outcome: None)
    assert result.is_whole
    assert {each.error for each in result.outcomes} <= {None}


def test_an_interrupt_leaves_out_no_request_that_has_ended(start):  # noqa: F811
    site = start()

    def interrupt(outcome):
        for thread in threading.enumerate():
            if thread.name == "client 0":
                thread.join()  # it has made all requests
        raise KeyboardInterrupt

    settings = LoadSettings(requests=3, clients=1, prompt_tokens=(5, 9), new_tokens=(2, 2))
    result = run_clients(find_target(Target(site.url, "fake")), settings, after=interrupt)
    assert len(result.outcomes) == 3
    assert not result.is_whole


def test_no_request_is_due_after_the_duration():
    time_of_test = FakeClock()
    load = _Load(LoadSettings(requests=None, duration_s=0.5), time_of_test.clock)
    for _ in range(5):
        assert load.next() is not None
        time_of_test.sleep(0.1)
    assert load.next() is None
    time_of_test = FakeClock()
    load = _Load(LoadSettings(requests=None, duration_s=0.5, rate=20.0), time_of_test.clock)
    due = []
    while (question := load.next()) is not None:
        due.append((question.due_s, time_of_test.seconds))
    assert len(due) > 2
    assert all(seconds == pytest.approx(due_s) for due_s, seconds in due)
    assert time_of_test.seconds < 0.5


def test_failures_are_counted_and_say_why(start, tmp_path):  # noqa: F811
    site = start()
    site.service.refuse = lambda request: len(request.prompt_token_ids) > 20
    result = invoke("--serve", site.url, "--requests", "9", "--prompt-tokens", "30", "--new-tokens", "2")
    assert result.exit_code == 1  # nothing was answered
    assert "9 requests failed: 9 x 400" in result.output
    assert re.search(r"request \d: 400: \S+ is refused by the test", result.output)
    site.service.refuse = lambda request: False
    target = find_target(Target(site.url, "fake"))
    site.service.fail_at = 3
    settings = LoadSettings(requests=4, clients=2, prompt_tokens=(5, 9), new_tokens=(8, 8))
    found = figures_of(run_clients(target, settings, after=lambda outcome: None))
    assert (found.finished, found.failed) == (0, {"error in stream": 4})
    site.server.stop(0.0)
    found = figures_of(run_clients(target, settings, after=lambda outcome: None))
    assert found.failed == {"refused": 4}


def test_a_key_goes_along_and_is_shown_nowhere(start, tmp_path):  # noqa: F811
    site = start(options={"api_key": "secret-of-the-test"})
    key = tmp_path / "key.txt"
    key.write_text("secret-of-the-test\n")
    args = ("--serve", site.url, "--requests", "2", "--new-tokens", "2", "--prompt-tokens", "5")
    result = invoke(*args, "--api-key-file", str(key), "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["figures"]["finished"] == 2
    assert "secret" not in result.output + repr(Target(site.url, "fake", "secret-of-the-test"))
    refused = invoke(*args)
    assert refused.exit_code == 2
    assert "401" in refused.output


class _Plain(BaseHTTPRequestHandler):
    """A server that takes texts only, none of the fields beyond OpenAI's, and counts no tokens."""

    protocol_version = "HTTP/1.1"
    bodies: list = []  # noqa: RUF012

    def do_GET(self):
        self._answer(200, json.dumps({"data": [{"id": "plain"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).bodies.append(body)
        unknown = set(body) - {"model", "prompt", "max_tokens", "temperature", "stream"}
        if unknown or not isinstance(body["prompt"], str):
            self._answer(422 if unknown else 400, json.dumps({"error": {"message": f"{unknown}"}}))
            return
        parts = [json.dumps({"choices": [{"text": "a "}]})] * body["max_tokens"]
        self._answer(200, "".join(f"data: {part}\n\n" for part in [*parts, "[DONE]"]))

    def _answer(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


def test_a_server_that_takes_texts_only(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Plain)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))  # how often it looks for its end
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        result = invoke(
            "--serve",
            url,
            "--requests",
            "3",
            "--clients",
            "1",
            "--prompt-tokens",
            "4",
            "--new-tokens",
            "5",
            "--json",
            "-",
        )
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["prompts"], found["model"]) == ("texts", "plain")
        assert found["tokens_counted_by"] == "parts of the stream"
        assert found["figures"]["failed"] == {}, found["outcomes"]
        assert (found["figures"]["output_tokens"], found["figures"]["prompt_tokens"]) == (15, None)
        assert {len(body["prompt"].split()) for body in _Plain.bodies[-3:]} == {4}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_stream_that_is_cut_is_a_failure(tmp_path):
    class Cut(_Plain):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(200, 'data: {"choices": [{"text": "a "}]}\n\n')

    server = ThreadingHTTPServer(("127.0.0.1", 0), Cut)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))  # how often it looks for its end
    thread.start()
    try:
        client = Client(Target(f"http://127.0.0.1:{server.server_port}", "plain"))
        (question,) = LoadSettings(requests=1).questions()
        made = client.ask(question)
        assert (made.error, made.output_tokens) == ("cut stream", 1)
        client.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_ctrl_c_shows_what_was_measured_so_far(start):  # noqa: F811
    site = start(slots=1)
    command = [sys.executable, "-m", "colossalai.cli", "benchmark", "--serve", site.url, "--clients", "2"]
    process = subprocess.Popen(
        [*command, "--new-tokens", "2", "--prompt-tokens", "5", "--duration", "600"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        site.service.wait_for(lambda: len(site.service.ended) > 5)
        site.service.hold()
        # Both clients have made their next request: they have the answers of all that have ended.
        site.service.wait_for(lambda: site.service.num_running + site.service.num_queued == 2)
        num_ended = len(site.service.ended) - 1  # the command asks once before its clients do
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Interrupted: what has ended so far." in said
    assert int(re.search(r"(\d+) requests in", said)[1]) in (num_ended - 1, num_ended)  # or one is in hand


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--serve", "127.0.0.1:8020"), "give an address such as http://127.0.0.1:8020"),
        (("--serve", "http://127.0.0.1:9"), "refused"),
        (("--serve", "http://127.0.0.1:9", "--gpus", "2"), "--gpus is for the processes of --gpus"),
        (("--serve", "http://127.0.0.1:9", "--modes", "1d"), "--modes is for the processes of --gpus"),
        (("--gpus", "2", "--clients", "2"), "--clients is an option of --serve URL"),
        (("--serve", "http://127.0.0.1:9", "--new-tokens", "9-3"), "--new-tokens 9-3: give LOW-HIGH"),
        (("--serve", "http://127.0.0.1:9", "--prompt-tokens", "x"), "'x' is not a range such as 16-192"),
        (("--serve", "http://127.0.0.1:9", "--api-key-file", "nosuch"), "nosuch cannot be read"),
        (("--serve", "http://127.0.0.1:9", "--plot", "times.xyz"), "the name must end in .png"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args, message):
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
