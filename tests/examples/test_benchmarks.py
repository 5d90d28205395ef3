"""Every benchmark that ranks can run here runs, with the smallest sizes, and writes its figures."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiers import in_soak

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROUNDS = ("--rounds", "2")
# Run by hand: matmul.py has 30 shapes, which take minutes, nvme.py trains GPT-2, start_time.py needs hosts,
# rank_settings.py starts jobs by itself, fused_parts.py waits for a compiler.
BY_HAND = {"fused_parts", "matmul", "nvme", "rank_settings", "start_time"}
ALONE = (
    "autochunk",
    "axial",
    "cached_embedding",
    "cached_embedding_step",
    *("adam", "adapters", "experts", "gemini_disk", "gemini_gpu", "linear_cross_entropy", "operator_share"),
    *(
        "one_request",
        "packed_rows",
        "paged_attention",
        "quantized",
        "sampling",
        "serving",
        "serving_ranks",
        "soak",
        "speculation",
    ),
    *("auto_memory", "auto_solve", "bfloat16", "chat", "import_time", "weight_update"),
)
# Each takes 10 s of a core and more: processes one after the other, or many variants.
SLOW = {
    *(
        "cached_embedding",
        "chat",
        "checkpoint",
        "gemini",
        "gemini_disk",
        "gemini_gpu",
        "moe",
        "pipeline",
        "quantized",
    ),
    *("serving_http", "serving_ranks", "soak", "zero"),
}
FOUR = {"convert": 4}  # whose mesh is 2 x 2
SMALLEST = {
    "adapters": (
        *("--vocab", "64", "--hidden", "64", "--layers", "1", "--heads", "2", "--intermediate", "64"),
        *("--prompt", "4", "--new", "2", "--requests", "2", "--dtypes", "float32", *ROUNDS),
    ),
    "adam": ("--numel", "10000", *ROUNDS),
    # Without torch's compiler, which takes a minute where others compute, too.
    "auto_memory": (
        *("--only", "gpt2", "--hidden", "64", "--layers", "2", "--vocab", "64", "--seq", "8", "--batch", "2"),
        *("--budgets", "2", "--parts", *ROUNDS),
    ),
    "auto_solve": (
        *("--only", "gpt3", "random", "--layers", "1", "--rounds", "1", "--budgets", "100"),
        *("--nodes", "20", "--edges", "22", "--options", "3"),
    ),
    "auto_step": (
        *("--only", "gpt", "resnet", "--hidden", "64", "--layers", "2", "--vocab", "64", "--seq", "8"),
        *("--batch", "4", "--image", "8", "--width", "8", "--repeats", "1", "--timed", "1"),
        *("--most-plans", "3", "--profile", "cpu-2-cores", *ROUNDS),
    ),
    "bandwidth": ("--sizes", "2048", "--repeats", "1", *ROUNDS),
    "cached_embedding": (
        "--rows",
        "20000",
        "--dim",
        "8",
        "--cache-ratio",
        "0.5",
        "--steps",
        "2",
        "--rounds",
        "1",
        "--unlimited",
    ),
    "axial": (
        *("--residues", "8", "--sequence-dim", "32", "--pair-dim", "32", "--chunk-size", "4", *ROUNDS),
    ),
    "autochunk": (
        *("--models", "GPT-2", "Triangle attention", "--width", "64", "--tokens", "64", "--blocks", "1"),
        *("--fractions", "0.6", "--residues", "32", "--pair-dim", "32", "--chunk-sizes", "8"),
        *ROUNDS,
    ),
    "axial_ranks": (*("--sequences", "4", "--residues", "8", "--msa-dim", "16", "--pair-dim", "8", *ROUNDS),),
    "cached_embedding_step": (
        *("--rows", "20000", "--dim", "8", "--bags", "64", "--steps", "4", "--products", "0", *ROUNDS),
    ),
    "bfloat16": ("--sizes", "16", "--isas", "AVX2", *ROUNDS),
    "chat": (
        *("--steps", "2", "--seeds", "1", "--sft-steps", "3", "--prompts", "2", "--group", "2"),
        *("--rounds", "1", "--timed", "2", "--layers", "1", "--new", "4"),
    ),
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
    "import_time": ("--rounds", "1"),
    "linear_cross_entropy": ("--sizes", "16x8x32", *ROUNDS),
    "moe": ("--seq", "8", "--batch", "1", *ROUNDS),
    "operator_share": ("--layers", "1", "--batch", "1", "--rounds", "1"),
    "one_request": (
        *("--vocab", "100", "--hidden", "128", "--layers", "1", "--intermediate", "64", "--prompt", "4"),
        *("--new", "2", "--rounds", "1"),
    ),
    "packed_rows": ("--layers", "1", "--num-rows", "1", "4", "--dtypes", "float32", *ROUNDS),
    "paged_attention": ("--batch", "2", "--length", "20", "--layers", "2", *ROUNDS),
    "pipeline": ("--seq", "8", "--hidden", "128", "--idle_rounds", "2", *ROUNDS),
    "quantized": (
        *("--vocab", "64", "--hidden", "64", "--layers", "1", "--heads", "2", "--intermediate", "64"),
        *("--prompt", "4", "--new", "2", "--requests", "1", "--dtypes", "float32", *ROUNDS),
    ),
    "sampling": ("--vocab", "300", "--batch", "2", *ROUNDS),
    "serving": (
        *("--vocab", "100", "--hidden", "128", "--layers", "1", "--intermediate", "64", "--batch", "4"),
        *("--prompt", "8", "--new", "8", "--rounds", "1"),
    ),
    "serving_http": (
        *("--vocab", "300", "--hidden", "128", "--layers", "1", "--intermediate", "64", "--clients", "2"),
        *("--requests", "4", "--prompt-tokens", "4-8", "--new-tokens", "2-4", *ROUNDS),
    ),
    "serving_ranks": (
        *("--vocab", "100", "--hidden", "128", "--layers", "2", "--intermediate", "64", "--batch", "4"),
        *("--prompt", "8", "--new", "8", "--rounds", "1"),
    ),
    "sequence_parallel": ("--seq", "64", *ROUNDS),
    "soak": (
        *("--requests", "60", "--warm-up", "20", "--clients", "8", "--processes", "2"),
        *("--pauses", "1", "--pause-s", "0.2", "--most-growth", "1"),
    ),
    "speculation": (
        *("--vocab", "100", "--hidden", "128", "--layers", "2", "--intermediate", "64", "--batch", "2"),
        *("--prompt", "8", "--new", "8", "--rounds", "1"),
    ),
    "tensor_parallel": ("--seq", "8", "--hidden", "128", *ROUNDS),
    "watchdog": ("--seq", "8", *ROUNDS),
    "weight_sync": (
        *("--vocab", "300", "--hidden", "128", "--layers", "1", "--intermediate", "64"),
        *ROUNDS,
    ),
    "weight_update": (
        *("--vocab", "64", "--hidden", "64", "--layers", "1", "--heads", "2", "--intermediate", "64"),
        *ROUNDS,
    ),
    "zero": ("--seq", "8", "--rounds", "1"),
}
CHAT_PARTS = ("ppo", "step", "generation", "sft", "dpo", "memory")  # beside the sums of GRPO


def run(name: str, folder: str, more: tuple[str, ...] = ()) -> None:
    script = str(BENCHMARKS / f"{name}.py")
    sys.argv = [script, *SMALLEST[name], *more, "--json", f"{folder}/figures.json"]
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(script, run_name="__main__")


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("name", [in_soak(name) if name in SLOW else name for name in SMALLEST])
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    run_ranks(run, 1 if name in ALONE else FOUR.get(name, 2), name, str(tmp_path))
    assert json.loads((tmp_path / "figures.json").read_text())["rows"]


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("part", [in_soak(part) for part in CHAT_PARTS])
def test_a_part_of_the_chat_benchmark_runs(part: str, tmp_path: Path) -> None:
    run_ranks(run, 1, "chat", str(tmp_path), ("--part", part))
    assert json.loads((tmp_path / "figures.json").read_text())["rows"]


def test_no_benchmark_is_forgotten() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == {*SMALLEST, *BY_HAND}
