"""Every benchmark that ranks can run here runs, with the smallest sizes, and writes its figures."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROUNDS = ("--rounds", "2")
# Run by hand: matmul.py has 30 shapes, which take minutes, nvme.py trains GPT-2, start_time.py needs hosts,
# rank_settings.py starts jobs by itself.
BY_HAND = {"matmul", "nvme", "rank_settings", "start_time"}
ALONE = ("adam", "experts", "gemini_disk", "gemini_gpu", "linear_cross_entropy", "operator_share")
FOUR = {"convert": 4}  # whose mesh is 2 x 2
SMALLEST = {
    "adam": ("--numel", "10000", *ROUNDS),
    "bandwidth": ("--sizes", "2048", "--repeats", "1", *ROUNDS),
    "checkpoint": ("--parameters", "1e5", *ROUNDS),
    "collectives": ("--sizes", "1024", "100000", *ROUNDS),
    "convert": ("--sizes", "4096", "--dims", "2", "--most_pairs", "6", *ROUNDS),
    "data_parallel": ("--seq", "8", *ROUNDS),
    "experts": ("--sizes", "4x16x8", "--tokens", "8", *ROUNDS),
    "gemini": ("--seq", "8", *ROUNDS),
    "gemini_gpu": (
        *("--device", "cpu", "--layers", "1", "--most-layers", "2", "--hidden", "64", "--vocab", "128"),
        *(
            "--batch",
            "1",
            "--seq",
            "8",
            "--steps",
            "1",
            "--variants",
            "torch",
            "fsdp2, on host",
            "gemini auto",
        ),
    ),
    "gemini_disk": (*("--hidden", "64", "--seq", "8", "--chunk-mb", "0.5", "--times", "0.9"), *ROUNDS),
    "linear_cross_entropy": ("--sizes", "16x8x32", *ROUNDS),
    "moe": ("--seq", "8", "--batch", "1", *ROUNDS),
    "operator_share": ("--layers", "1", "--batch", "1", "--rounds", "1"),
    "pipeline": ("--seq", "8", "--hidden", "128", "--idle_rounds", "2", *ROUNDS),
    "sequence_parallel": ("--seq", "64", *ROUNDS),
    "tensor_parallel": ("--seq", "8", "--hidden", "128", *ROUNDS),
    "watchdog": ("--seq", "8", *ROUNDS),
    "zero": ("--seq", "8", *ROUNDS),
}


def run(name: str, folder: str) -> None:
    script = str(BENCHMARKS / f"{name}.py")
    sys.argv = [script, *SMALLEST[name], "--json", f"{folder}/figures.json"]
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(script, run_name="__main__")


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    run_ranks(run, 1 if name in ALONE else FOUR.get(name, 2), name, str(tmp_path), timeout=120.0)
    assert json.loads((tmp_path / "figures.json").read_text())["rows"]


def test_no_benchmark_is_forgotten() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == {*SMALLEST, *BY_HAND}
