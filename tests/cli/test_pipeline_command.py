"""`colossalai pipeline`: the figures are those of the schedules, and mistakes are said in plain words."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from colossalai.cli import main
from colossalai.cli._pipeline import PipelineSettings
from colossalai.cli._pipeline._chart import draw
from colossalai.cli._pipeline._command import stage_costs
from colossalai.pipeline.schedules._csv import write_schedule
from colossalai.pipeline.schedules._generators import SCHEDULES, make_schedule
from colossalai.pipeline.schedules._simulate import Costs, simulate
from tests.tiers import after_the_first

pytestmark = pytest.mark.unit
PNG = b"\x89PNG\r\n\x1a\n"
EIGHT = ("--stages", "8", "--microbatches", "32")


def _invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["pipeline", *args], env={"COLUMNS": "120"})


def _figures(*args: str) -> dict[str, dict]:
    result = _invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return {figures["schedule"]: figures for figures in json.loads(result.output)}


def test_help_has_an_example():
    result = _invoke("--help")
    assert result.exit_code == 0
    assert "\n    colossalai pipeline --stages 8 --microbatches 32\n" in result.output


def test_the_steps_of_each_rank_are_listed_with_their_messages():
    result = _invoke("--stages", "2", "--microbatches", "2", "--schedule", "1f1b", "--steps")
    assert result.exit_code == 0, result.output
    assert "rank 0  0TOKEN>1 0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1" in result.output
    assert "1WAIT_F1<0 1F1 1CLOSE 1B1" in re.sub(r"\s+", " ", result.output)
    assert "leave --steps out" in _invoke(*EIGHT, "--steps", "--json").output


def test_the_figures_are_the_published_ones():
    figures = _figures(*EIGHT, "--chunks", "4", "--bytes", "10")
    assert list(figures) == list(SCHEDULES)
    bubbles = {name: values["bubble_fraction"] for name, values in figures.items()}
    assert bubbles["gpipe"] == bubbles["1f1b"] == pytest.approx(7 / 32)
    assert bubbles["interleaved"] == pytest.approx(7 / (4 * 32))
    assert bubbles["zb-h1"] == pytest.approx(7 * (1 + 1 - 1) / (3 * 32))
    assert bubbles["zb-v"] == pytest.approx(7 * 0.5 / (3 * 32))
    assert figures["1f1b"]["step_time"] == 32 * 3 + 7 * 3
    assert figures["1f1b"]["peak_live_microbatches"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert figures["1f1b"]["num_messages"] == [32, *[64] * 6, 32]
    assert figures["zb-v"]["bytes_sent"] == [10 * number for number in figures["zb-v"]["num_messages"]]
    assert sum(figures["interleaved"]["num_messages"]) == 2 * 32 * (4 * 8 - 1)


def test_costs_are_those_of_a_ranks_share():
    """Two chunks on a rank: a stage takes half; a message takes what it takes."""
    settings = PipelineSettings(forward=1.0, backward=3.0, weight_grad=1.0, p2p=0.5)
    assert stage_costs(make_schedule("zb-v", 2, 1), settings) == Costs([0.5] * 4, [1.5] * 4, 0.5, [0.5] * 4)
    one = _figures("--stages", "1", "--microbatches", "3", "--forward", "2", "--backward", "3", "--p2p", "9")
    assert {values["step_time"] for values in one.values()} == {15}


def test_the_table_has_a_row_for_each_schedule():
    result = _invoke(*EIGHT, "--schedule", "1f1b,zb-v", "--bytes", str(2**20))
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines() if line.startswith(("  1f1b", "  zb-v"))]
    assert rows == [
        ["1f1b", "117", "21.88%", "17.95%", "448", "448.00", *"87654321"],
        ["zb-v", "99.5", "3.65%", "3.52%", "896", "896.00", *"88888888"],
    ]


def test_the_text_chart():
    timeline = simulate(make_schedule("1f1b", 2, 2), Costs(1.0, 2.0))
    assert [line.plain for line in draw(timeline, 3.0)] == [
        "F0-F1-......B0----...B1----",
        "...F0-B0----F1-B1----......",
    ]
    result = _invoke("--stages", "2", "--microbatches", "2", "--schedule", "1f1b", "--text")
    assert result.exit_code == 0
    assert "\nrank 0 F0" in result.output


def test_a_narrow_chart_has_letters_only():
    timeline = simulate(make_schedule("zb-v", 1, 2), Costs(1.0, 2.0))
    assert [line.plain for line in draw(timeline, 1.0)] == ["FfiwFB-fiIwW"]


def test_the_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    result = _invoke("--stages", "4", "--microbatches", "8", "--plot", str(tmp_path / "out.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_a_schedule_from_a_file_stands_beside_the_others(tmp_path: Path):
    path = tmp_path / "mine.csv"
    write_schedule(make_schedule("zb-v", 3, 5), path)
    assert list(_figures("--file", str(path))) == ["mine"]
    figures = _figures("--file", str(path), "--schedule", "zb-v, 1f1b")
    assert list(figures) == ["zb-v", "1f1b", "mine"]
    assert figures["mine"] == {**figures["zb-v"], "schedule": "mine"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--microbatches", "2"), "--stages is needed, or a schedule with --file"),
        (("--stages", "2"), "--microbatches is needed, or a schedule with --file"),
        ((*EIGHT, "--schedule", "1f1b,2f2b"), "there is no schedule '2f2b': choose one of gpipe, 1f1b,"),
        ((*EIGHT, "--text", "--json"), "--json prints nothing but JSON: leave --text out"),
        ((*EIGHT, "--plot", "out.doc"), "--plot out.doc: the name must end in .png, .svg, .pdf"),
        ((*EIGHT, "--plot", "nosuch/out.png"), "there is no folder 'nosuch' to write 'out.png' into"),
        ((*EIGHT, "--weight_grad", "3"), "--weight_grad 3 is a part of --backward 2, and cannot be more"),
        ((*EIGHT, "--forward", "0"), "0.0 is not in the range x>0"),
        (("--file", "nosuch.csv"), "File 'nosuch.csv' does not exist"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args: tuple[str, ...], message: str):
    result = _invoke(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("0F0,0B0\n1F0\n", (), "the backward (B, or I and W) is missing for stage 1, microbatch 0 (rank 1)"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", (), "deadlocks: rank 0 waits at position 1 (0B0) for 1B0"),
        ("0F0,0Q0\n", (), "row 1, column 2: '0Q0' is not an action"),
        (
            "0F0,0B0\n",
            ("--stages", "2"),
            "--stages 2, but the schedule of --file is for 1: leave --stages out",
        ),
    ],
)
def test_a_bad_file_is_refused(text: str, args: tuple[str, ...], message: str, tmp_path: Path):
    (tmp_path / "mine.csv").write_text(text)
    result = _invoke("--file", str(tmp_path / "mine.csv"), *args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


PAGE = Path(__file__).parents[2] / "docs/features/pipeline_schedules.md"
COMMANDS = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
ON_THE_PAGE = COMMANDS.findall(PAGE.read_text())


def test_the_page_has_commands():
    assert len(ON_THE_PAGE) == 2


@pytest.mark.parametrize(("commands", "output"), after_the_first(ON_THE_PAGE))
def test_the_commands_of_the_page_run(
    commands: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for command in commands.splitlines():
        program, name, *args = command.split()
        assert (program, name) == ("colossalai", "pipeline")
        result = CliRunner().invoke(main, [name, *args], env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        printed = [line.rstrip() for line in result.output.splitlines()]
        assert [line for line in printed if line in output.splitlines() and line] == output.splitlines()
