"""`colossalai benchmark`: which configurations it finds, what it measures, and what it writes."""

import json
import runpy
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import colossalai
from colossalai.cli import main
from colossalai.cli._benchmark import (
    BenchmarkSettings,
    Configuration,
    Figures,
    Results,
    Skipped,
    _command,
    _worker,
    find_configurations,
)
from colossalai.cli._benchmark._measure import measure
from colossalai.cli._benchmark._models import MODELS
from colossalai.cli._benchmark._show import plot, show
from colossalai.launcher import Job
from tests.launcher.command import start
from tests.ranks import run_ranks
from tests.tiers import further

FLOAT = 4
PNG = b"\x89PNG\r\n\x1a\n"


def _settings(num_procs: int, **sizes: int) -> BenchmarkSettings:
    defaults = {"batch_size": 4, "seq_length": 3, "hidden_size": 16, "num_heads": 4, "num_layers": 1}
    rounds = {"warmup": 0, "rounds": 1}
    configurations = tuple(find_configurations(num_procs))
    return BenchmarkSettings(
        num_procs=num_procs, **{**defaults, **rounds, **sizes}, configurations=configurations
    )


def _figures(model: str, configuration: Configuration, peak: int | None = None) -> Figures:
    return Figures(
        model=model,
        configuration=configuration,
        forward_ms=2.0,
        backward_ms=4.0,
        forward_communication_ms=0.5,
        backward_communication_ms=1.0,
        bytes_sent=3 * 2**20,
        num_parameters=7_000_000,
        parameter_bytes=5 * 2**20,
        saved_bytes=6 * 2**20,
        device_peak_bytes=peak,
    )


def _results() -> Results:
    settings = _settings(8)
    machine = {"device": "a device", "device_type": "cpu", "backend": "gloo", "threads_per_process": 1}
    rows = [_figures(model, found) for model in MODELS for found in settings.configurations]
    skipped = [Skipped(model="MLP", label="2d", reason="it is [square]")]
    return Results(settings=settings, machine=machine, rows=rows, skipped=skipped)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("num_procs", "labels"),
    [
        (1, ["plain"]),
        (2, ["1d"]),
        (4, ["1d", "2d", "2.5d, depth 1"]),
        (8, ["1d", "2.5d, depth 2", "3d"]),
        (64, ["1d", "2d", "2.5d, depth 1", "2.5d, depth 4", "2.5d, depth 16", "3d"]),
    ],
)
def test_every_configuration_is_found(num_procs: int, labels: list[str]):
    found = find_configurations(num_procs)
    assert [configuration.label for configuration in found] == labels
    assert {configuration.size for configuration in found} == {num_procs}


@pytest.mark.unit
def test_results_go_through_json():
    results = _results()
    assert Results.from_json(results.to_json()) == results


@pytest.mark.unit
def test_the_table_tells_all(capsys: pytest.CaptureFixture[str]):
    show(_results())
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("2.5d, depth 2")]
    assert rows == 2 * [["2.5d,", "depth", "2", "2.00", "4.00", "1.50", "3.00", "7.000", "11.00"]]
    assert "skipped MLP 2d: it is [square]" in out


@pytest.mark.unit
def test_the_table_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large figures, on accelerators, whose peak is one more column."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        replace(
            _figures("block", Configuration(mode="2.5d", size=64, depth=16), peak=80 * 2**30),
            forward_ms=12_345.67,
            backward_ms=123_456.7,
            bytes_sent=2**38,
            parameter_bytes=2**36,
            num_parameters=175_000_000_000,
        )
    ]
    show(Results(settings=_settings(64), machine=_results().machine, rows=rows))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    (row,) = (line.split() for line in out.splitlines() if line.strip().startswith("2.5d"))
    assert row == [
        "2.5d,",
        "depth",
        "16",
        "12,346",
        "123,457",
        "1.50",
        "262,144",
        "175,000",
        "65,542",
        "81,920",
    ]


@pytest.mark.unit
def test_tables_of_the_benchmarks_fit_into_80_columns() -> None:
    """Every table that has been measured; what does not fit beside the labels goes into a further one."""
    root = Path(__file__).parents[2] / "benchmarks"
    rounds = runpy.run_path(str(root / "harness" / "rounds.py"))
    for file in sorted((root / "results").glob("*.json")):
        rows = json.loads(file.read_text()).get("rows")
        if not rows:
            continue
        console = Console(width=80, file=StringIO())
        made = rounds["tables"](rows, width=80)
        for table in made:
            console.print(table)
        out = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in out, file
        assert max(map(len, out.splitlines())) <= 80, file
        heads = [" ".join(str(column.header).split()) for table in made for column in table.columns]
        assert set(heads) == {" ".join(key.split("_")) for key in rows[0]}, file
        assert all(table.row_count == len(rows) for table in made)


@pytest.mark.unit
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_picture_is_drawn(is_empty: bool, tmp_path: Path):
    pytest.importorskip("matplotlib")
    results = _results()
    if is_empty:
        results.rows.clear()
    plot(results, str(tmp_path / "modes.png"))
    assert (tmp_path / "modes.png").read_bytes().startswith(PNG)


