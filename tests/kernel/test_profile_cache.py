"""The profile cache: figures are believed when runs of different times agree, and measured again when old."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from colossalai.cli import main
from colossalai.kernel import Profile, measured_profile, renew_profile
from colossalai.kernel._probe import Measurement, measure_profile
from colossalai.kernel._profile_cache import cache_file

pytestmark = pytest.mark.unit

MINUTE, WEEK = 60.0, 7 * 86400.0
DAY_ZERO = 1e9


def profile(speedup: float, torch_gflops: float = 100.0) -> Profile:
    return Profile(torch_gflops=torch_gflops, onednn_gflops=torch_gflops * speedup)


def run(speedup: float = 1.5, torch_gflops: float = 100.0, spread: float = 0.02) -> Measurement:
    return Measurement(profile(speedup, torch_gflops), spread)


def never() -> Measurement:
    raise AssertionError("it was measured")


@pytest.fixture(autouse=True)
def one_thread() -> object:
    with mock.patch("torch.get_num_threads", return_value=1):
        yield


class Machine:
    """A processor that is measured into a file.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.now = DAY_ZERO

    def start(self, measure: Measurement | Callable[[], Measurement], *, after: float = 2 * MINUTE) -> float:
        """Start a job some seconds after the last one; return the GFLOP/s of torch that it goes by."""
        self.now += after
        take = measure if callable(measure) else lambda: measure
        return measured_profile(file=self.file, key="here", measure=take, clock=lambda: self.now).torch_gflops


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "deep" / "matmul.json")


def test_two_runs_that_agree_are_believed_for_a_week(machine: Machine) -> None:
    assert machine.start(run(torch_gflops=100.0)) == 100.0
    assert machine.start(never, after=MINUTE / 2) == 100.0  # what disturbs a run disturbs its neighbor
    assert machine.start(run(torch_gflops=95.0, spread=0.04)) == 100.0  # the figures stay, and so do the bits
    assert json.loads(machine.file.read_text()) == {
        "here": [
            {"profile": [13.0, 100.0, 150.0, 0.5, 0.0], "spread": 0.04, "last": machine.now, "num_runs": 2}
        ]
    }
    assert machine.start(never, after=WEEK - MINUTE) == 100.0
    assert machine.start(run(torch_gflops=104.0), after=2 * MINUTE) == 100.0
    assert machine.start(never, after=WEEK - MINUTE) == 100.0
    assert [path.name for path in machine.file.parent.iterdir()] == ["matmul.json"]


def test_figures_of_a_busy_machine_are_replaced(machine: Machine) -> None:
    assert machine.start(run(torch_gflops=50.0)) == 50.0
    assert machine.start(run(torch_gflops=100.0)) == 100.0
    assert machine.start(run(torch_gflops=52.0)) == 100.0  # two slow runs agree, and a faster one was seen
    assert machine.start(run(torch_gflops=98.0)) == 100.0
    assert machine.start(never) == 100.0


def test_two_runs_of_a_busy_machine_are_found_out_after_a_week(machine: Machine) -> None:
    machine.start(run(torch_gflops=50.0))
    assert machine.start(run(torch_gflops=50.0)) == 50.0
    assert machine.start(run(torch_gflops=100.0), after=WEEK) == 100.0
    assert machine.start(run(torch_gflops=100.0)) == 100.0
    assert machine.start(never) == 100.0


def test_a_machine_that_has_become_slower(machine: Machine) -> None:
    for _ in range(2):
        machine.start(run(torch_gflops=100.0))
    for _ in range(5):
        assert machine.start(run(torch_gflops=50.0), after=WEEK / 2 + MINUTE) in (50.0, 100.0)
    for _ in range(5):
        machine.start(run(torch_gflops=50.0), after=WEEK)
    assert machine.start(never, after=MINUTE) == 50.0


