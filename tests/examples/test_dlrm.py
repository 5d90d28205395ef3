"""The DLRM example: its AUROC against the generator's optimum, resuming, files of Criteo, its parts."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.scripts import EXAMPLES, config_file, example_module, run_script
from tests.ranks import RanksError, run_ranks

CONFIGS = EXAMPLES / "recommendation" / "dlrm" / "configs"
metric = example_module("recommendation/dlrm/metric.py")
data = example_module("recommendation/dlrm/data.py")
criteo = example_module("recommendation/dlrm/criteo.py")

TINY = {
    "TABLE_SIZES": (2000, 800, 200, 50),
    "TRAINING_SAMPLES": 4096,
    "EVALUATION_SAMPLES": 501,  # not a multiple of the ranks
    "BATCH_SIZE": 256,
    "LEAST_CACHED_ROWS": 256,
    "WARMUP_STEPS": 2,
    "EVALUATIONS": 4,
}
GOAL = 0.001  # of AUROC below the optimum


def train(folder: Path, config: Path, *more: str, num_ranks: int = 2) -> dict[str, Any]:
    """Run the script, and return the progress of its newest checkpoint."""
    options = (f"--config={config}", f"--output={folder}", *more)
    run_ranks(run_script, num_ranks, "recommendation/dlrm/train.py", *options)
    progress: dict[str, Any] = json.loads((sorted(folder.glob("step-*"))[-1] / "progress.json").read_text())
    return progress


@pytest.mark.dist
def test_a_run_learns_and_resumes_to_equal_losses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, folder = config_file(tmp_path, CONFIGS / "tables.py", **TINY), tmp_path / "run"
    whole = train(folder, config)
    output = capfd.readouterr().out
    assert re.search(r"AUROC 0\.\d{4}, optimum 0\.\d{4}, gap -?0\.\d{4}", output)
    assert re.search(r"caches: \d+\.\d% of the rows were found\nmoved: [\d.]+ MB from", output)
    assert [line for line in output.splitlines() if len(line) > 80 and "INFO" not in line] == []  # but logs
    assert [record["samples"] for record in whole["records"]] == [1024, 2048, 3072, 4096]
    assert whole["records"][-1]["loss"] < whole["records"][0]["loss"]
    assert whole["records"][-1]["auroc"] > 0.6
    assert (folder / "auroc.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.glob("*-*")) == ["step-00000012", "step-00000016"]

    with pytest.raises(RanksError, match=r"has checkpoints: go on with --resume"):
        train(folder, config)
    shutil.rmtree(folder / "step-00000016")  # as if the run had been killed before
    (folder / "draft").mkdir()
    resumed = train(folder, config, "--resume")
    for record, wanted in zip(resumed["records"], whole["records"], strict=True):
        assert (record["loss"], record["auroc"]) == (wanted["loss"], wanted["auroc"])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [("columns", 2), pytest.param("split_cache", 2, marks=pytest.mark.long), ("tables", 1)],
)
def test_other_tables_and_one_rank(tmp_path: Path, config: str, num_ranks: int) -> None:
    progress = train(
        tmp_path / "run", config_file(tmp_path, CONFIGS / f"{config}.py", **TINY), num_ranks=num_ranks
    )
    assert progress["records"][-1]["loss"] < progress["records"][0]["loss"]


@pytest.mark.dist
def test_a_file_of_criteo(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    write_criteo(path, num_lines=1000)
    sizes = {"TABLE_SIZES": (50,) * 26, "BOTTOM_SIZES": (16,), "TOP_SIZES": (16,), "EMBEDDING_DIM": 4}
    config = config_file(
        tmp_path, CONFIGS / "criteo.py", **{**TINY, **sizes, "BATCH_SIZE": 64, "EVALUATIONS": 2}
    )
    progress = train(tmp_path / "run", config, f"--data={path}")
    assert [record["samples"] for record in progress["records"]] == [448, 896]
    assert progress["records"][-1]["loss"] < progress["records"][0]["loss"]
    assert progress["optimum"] is None


def write_criteo(path: Path, *, num_lines: int) -> None:
    """Write lines whose label is 1 for one category of the first two; some fields are empty."""
    lines = []
    for number in range(num_lines):
        label = number * 7 % 3 % 2
        integers = ["" if (number + column) % 5 == 0 else str(number % (column + 2)) for column in range(13)]
        categories = [
            "" if (number + column) % 7 == 0 else f"{number % (column + 2):08x}" for column in range(26)
        ]
        categories[0] = "68fd1e64" if label else "05db9164"
        lines.append("\t".join([str(label), *integers, *categories]) + "\n")
    path.write_text("".join(lines))


@pytest.mark.unit
def test_lines_of_criteo_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    integers = ["", "-1", "0", "1", *["2"] * 9]
    path.write_text("\t".join(["1", *integers, "68fd1e64", *[""] * 25]) + "\n")
    clicks = criteo.CriteoClicks(path, [100] * 26)
    assert len(clicks) == 1
    assert clicks[0].dense[:5].tolist() == pytest.approx([0, 0, 0, math.log(2), math.log(3)])
    assert clicks[0].ids.tolist() == [criteo.row_of(b"68fd1e64", 0, 100), *[0] * 25]
    assert criteo.row_of(b"68fd1e64", 0, 100) == 77  # on each machine
    assert clicks[0].labels == 1


@pytest.mark.unit
def test_files_that_are_not_of_criteo_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    write_criteo(path, num_lines=3)
    path.write_text(path.read_text() + "1\t2\t3\n")
    with pytest.raises(ValueError, match=r"clicks\.tsv, line 4 has 3 columns; a line has 40"):
        criteo.CriteoClicks(path, [100] * 26)
    with pytest.raises(ValueError, match=r"TABLE_SIZES has 4 tables.*configs/criteo\.py"):
        criteo.CriteoClicks(path, [100] * 4)
    with pytest.raises(FileNotFoundError, match=r"--data .*none\.tsv: there is no such file"):
        criteo.CriteoClicks(tmp_path / "none.tsv", [100] * 26)


@pytest.mark.unit
@pytest.mark.parametrize("num_values", [3, 1000])
def test_auroc_counts_pairs(num_values: int) -> None:
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(num_values, (60,), generator=generator).float()
    labels = torch.randint(2, (60,), generator=generator).float()
    won = num_pairs = 0.0
    for positive in scores[labels == 1].tolist():
        for negative in scores[labels == 0].tolist():
            won += (positive > negative) + (positive == negative) / 2
            num_pairs += 1
    assert metric.auroc(scores, labels) == pytest.approx(won / num_pairs, abs=1e-12)
    assert math.isnan(metric.auroc(scores, torch.ones(60)))


@pytest.mark.unit
def test_drawn_samples_are_a_function_of_their_index() -> None:
    options = {"num_dense": 3, "seed": 7, "exponent": 1.5, "interactions": [(0, 1)]}
    clicks = data.SyntheticClicks([1000, 100], length=20_000, **options)
    batch = clicks.__getitems__(range(20_000))
    later = data.SyntheticClicks([1000, 100], length=10, begin=500, **options).__getitems__(range(10))
    assert all(torch.equal(mine, whole[500:510]) for mine, whole in zip(later, batch, strict=True))
    assert torch.equal(clicks[3].ids, batch.ids[3])
    assert batch.dense.mean(0).abs().max() < 0.05
    assert batch.dense.std(0) == pytest.approx([1, 1, 1], abs=0.05)
    counts = batch.ids[:, 0].bincount().double()
    assert (counts[0] / counts[1]).item() == pytest.approx(2**1.5, rel=0.15)
    assert batch.labels.mean().item() == pytest.approx(batch.probabilities.mean().item(), abs=0.02)
    other = data.SyntheticClicks([1000, 100], length=10, **{**options, "seed": 8}).__getitems__(range(10))
    assert not torch.equal(other.dense, batch.dense[:10])


@pytest.mark.long
@pytest.mark.dist
def test_the_optimum_is_reached(tmp_path: Path) -> None:
    progress = train(tmp_path / "run", CONFIGS / "tables.py")
    assert 0.75 < progress["optimum"] < 0.85
    assert progress["optimum"] - progress["records"][-1]["auroc"] < GOAL