def _measured(
    configuration: Configuration, *all_settings: BenchmarkSettings
) -> list[dict[str, Figures | str]]:
    """Return for all settings the figures of every model, or why there are none."""
    colossalai.launch_from_torch(configuration.config, verbose=False)
    found: list[dict[str, Figures | str]] = [{} for _ in all_settings]
    for settings, models in zip(all_settings, found, strict=True):
        for name, build in MODELS.items():
            try:
                models[name] = measure(name, build, configuration, settings, after_step=lambda: None)
            except ValueError as error:
                models[name] = str(error)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("number", [further(0), 1])
def test_figures_are_those_of_the_layers(number: int):
    settings = _settings(4)
    configuration = settings.configurations[number]
    (first,), *others = run_ranks(_measured, 4, configuration, settings)
    assert others == [[first]] * 3
    hidden, tokens = 16, 4 * 3
    x, inner = FLOAT * tokens * hidden, FLOAT * tokens * 4 * hidden
    weights, biases = 8 * hidden * hidden, 5 * hidden
    mlp, transformer = first["MLP"], first["transformer"]
    if configuration.mode == "1d":  # the sum and the last bias are whole on every rank
        assert mlp.num_parameters == (weights + 4 * hidden) // 4 + hidden
        assert mlp.bytes_sent == 2 * (2 * 3 / 4 * x)
        assert mlp.saved_bytes == x + 2 * inner // 4
    else:
        assert mlp.num_parameters == (weights + 2 * biases) // 4
        assert mlp.bytes_sent == 3 * (x + inner + FLOAT * weights) // 4 + FLOAT * biases // 2
        assert mlp.saved_bytes == (x + 2 * inner) // 4
    assert mlp.parameter_bytes == FLOAT * mlp.num_parameters
    assert 0 < mlp.forward_communication_ms < mlp.forward_ms
    assert 0 < mlp.backward_communication_ms < mlp.backward_ms
    assert mlp.device_peak_bytes is None
    assert transformer.bytes_sent > mlp.bytes_sent


REASONS = [
    ({"batch_size": 3}, "MLP", "the input (batch, seq, hidden): dimension 0 of shape (3, 3, 16) is 3"),
    ({"num_heads": 1}, "transformer", "2 ranks do not divide the 1 heads: change --num_heads"),
    ({"num_heads": 3}, "transformer", "3 heads do not divide the hidden size 16: change --num_heads"),
]


@pytest.mark.dist
def test_sizes_that_do_not_fit_are_reasons():
    configuration = Configuration(mode="2d", size=4)
    settings = [_settings(4, **sizes) for sizes, _, _ in REASONS]
    for found in run_ranks(_measured, 4, configuration, *settings):
        for models, (_, model, reason) in zip(found, REASONS, strict=True):
            assert isinstance(models[model], str)
            assert models[model].startswith(reason)


def _launch_forked(job: Job) -> int:
    """Run the ranks of a job, in a twentieth of the time."""
    assert job.target == _worker.__name__
    run_ranks(_worker.main, job.num_procs or 0, *job.args)
    return 0


@pytest.mark.dist
@pytest.mark.parametrize("is_forked", [True, further(False)])
def test_the_command_measures_and_writes(
    is_forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    sizes = ("--batch_size", "4", "--seq-length", "3", "--hidden_size", "16", "--num_layers", "1")
    rounds = ("--warmup", "0", "--rounds", "1", "--num_heads", "1")
    written = ("--modes", "1d,2d", "--json", "-", "--plot", "modes.png")
    args = ("--gpus", "2", *sizes, *rounds, *written)
    if is_forked:
        monkeypatch.setattr(_command, "launch", _launch_forked)
        monkeypatch.chdir(tmp_path)
        result = _invoke(*args)
        assert result.exit_code == 0, result.output
        out = result.stdout
    else:
        command = start(tmp_path, "benchmark", *args)
        assert command.wait() == 0, command.err
        out = command.out
    found = json.loads(out)
    assert set(found) == {"settings", "machine", "rows", "skipped"}
    assert found["machine"]["backend"] == "shared_memory"
    (row,) = found["rows"]
    assert row["model"] == "MLP"
    assert row["configuration"] == {"mode": "1d", "size": 2, "depth": None}
    assert [skipped["reason"] for skipped in found["skipped"]] == [
        "mode '2d' needs a square (1, 4, 9, 16, ...) processes, not 2",
        "2 ranks do not divide the 1 heads: change --num_heads",
    ]
    assert (tmp_path / "modes.png").read_bytes().startswith(PNG)


def _invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["benchmark", *args])


@pytest.mark.unit
def test_help_has_an_example():
    assert "\n    colossalai benchmark --gpus 4 --modes 1d,2d --json -\n" in _invoke("--help").output


@pytest.mark.unit
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpus", "0"), "0 is not in the range x>=1"),
        ((), "choose a measurement: --gpus N processes, or --serve URL"),
        (("--gpus", "2", "--modes", "4d"), "--modes has '4d': choose from 1d, 2d, 2.5d, 3d"),
        (("--gpus", "2", "--modes", "3d"), "mode '3d' needs a cube (1, 8, 27, 64, ...) processes, not 2"),
        (("--gpus", "2", "--plot", "modes.xyz"), "--plot modes.xyz: the name must end in .png, .svg, .pdf"),
        (("--gpus", "2", "--json", "nosuch/x.json"), "there is no folder 'nosuch' to write"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args: tuple[str, ...], message: str):
    result = _invoke(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