def test_a_clock_that_was_set_back(machine: Machine) -> None:
    for _ in range(2):
        machine.start(run())
    assert machine.start(run(torch_gflops=99.0), after=-WEEK) == 100.0
    assert machine.start(never, after=MINUTE) == 100.0


def test_libraries_are_compared_each(machine: Machine) -> None:
    machine.start(run(0.0))
    assert machine.start(run(1.0)) == 100.0  # one rounds: no agreement
    assert len(json.loads(machine.file.read_text())["here"]) == 2
    machine.start(run(0.5))
    assert machine.start(run(1.05)) == 100.0
    assert machine.start(never) == 100.0


def test_a_file_of_an_earlier_version_is_not_believed(machine: Machine) -> None:
    machine.file.parent.mkdir()
    machine.file.write_text('{"other": [13.0, 40.0, 60.0, 0.5, 0.0], "here": [13.0, 95.0, 140.0, 0.5, 0.0]}')
    assert machine.start(run(torch_gflops=100.0)) == 95.0  # the run agrees: jobs go on by these figures
    assert machine.start(never) == 95.0
    machine.file.write_text('{"here": [13.0, 300.0, 300.0, 0.5, 0.0]}')
    assert machine.start(run(torch_gflops=100.0)) == 100.0
    assert machine.start(run(torch_gflops=100.0)) == 100.0
    assert machine.start(never) == 100.0


def test_entries_are_kept_by_processor_and_version(machine: Machine) -> None:
    kept = partial(measured_profile, file=machine.file, clock=lambda: DAY_ZERO)
    assert kept(key="one", measure=lambda: run(1.5)) == profile(1.5)
    assert kept(key="two", measure=lambda: run(0.0)) == profile(0.0)
    assert kept(key="one", measure=never) == profile(1.5)
    assert kept(key="two", measure=never) == profile(0.0)
    assert list(json.loads(machine.file.read_text())) == ["one", "two"]


