"""`colossalai memory --trace`: two iterations are trained truly, drawn and counted."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from colossalai.cli._main import main
from colossalai.cli._memory import _trace, _trace_worker
from colossalai.cli._memory._shape import MODEL_NAMES, build_model, shape_of
from colossalai.cli._memory._trace import count_of
from colossalai.launcher import Job
from tests.examples.help_text import examples_of
from tests.ranks import run_ranks

PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["memory", *args], env={"COLUMNS": "80"})


def launch_forked(job: Job) -> int:
    """Run the ranks of a job, in a twentieth of the time."""
    assert job.target == _trace_worker.__name__
    run_ranks(_trace_worker.main, job.num_procs, *job.args)
    return 0


PLAIN = ("--model", "vit-lite", "--dp", "2", "--trace", "plain.png", "--precision", "fp32")


def check_table(result: Result, policy: str) -> list[str]:
    """Return the lines of a table, with one space between words."""
    assert result.exit_code == 0, result.output
    assert Path("plain.png").read_bytes().startswith(PNG)
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[1:])
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith(f"vit-lite, 4 of 7 blocks, fp32, batch 1 x 65; rank 0 of 2, '{policy}'")
    assert "--blocks 7 trains the whole model." in lines
    return lines


@pytest.mark.dist
@pytest.mark.long  # `make test` shows a trace with a budget
def test_a_trace_without_a_budget_is_drawn_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_trace, "launch", launch_forked)
    monkeypatch.chdir(tmp_path)
    assert "moved in from below 0 B" in check_table(invoke(*PLAIN), "cpu")


@pytest.mark.dist
def test_a_trace_is_drawn_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    written: list[str] = []

    def launch_once(job: Job) -> int:
        file = Path(str(job.args[1]))
        if written:  # the same again, in other words
            file.write_text(written[0])
        else:
            launch_forked(job)
            written.append(file.read_text())
        return 0

    monkeypatch.setattr(_trace, "launch", launch_once)
    budget = ("--memory-budget", "12MiB", "--offload-dir", "chunks", "--batch", "1")
    result = invoke(*PLAIN, "--trace", "budget.png", *budget, "--json")
    assert result.exit_code == 0, result.output
    assert Path("budget.png").read_bytes().startswith(PNG)
    found = json.loads(result.stdout)
    assert found["settings"]["memory_budget"] == 12 * 2**20
    assert found["settings"]["placement_policy"] == "auto"
    recorded, planned = found["iterations"]
    assert (recorded["is_planned"], planned["is_planned"]) == (False, True)
    for iteration in found["iterations"]:
        moments = iteration["moments"]
        assert {moment["phase"] for moment in moments} == {"forward", "backward", "step"}
        assert iteration["bytes_in"] == sum(moment["bytes_in"] for moment in moments) > 0
        before_step = [moment for moment in moments if moment["phase"] != "step"]
        kinds = ("gathered", "section", "gradient", "state", "other")
        sums = [sum(moment[f"{kind}_bytes"] for kind in kinds) for moment in before_step]
        assert max(sums) <= 12 * 2**20
    lines = check_table(invoke(*PLAIN, *budget), "auto")
    assert any(line.startswith("moved in from below ") for line in lines)

    monkeypatch.setattr(_trace, "launch", launch_forked)
    result = invoke(*PLAIN, "--memory-budget", "1MiB", "--offload-dir", "chunks")
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert re.search(
        r"--memory-budget 1MiB is less than the largest chunks take: give --memory-budget \d+MiB", words
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--trace", "out.doc"), "--trace out.doc: the name must end in .png, .svg, .pdf"),
        (("--trace", "nosuch/out.png"), "there is no folder 'nosuch' to write 'out.png' into"),
        (("--trace", "out.png", "--tp", "2"), "--tp 2 with --trace, which traces Gemini"),
        (("--trace", "out.png", "--zero", "1"), "--zero 1 with --trace, which traces Gemini"),
        (("--trace", "out.png", "--precision", "bf16"), "choose one of fp32, bf16_master, fp16_naive"),
        (("--trace", "out.png", "--blocks", "13"), "--blocks 13: gpt2-small has 12 blocks only"),
        (("--trace", "out.png", "--seq", "2000"), "--seq 2000: gpt2-small takes at most 1024"),
        (("--trace", "out.png", "--placement-policy", "disk"), "disk: choose one of cuda, cpu, const, auto"),
        (("--trace", "out.png", "--memory-budget", "much"), "--memory-budget much: give bytes, such as"),
        (
            ("--trace", "out.png", "--memory-budget", "1GiB"),
            "there is no tier below memory: give --offload-dir",
        ),
        (("--trace", "out.png", "--explain"), "--trace measures, and has no formulas: leave --explain out"),
        (("--trace", "out.png", "--dp", "9999"), "parameters on 9999 ranks take about"),
        (("--memory-budget", "1GiB"), "--memory-budget is an option of --trace FILE.png"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args: tuple[str, ...], message: str) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("--model", "gpt2-small", *args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.unit
def test_ctrl_c_and_a_failed_job_end_with_their_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    def interrupt(_: Job) -> int:
        raise KeyboardInterrupt

    args = ("--model", "vit-lite", "--trace", str(tmp_path / "out.png"))
    monkeypatch.setattr(_trace, "launch", interrupt)
    assert invoke(*args).exit_code == 130
    monkeypatch.setattr(_trace, "launch", lambda _: 7)
    assert invoke(*args).exit_code == 7
    assert not list(tmp_path.iterdir())


@pytest.mark.unit
def test_a_trace_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = invoke("--model", "gpt2-small", "--trace", "out.png")
    assert "--trace draws with matplotlib, which is not installed" in " ".join(result.output.split())


@pytest.mark.unit
def test_parameters_are_those_of_the_model_that_is_built() -> None:
    assert "vit-lite" in MODEL_NAMES
    for name in ("vit-lite", "gpt2-small", "bert-base"):
        with torch.device("meta"):
            model = build_model(name, num_blocks=3, attention="sdpa")
        assert sum(param.numel() for param in model.parameters()) == count_of(shape_of(name), 3)


@pytest.mark.unit
def test_the_commands_of_the_pages_have_these_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_trace, "launch", lambda _: 7)
    monkeypatch.chdir(tmp_path)
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "features/memory.md").read_text() + (docs / "design/gemini_tiers.md").read_text()
    commands = re.findall(r"colossalai memory ([^`\n]*--trace [^`\n]*)", text)
    of_help = [each.removeprefix("colossalai memory ") for each in examples_of(invoke("--help").output)]
    commands += [each for each in of_help if "--trace" in each]
    assert len(commands) == 5
    for command in commands:
        args = command.replace("path/to/config.json", "vit-base").split()
        assert invoke(*args).exit_code == 7, command
    assert (docs / "design/gemini_one_iteration.png").read_bytes().startswith(PNG)
