"""The example of long sequences: one rank is stopped by its budget, four train within it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import example_module, run_script
from tests.examples.test_text_data import TEXT
from tests.ranks import RanksError, run_ranks
from tests.tiers import after_the_first

pytestmark = pytest.mark.dist

TINY = {
    "vocab-size": 300,
    "seq-length": 256,
    "hidden-size": 32,
    "heads": 2,
    "layers": 1,
    "learning-rate": 0.01,
    "steps": 24,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text; the tests share its cache of tokens."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "text.txt").write_text(TEXT)
    return folder


def arguments(workplace: Path, model: str, **changed: object) -> list[str]:
    options = TINY | {"model": model, "data": workplace / "text.txt", "cache": workplace / "cache"} | changed
    return [f"--{name}={value}" for name, value in options.items()]


def train(workplace: Path, num_ranks: int, model: str, **changed: object) -> dict[str, list[float]]:
    report = workplace / f"{model}-{num_ranks}.json"
    options = arguments(workplace, model, report=report, **changed)
    run_ranks(run_script, num_ranks, "long_sequence/train.py", *options)
    return json.loads(report.read_text())


@pytest.mark.parametrize("model", after_the_first(["gpt", "bert"]))
def test_four_ranks_train_what_one_may_not(workplace: Path, model: str) -> None:
    alone = train(workplace, 1, model, steps=2, **{"memory-budget": 100})
    budget = alone["saved_bytes"] / 2**20 / 2
    with pytest.raises(RanksError, match=r"the forward keeps more than the .* MB that a rank may hold"):
        train(workplace, 1, model, **{"memory-budget": budget})
    together = train(workplace, 4, model, **{"memory-budget": budget})
    assert together["losses"][:2] == pytest.approx(alone["losses"], rel=1e-4)  # float32, summed otherwise
    assert together["saved_bytes"] < alone["saved_bytes"] / 3.5
    assert sum(together["losses"][-5:]) < 0.85 * sum(together["losses"][:5])


def test_the_table_shows_who_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of compare.py, with a launcher that says what the runs above say."""

    def launch(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[command.index("--nproc_per_node") + 2].endswith("long_sequence/train.py")
        if command[command.index("--nproc_per_node") + 1] == "1":
            return subprocess.CompletedProcess(command, 1, "", "memory.BudgetExceededError: more than")
        report = {"losses": [7.0, 5.0], "saved_bytes": 3 * 2**20}
        Path(command[-1].removeprefix("--report=")).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", launch)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--ranks", "1", "4", "--model=gpt"])
    example_module("long_sequence/compare.py").main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 1 | above the budget |  |  | stopped in the first forward |",
        "| 4 | 3.0 MB | 7.00 | 5.00 | trains |",
    ]