GOOD = '{"profile": [1.0, 1.0, 1.0, 1.0, 1.0], "spread": 0.1, "last": 1e9, "num_runs": 2}'


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[1.5]", "1.5", "null", '{"key": "onednn"}', '{"key": true}', '{"key": 2.0}',
        '{"key": [1.0, 1.0, 1.0, 1.0]}', '{"key": [1.0, 1.0, NaN, 1.0, 1.0]}',
        '{"key": [1.0, 1.0, Infinity, 1.0, 1.0]}', '{"key": [1.0, 1.0, 1e9, 1.0, 1.0]}',
        '{"key": [1.0, 0.0, 1.0, 1.0, 1.0]}', '{"key": [1.0, 1.0, -1.0, 1.0, 1.0]}',
        '{"key": [1.0, 1.0, true, 1.0, 1.0]}', '{"key": {"speedup": 1.5}}', "[" * 100_000,
        '{"other": [1.0, 1.0, 1.0, 1.0, 1.0]}',
        '{"key": [1.0, 1.0, 1.0, 1.0, 1.0]' + " " * 300_000 + "}", "\x00\xff",
        '{"key": []}', '{"key": [[]]}', '{"key": [{}]}',
        *('{"key": [' + GOOD.replace(*change) + "]}" for change in (
            ("0.1", "-0.1"), ("0.1", "NaN"), ("1e9", "Infinity"), ("1e9", "true"), ("2}", "0}"),
            ("2}", "1.5}"), ("2}", "true}"), ('"last"', '"first"'), ("[1.0, ", "["),
            ("[1.0, 1.0", "[1.0, 0.0"),
        )),
        '{"key": [' + ", ".join([GOOD] * 9) + "]}",
    ],
)  # fmt: skip
def test_a_file_with_anything_else_is_not_trusted(content: str, tmp_path: Path) -> None:
    file = tmp_path / "matmul.json"
    file.write_text(content, errors="surrogateescape")
    arguments = {"file": file, "key": "key", "clock": lambda: DAY_ZERO + 1}
    assert measured_profile(measure=lambda: run(1.25), **arguments) == profile(1.25)
    assert json.loads(file.read_text())["key"][0]["profile"] == [13.0, 100.0, 125.0, 0.5, 0.0]
    assert measured_profile(measure=never, **arguments) == profile(1.25)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "matmul.json"
    file.write_text('{"key": [' + GOOD + "]}")
    found = measured_profile(file=file, key="key", measure=never, clock=lambda: DAY_ZERO + 1)
    assert found == Profile(1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_file_that_cannot_be_read_or_written_is_measured_again(tmp_path: Path, capfd) -> None:
    (tmp_path / "plain").touch()
    for file in (tmp_path, tmp_path / "plain" / "matmul.json", Path("/proc/no/matmul.json")):
        for speedup in (1.25, 1.5):
            assert measured_profile(file=file, key="key", measure=lambda: run(speedup)) == profile(speedup)  # noqa: B023
        assert renew_profile(file=file, key="key", measure=run).file is None
    assert capfd.readouterr() == ("", "")
    assert cache_file({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "colossalai" / "matmul.json"
    with mock.patch.object(Path, "home", side_effect=RuntimeError):
        assert cache_file({}) is None
        with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": ""}):
            assert measured_profile(key="no home, no file", measure=lambda: run(1.25)) == profile(1.25)


def test_the_timer_of_a_measurement_is_an_argument() -> None:
    """A timer by which each product takes a microsecond in the first round, and three in the others."""
    num_looks, now = 0, 0.0

    def timer() -> float:
        nonlocal num_looks, now
        num_looks += 1
        now += 1e-6 if num_looks <= 22 else 3e-6
        return now

    found = measure_profile(timer=timer)
    gflop = 2e-9 * (128 * 256 * 512 + 256 * 384 * 128)
    assert found.profile.torch_gflops == pytest.approx(gflop / 2e-6)
    assert found.profile.onednn_gflops == pytest.approx(gflop / 2e-6)
    assert found.profile.call_us == pytest.approx(0.0, abs=1e-6)
    assert found.spread == pytest.approx(2.0)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_command_renews_the_figures(
    machine: Machine, is_busy: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        machine.start(run(1.0, torch_gflops=50.0))
    figures = iter([100.0, 60.0, 70.0, 80.0, 89.0] if is_busy else [100.0, 98.0, 60.0, 97.0, 99.0])
    module = "colossalai.kernel._profile_cache"
    monkeypatch.setattr(f"{module}.cache_file", lambda: machine.file)
    monkeypatch.setattr(f"{module}.processor_and_version", lambda: "here")
    monkeypatch.setattr(f"{module}.measure_profile", lambda: run(1.5, next(figures)))
    result = CliRunner().invoke(main, ["check", "--matmul", *["--json"] * as_json], env={"COLUMNS": "200"})
    assert result.exit_code == is_busy, result.output
    if as_json:
        report = json.loads(result.output)
        assert report["choice"] == "oneDNN"
        assert report["found"]["profile"]["torch_gflops"] == 100.0
        assert report["earlier"]["profile"]["torch_gflops"] == 50.0
        assert report["file"] == str(machine.file)
    else:
        assert f"{1 + 3 * (not is_busy)} of 5 runs agree" in result.output
        assert 'matmul="auto" takes oneDNN: oneDNN is 1.50 times as fast' in result.output
        assert "100.0 GFLOP/s" in result.output
        assert ("when it is quiet" in result.output) == is_busy
    machine.now = DAY_ZERO
    (entry, *_) = json.loads(machine.file.read_text())["here"]
    assert entry["profile"][1] == 100.0
    assert entry["num_runs"] == (1 if is_busy else 4)


def test_the_command_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "colossalai.cli._check.why_unavailable", lambda: "this torch was built without oneDNN"
    )
    result = CliRunner().invoke(main, ["check", "--matmul"])
    assert result.exit_code == 0
    assert result.output == 'matmul="auto" takes torch\'s products: this torch was built without oneDNN.\n'
