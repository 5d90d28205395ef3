"""`colossalai serve` as a user starts it: processes, ports, signals, keys, ranks that die, usage errors."""

import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from click.testing import CliRunner

from colossalai.cli import main
from tests.launcher.command import wait_until
from tests.serving.served_folder import START_S, ServedFolder, are_gone, save_tiny, serve_folder
from tests.tiers import in_soak, of_soak

pytestmark = pytest.mark.unit
KEY = "swordfish-on-a-stick-81"
LONG = {"prompt": "the quick", "max_tokens": 480, "ignore_eos": True}
END_S = 300.0  # for an end that has nothing to wait for, on a busy machine
NO_DRAIN = ("--drain", "36000")  # a service that drains when a rank has died would do so for ten hours


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., ServedFolder]]:
    """Return a function that starts a service; all are ended after the test."""
    with ExitStack() as ends:

        def begin(*words: str, key: str | None = None, name: str = "run") -> ServedFolder:
            served = serve_folder(tmp_path / name, *words, key=key)
            ends.callback(served.command.end)
            return served

        yield begin


@pytest.fixture(scope="session")
def greedy_text(tiny: Path) -> str:
    """What one process answers, computed without any server."""
    from colossalai.inference import LLM, SamplingParams

    (output,) = LLM(str(tiny), kv_memory=2**22).generate(
        ["the quick"], SamplingParams(max_tokens=24, temperature=0)
    )
    return output.text


class Stream:
    """A stream of a client in a thread of its own."""

    def __init__(self, served: ServedFolder, **body: Any) -> None:
        self.lines: list[str] = []
        self.status: int | None = None
        self._body = {**LONG, "stream": True, **body}
        self._served = served
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: len(self.lines) > 2 or not self._thread.is_alive(), END_S)

    def join(self) -> list[dict[str, Any]]:
        """Return its events, but for the last one, which says that it is whole."""
        self._thread.join()
        assert self.lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]

    def _read(self) -> None:
        with self._served.client() as client, client.stream("POST", "/v1/completions", json=self._body) as it:
            self.status = it.status_code
            self.lines += (line for line in it.iter_lines() if line)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def drains_well(served: ServedFolder, number: signal.Signals) -> None:
    """Ask it to end while a stream runs: the stream ends whole, nothing new is taken, all processes end."""
    stream, pids = Stream(served), served.pids
    served.command.process.send_signal(number)
    wait_until(lambda: served.get("/ready").status_code == 503, END_S)
    events = stream.join()
    assert stream.status == 200
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert served.command.wait(END_S) == 0, served.log
    assert are_gone(pids)
    assert "Traceback" not in served.log


def test_a_folder_is_served_until_sigterm(
    tiny: Path, begin: Callable[..., ServedFolder], greedy_text: str
) -> None:
    served = begin(str(tiny), "--port", "0", "--kv-memory", "32MiB").wait_until_ready()
    assert served.port != 8020
    assert served.log.index("loading tiny on one rank") < served.log.index("tiny is loaded in")
    assert served.text() == greedy_text != ""
    assert served.get("/v1/models").json()["data"][0]["id"] == "tiny"
    chat = served.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "fox"}], max_tokens=8, temperature=0
    ).json()
    assert chat["choices"][0]["message"]["content"] == served.text("user: fox\nassistant:", max_tokens=8)
    generated = served.post("/generation", prompt="the quick", max_tokens=24, temperature=0)
    assert generated.json()["text"] == greedy_text
    assert "requests of 512 tokens fit" in served.log
    assert "the quick" not in served.log  # prompts are not logged
    drains_well(served, signal.SIGTERM)


def kill_during_a_request(served: ServedFolder, rank: int) -> Any:
    """Kill a rank while it answers; return the answer once the command has ended."""
    thread, answers = in_thread(lambda: served.post("/v1/completions", **LONG, temperature=0))
    wait_until(lambda: 'colossalai_requests_running{model="tiny"} 1' in served.get("/metrics").text, END_S)
    os.kill(served.pid_of(rank), signal.SIGKILL)
    served.command.wait(END_S)
    thread.join()
    return answers[0]


