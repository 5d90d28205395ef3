"""Step time of a GPT on the ranks of one machine, for different settings of `colossalai run`.

    python benchmarks/rank_settings.py --json benchmarks/results/rank_settings.json
    python benchmarks/rank_settings.py --busy 1     # another process computes all the time

Each round starts the same job once per setting, in an order that rotates. The figure of a job is its median
step; the result is the median over the rounds of the ratio to the first setting. Page faults are those of
rank 0 in a step, and memory is its peak.

Start this script directly, not with `colossalai run`: it starts its jobs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import report
from torch import nn

import colossalai
from colossalai.model_zoo.gpt import GPT, GPTConfig

# The options of `colossalai run`, and the environment.
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "unbound": (["--no-bind"], {}),
    "bound": (["--bind"], {}),
    # Thresholds that glibc reaches after a program has freed large blocks.
    "unbound, memory returned": (
        ["--no-bind"],
        {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)},
    ),
}
_OUTPUT = "RANK_SETTINGS_OUTPUT"  # path of the file for rank 0's figures
_BUSY = "import torch; torch.set_num_threads(1); a = torch.ones(512, 512)\nwhile True: a @ a"


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train as a rank of the job, and return this rank's figures."""
    colossalai.launch_from_torch(config={"clip_grad_norm": 1.0}, verbose=False)
    shape = GPTConfig(
        vocab_size=args.vocabulary,
        max_position_embeddings=args.seq,
        hidden_size=args.hidden,
        num_layers=6,
        num_attention_heads=8,
        embedding_dropout=0.0,
        dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    engine, *_ = colossalai.initialize(model, optimizer, loss_of, verbose=False)
    tokens = torch.randint(args.vocabulary, (args.batch, args.seq + 1))
    times = []
    for number in range(-args.warmup, args.steps):
        if number == 0:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        dist.barrier()
        start = time.perf_counter()
        engine.zero_grad()
        engine.backward(engine.criterion(engine(tokens[:, :-1]), tokens[:, 1:]))
        engine.step()
        times.append(time.perf_counter() - start)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_ms": 1e3 * statistics.median(times[args.warmup :]),
        "page_faults": (usage.ru_minflt - faults) / args.steps,
        "memory_mib": usage.ru_maxrss / 1024,
    }


def start_job(way: str, args: argparse.Namespace) -> dict[str, float]:
    """Run the job with one of the settings; return the figures of rank 0."""
    options, variables = WAYS[way]
    with tempfile.NamedTemporaryFile("r") as output:
        command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node", str(args.ranks)]
        done = subprocess.run(
            [*command, *options, __file__, *sys.argv[1:]],
            env={**os.environ, **variables, _OUTPUT: output.name},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"the job that is {way} failed:\n{done.stderr}")
        figures: dict[str, float] = json.load(output)
    return figures


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all jobs in turn and return a row for each setting."""
    names = list(WAYS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(args.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(start_job(name, args))
    rows = []
    for name in names:
        pairs = zip(found[name], found[names[0]], strict=True)
        ratios = sorted(mine["step_ms"] / first["step_ms"] for mine, first in pairs)
        row = {key: round(statistics.median(each[key] for each in found[name]), 1) for key in found[name][0]}
        rows.append(
            {"ranks_are": name, "ratio": round(statistics.median(ratios), 3)}
            | {"ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)]}
            | row
        )
    return rows


def main() -> None:
    """Run as a rank, or start the jobs and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a job (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: %(default)s)")
    parser.add_argument(
        "--vocabulary", type=int, default=2048, help="number of tokens (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=2, help="sequences on a rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute meanwhile")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if _OUTPUT in os.environ:
        figures = train(args)
        if os.environ["RANK"] == "0":
            Path(os.environ[_OUTPUT]).write_text(json.dumps(figures))
        return
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(args.busy)]
    try:
        rows = measure(args)
    finally:
        for other in others:
            other.kill()
            other.wait()
    report(f"A step of {args.ranks} ranks on this machine", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
