"""Every example of every `colossalai ... --help` runs, in a folder that has the files which it names.

The examples are read from the printed help, so that a new one is run without a change here; a new file that
it reads needs a line in `MAKERS`. `in_this_world` replaces hosts, addresses and ports.
"""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from colossalai.cli import _check, main
from colossalai.cli._bandwidth import _command as bandwidth_command
from colossalai.cli._bandwidth import _worker as bandwidth_worker
from colossalai.cli._benchmark import _command as benchmark_command
from colossalai.cli._benchmark import _worker as benchmark_worker
from colossalai.cli._memory import _trace, _trace_worker
from colossalai.cluster import _doctor
from colossalai.kernel._profile_cache import AgreeingRuns
from colossalai.launcher import Job
from colossalai.launcher.preflight import PreflightReport, PreflightRequest
from colossalai.serving.command import _serve
from tests.cli.help_inputs import KEY, make_inputs
from tests.examples.help_text import MOST_COLUMNS, examples_of
from tests.ranks import run_ranks
from tests.serving.conftest import description, start, tokenizer  # noqa: F401
from tests.serving.served_folder import serve_folder


def commands(command: click.Command = main, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, groups included."""
    yield names
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, *names, name)


def help_of(names: tuple[str, ...]) -> str:
    result = CliRunner().invoke(main, [*names, "--help"], env={"COLUMNS": str(MOST_COLUMNS)})
    assert result.exit_code == 0, result.output
    return result.output


HELP = {names: help_of(names) for names in commands()}
EXAMPLES = tuple(dict.fromkeys(example for text in HELP.values() for example in examples_of(text)))
# These compute for long. Cheaper examples of their commands are in `make test`, or tests beside this one.
COSTLY = (
    "colossalai benchmark --gpus ",
    "colossalai check --bandwidth ",
    "colossalai memory --model gpt2-small --trace ",
    "colossalai memory --rlhf --memory 80GiB",
    "colossalai plan gpt",
)
WORKERS = {module.__name__: module.main for module in (bandwidth_worker, benchmark_worker, _trace_worker)}


def tiered(example: str) -> Any:
    return pytest.param(example, marks=pytest.mark.long if example.startswith(COSTLY) else (), id=example)


@pytest.mark.unit
@pytest.mark.parametrize("names", HELP, ids=lambda names: " ".join(("colossalai", *names)))
def test_a_help_has_examples_and_fits_a_terminal(names: tuple[str, ...]) -> None:
    examples = examples_of(HELP[names])
    assert examples
    assert [each for each in examples if not each.startswith(" ".join(("colossalai", *names)))] == []
    assert [line for line in HELP[names].splitlines() if len(line) > MOST_COLUMNS] == []


@pytest.mark.unit
def test_each_costly_example_is_one() -> None:
    assert [costly for costly in COSTLY if not any(each.startswith(costly) for each in EXAMPLES)] == []


def launch_forked(job: Job) -> int:
    """Run the ranks of a job in the pool of the tests."""
    run_ranks(WORKERS[job.target], job.num_procs or 0, *job.args)
    return 0


def no_hosts(request: PreflightRequest) -> PreflightReport:
    """Return what `check --doctor` shows where all is well; the hosts of the examples do not exist."""
    return PreflightReport(
        findings=(), absent={}, interfaces={}, master_addr=request.hosts[0].name, master_port=0, seconds=0.0
    )


@pytest.fixture
def in_this_world(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    start: Callable[..., Any],  # noqa: F811
) -> Callable[[list[str]], list[str]]:
    """Return a function that returns the words of an example with what exists here.

    - `run` on hosts: its commands are printed (`--dry-run`), no host is reached.
    - `check --doctor`: the checks of the hosts find nothing.
    - `serve` stops where the model would be loaded; `test_a_server_of_an_example_answers_and_stops` goes on.
    - `benchmark --serve`: the address is that of the tests' server, which gets less load.
    - `benchmark --gpus`: one round, and small layers.
    - Ranks of the command's own are forked; ports are free ones.
    - `check -i` imports no optional libraries.
    - `check --matmul` believes one run: on a busy machine five differ, and it ends with 1.
    """
    for module in (bandwidth_command, benchmark_command, _trace):
        monkeypatch.setattr(module, "launch", launch_forked)
    monkeypatch.setattr(_check, "preflight", no_hosts)
    monkeypatch.setattr(_serve, "serve_rank", lambda options: None)
    monkeypatch.setattr(_serve, "_run_on_ranks", lambda options, plan: 0)
    monkeypatch.setattr(_doctor, "_LIBRARIES", ())  # importing them all takes seconds
    monkeypatch.setattr(AgreeingRuns, "is_believed", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("COLOSSALAI_CONFIG_SET", "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")  # `run` sets it: as it was after the test
        monkeypatch.delenv(name)

    def replace(words: list[str]) -> list[str]:
        here = list(words)
        if words[0] == "run" and {"--host", "--hostfile"} & set(words):
            here.insert(1, "--dry-run")
        smaller = {
            "--requests": "50",
            "--duration": "1",
            "--master_port": "0",
            "--offload-dir": str(tmp_path),
        }
        for name, value in smaller.items():
            if name in words:
                here[here.index(name) + 1] = value
        if words[:2] == ["benchmark", "--gpus"]:
            here += ["--rounds", "1", "--warmup", "0", "--seq_length", "16", "--num_layers", "1"]
        if words[:2] == ["benchmark", "--serve"]:
            key = {"api_key": KEY} if "--api-key-file" in words else {}
            here[2] = start(window=512, slots=32, options={"port": 0, **key}).url
        return [*here, "--port", "0"] if words[0] == "serve" and "--port" not in words else here

    return replace


@pytest.mark.dist
@pytest.mark.parametrize("example", [tiered(each) for each in EXAMPLES])
def test_an_example_runs(
    example: str,
    in_this_world: Callable[[list[str]], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(example)[1:]
    make_inputs(words, tmp_path)
    command = in_this_world(words[: words.index(">")] if ">" in words else words)
    result = CliRunner().invoke(main, command, env={"COLUMNS": str(MOST_COLUMNS)})
    assert result.exit_code == 0, result.output


@pytest.mark.unit
@pytest.mark.long
@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.startswith("colossalai serve ")])
def test_a_server_of_an_example_answers_and_stops(example: str, tmp_path: Path) -> None:
    words = shlex.split(example)[1:]
    make_inputs(words, tmp_path)
    served = serve_folder(tmp_path, *words[1:], "--port", "0", key=KEY if "--api-key-file" in words else None)
    try:
        served.wait_until_ready()
        assert served.text()
        assert served.end() == 0
    finally:
        served.command.end()