@pytest.mark.long
def test_two_ranks_keep_the_key_and_drain_as_one_process_does(
    tiny: Path, begin: Callable[..., ServedFolder], greedy_text: str, tmp_path: Path
) -> None:
    (tmp_path / "key.txt").write_text(f"{KEY}\n")
    words = ("--api-key-file", str(tmp_path / "key.txt"), "--open-metrics")
    served = begin(str(tiny), "--port", "0", "--kv-memory", "32MiB", "--tp", "2", *words, key=KEY)
    served.wait_until_ready()
    assert "loading tiny on 2 ranks (tp 2, pp 1)" in served.log
    assert served.text() == greedy_text
    assert served.get("/v1/models", authorization="Bearer wrong").status_code == 401
    assert len(served.pids) >= 3
    assert not any(KEY in word for pid in served.pids for word in psutil.Process(pid).cmdline())
    drains_well(served, signal.SIGTERM)
    assert KEY not in served.log


CONFIG = """
from colossalai.inference.models import opt_125M

def _small():
    return opt_125M(num_hidden_layers=2, num_attention_heads=2, hidden_size=32, ffn_dim=48, vocab_size=320,
                    word_embed_proj_dim=32, max_position_embeddings=64, dtype="float32")

model_class = _small
checkpoint = {checkpoint!r}
tokenizer_path = {tokenizer!r}
server_port = {port}
executor_max_batch_size = 1
executor_max_queue_size = 1
cache_size = 2
timeout_keep_alive = 2.5
log_level = {log_level!r}
"""


def write_config(
    folder: Path, tiny: Path, *, more: str = "", log_level: str = "info", port: str = "0"
) -> Path:
    """Write the config of a small OPT, and its values."""
    from transformers import OPTForCausalLM

    from colossalai.inference.models import opt_125M

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    sizes |= {"ffn_dim": 48, "vocab_size": 320, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    OPTForCausalLM(opt_125M(**sizes, dtype="float32", init_std=0.3)).save_pretrained(folder / "values")
    file = folder / "opt_config.py"
    text = CONFIG.format(
        checkpoint=str(folder / "values"), tokenizer=str(tiny), log_level=log_level, port=port
    )
    file.write_text(text + more)
    return file


@pytest.mark.long
def test_a_config_is_served_with_its_limits(
    tiny: Path, begin: Callable[..., ServedFolder], tmp_path: Path, job_port: int
) -> None:
    from colossalai.inference import LLM, SamplingParams

    config = write_config(tmp_path, tiny, log_level="warning", port=str(job_port))
    served = begin("--config", str(config), "--kv-memory", "32MiB")
    served.port = job_port  # which nothing tells, at this level

    def is_ready() -> bool:
        with suppress(httpx.ConnectError):
            return served.get("/ready").status_code == 200
        return False

    wait_until(is_ready, START_S)
    (expected,) = LLM(
        str(tmp_path / "values"), tokenizer=str(tiny), dtype="float32", kv_memory=2**22
    ).generate("the quick", SamplingParams(max_tokens=24, temperature=0))
    assert [served.text() for _ in range(2)] == [expected.text] * 2
    assert 'colossalai_answer_cache_hits_total{model="_small"} 1' in served.get("/metrics").text

    def statuses() -> set[int]:
        """Ask from several clients at once: one is answered, one waits, and there is no room for a third."""
        asked = [in_thread(lambda: served.post("/v1/completions", **LONG)) for _ in range(8)]
        for thread, _ in asked:
            thread.join()
        return {answers[0].status_code for _, answers in asked}

    wait_until(lambda: statuses() == {200, 429}, END_S)
    assert served.end() == 0
    assert "INFO" not in served.log


@pytest.mark.long
def test_a_second_interrupt_ends_the_drain(tiny: Path, begin: Callable[..., ServedFolder]) -> None:
    served = begin(str(tiny), "--port", "0", "--kv-memory", "32MiB").wait_until_ready()
    ends_at_once(served)


def ends_at_once(served: ServedFolder) -> None:
    """Press Ctrl-C twice while streams run that would take long: they end with what they have."""
    pids = served.pids
    streams = [Stream(served, n=16) for _ in range(4)]
    served.command.process.send_signal(signal.SIGINT)
    wait_until(lambda: served.get("/ready").status_code == 503, END_S)
    served.command.process.send_signal(signal.SIGINT)
    reasons = {event["choices"][0]["finish_reason"] for stream in streams for event in stream.join()}
    assert "abort" in reasons
    assert served.command.wait(END_S) == 0, served.log
    assert are_gone(pids)


@pytest.mark.long
def test_a_key_of_the_environment_reaches_the_ranks_and_nobody_else(
    tiny: Path, begin: Callable[..., ServedFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOSSALAI_API_KEY", KEY)
    words = ("--port", "0", "--host", "0.0.0.0", "--max-restarts", "1")
    served = begin(str(tiny), *words, key=KEY).wait_until_ready()
    assert served.text()
    assert served.get("/v1/models", authorization="").status_code == 401
    assert not any(KEY in word for pid in served.pids for word in psutil.Process(pid).cmdline())
    ends_at_once(served)
    assert KEY not in served.log


def restarts(served: ServedFolder, rank: int, text: str) -> None:
    """Kill a rank; the ranks are started again, and answer as before on the same port."""
    port = served.wait_until_ready().port
    os.kill(served.pid_of(rank), signal.SIGKILL)
    served.wait_until_ready(num_starts=2)
    assert served.port == port
    assert served.text() == text
    assert "restart 1 of 1" in served.log


@pytest.mark.long
@pytest.mark.parametrize(("words", "has_port"), [(("--pp", "2"), True), in_soak(("--tp", "2"), False)])
def test_ranks_answer_again_after_a_restart_and_end_after_the_last(
    tiny: Path,
    begin: Callable[..., ServedFolder],
    words: tuple[str, ...],
    has_port: bool,
    greedy_text: str,
    job_port: int,
) -> None:
    port = str(job_port) if has_port else "0"
    served = begin(str(tiny), "--port", port, "--max-restarts", "1", *NO_DRAIN, *words)
    restarts(served, 1, greedy_text)
    pids, dead = served.pids, served.pid_of(1)
    answer = kill_during_a_request(served, 1)
    assert answer.status_code == 500
    assert "rank 1" in answer.json()["error"]["message"]
    assert served.command.process.returncode == 128 + signal.SIGKILL
    assert are_gone(pids)
    assert re.search(rf"rank 1 on \S+ \(pid {dead}\) was killed by SIGKILL", served.log)


@of_soak  # as two ranks, above
def test_one_process_answers_again_on_the_same_port(
    tiny: Path, begin: Callable[..., ServedFolder], greedy_text: str
) -> None:
    served = begin(str(tiny), "--port", "0", "--max-restarts", "1")
    restarts(served, 0, greedy_text)
    pids = served.pids
    os.kill(served.pid_of(0), signal.SIGKILL)
    assert served.command.wait(END_S) == 128 + signal.SIGKILL
    assert are_gone(pids)


def usage_error(*words: str) -> str:
    """Return what is said of words that are refused; nothing has been started."""
    result = CliRunner().invoke(main, ["serve", *words])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert not psutil.Process().children() or all(
        "colossalai.serving" not in " ".join(child.cmdline()) for child in psutil.Process().children()
    )
    return " ".join(result.output.split())


def test_what_cannot_be_served_is_refused_in_words(tiny: Path, tmp_path: Path) -> None:
    folder = str(tiny)
    missing, empty = str(tmp_path / "missing"), tmp_path / "empty"
    empty.mkdir()
    for words in ((), ("--tp", "2"), ("--max-restarts", "1")):
        assert f"{missing!r} is no folder here" in usage_error(missing, *words)
        assert "has no config.json" in usage_error(str(empty), *words)
    assert "there is no api_key" in usage_error(missing, "--host", "0.0.0.0")  # before anything is looked at
    assert "dtype='float31'" in usage_error(folder, "--dtype", "float31")
    assert "speculate='ngram:0'; it must be" in usage_error(folder, "--speculate", "ngram:0", "--tp", "2")
    other = save_tiny(tmp_path / "other") / "config.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"vocab_size": 3000}))
    for words in ((), ("--tp", "2")):
        said = usage_error(folder, "--speculate", f"{other.parent}:2", "--port", "0", *words)
        assert "drafts come from a model with the same tokens" in said
    assert "dtype='int8'" in usage_error(folder, "--dtype", "int8", "--tp", "2")
    assert "num_attention_heads is 4, which they do not divide" in usage_error(folder, "--tp", "3")
    assert "4 blocks, fewer than 5 stages" in usage_error(folder, "--pp", "5")
    assert "no model to serve" in usage_error()
    assert "max_length=1000" in usage_error(folder, "--max-length", "1000")
    assert "max_length=1000" in usage_error(folder, "--max-length", "1000", "--tp", "2")
    assert "--api-key-file" in usage_error(folder, "--api-key-file", missing)
    assert "is not a folder, so it has no tokenizer" in usage_error(folder, "--tokenizer", missing)
    assert "kv_memory=2.0; it must be a fraction" in usage_error(folder, "--kv-memory", "2.0")
    assert "max_length=1; it must be at least 2" in usage_error(folder, "--max-length", "1")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    said = usage_error(folder, "--api-key-file", str(binary))
    assert f"--api-key-file {binary} is not in UTF-8" in said.replace("key- file", "key-file")
    tls = ("--ssl-keyfile", missing, "--ssl-certfile", missing)
    for words in ((), ("--tp", "2")):
        said = usage_error(folder, "--port", "0", "--checkpoint", missing, *words)
        assert "checkpoint=" in said
        assert "does not exist" in said
        # before the model is looked at, which may take minutes
        assert "cannot be used" in usage_error(str(empty), "--port", "0", *tls, *words)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert f"port={port} cannot be listened on" in usage_error(folder, "--port", port, "--tp", "2")


def test_a_config_that_is_wrong_is_refused_in_words(tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny, more="executor_max_batchsize = 3\n")
    said = usage_error("--config", str(config))
    assert "'executor_max_batchsize' is no key of a service" in said
    assert "'executor_max_batch_size'" in said
    assert "opt_config.py" in said
    assert "missing.py" in usage_error("--config", str(tmp_path / "missing.py"))


def test_a_model_that_misses_the_attention_interface_is_refused(tmp_path: Path) -> None:
    said = usage_error(str(save_tiny(tmp_path / "falcon", family="Falcon")), "--port", "0")
    assert "FalconForCausalLM cannot be served" in said
    assert "does not go through the attention interface" in said


@pytest.mark.long
def test_what_only_ranks_can_refuse_is_told_in_a_sentence(
    tiny: Path, begin: Callable[..., ServedFolder], tmp_path: Path
) -> None:
    """Not with a traceback, not by each rank, and not again after a restart."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "short"
    shutil.copytree(tiny, folder)
    values = load_file(folder / "model.safetensors")
    values["model.norm.weight"] = values["model.norm.weight"][:5].clone()
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    served = begin(str(folder), "--port", "0", "--tp", "2", "--max-restarts", "2")
    assert served.command.wait() == 2
    assert served.log.count("does not fit the model; nothing was loaded") == 1
    assert "model.norm.weight: (5,)" in served.log
    for word in ("Traceback", "rank 1", "after it", "restart"):
        assert word not in served.log


def test_all_of_a_config_reaches_the_ranks(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colossalai.serving.command import _serve

    started: list[Any] = []
    monkeypatch.setattr(_serve, "run_ranks", lambda options: started.append(options) or 0)
    more = "tp_init_size = 2\npp_init_size = 2\nhost = '127.0.0.1'\nport = 29501\n"
    more += "executor_max_batch_size = 900\n"
    more += "timeout_keep_alive = 0.5\nallow_cors = True\nhalf = True\nbackend = 'gloo'\n"
    config = str(write_config(tmp_path, tiny, more=more))
    runner = CliRunner()
    assert runner.invoke(main, ["serve", "--config", config, "--drain", "0"]).exit_code == 0
    (options,) = started
    assert (options.num_procs, options.master_port, options.master_addr) == (4, 29501, None)
    assert options.drain_s == _serve._END_S
    plan = _serve._plan(_serve.ServeOptions.from_json(options.args[0]))
    assert (plan.tp, plan.pp, plan.backend) == (2, 2, "gloo")
    assert (plan.engine.max_running, plan.engine.max_tokens_per_step) == (900, 900)
    assert (plan.engine.max_queue, plan.engine.dtype) == (1, "float16")
    assert (plan.server["keep_alive_s"], plan.server["allow_cors"], plan.server["drain_s"]) == (1, True, 0)
    # What the command says goes before it.
    assert (
        runner.invoke(
            main, ["serve", "--config", config, "--tp", "1", "--dtype", "float32", "--speculate", "ngram:4"]
        ).exit_code
        == 0
    )
    plan = _serve._plan(_serve.ServeOptions.from_json(started[1].args[0]))
    assert (started[1].num_procs, plan.tp, plan.pp, plan.engine.dtype) == (2, 1, 2, "float32")
    assert plan.engine.speculate == "ngram:4"
    with open(config, "a") as file:
        file.write("host = '10.0.0.1'\n")
    assert runner.invoke(main, ["serve", "--config", config]).exit_code == 0
    assert started[2].master_addr == "10.0.0.1"
