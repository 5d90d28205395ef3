"""Optimizer states on disk: the memory that they save and the time that they cost, for GPT-2 small.

    python benchmarks/nvme.py --dir /mnt/nvme --json benchmarks/results/nvme.json

Memory is the peak of the resident memory of two processes that train the model from the same seed, one with
all states in memory and one with all on disk; their weights are compared. Time is that of training steps and
of optimizer steps, in rounds, with the files in the page cache and past it. The disk's own time is what
threads need that read and write the same bytes, in pieces of the same size, and do nothing else.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness.rounds import compare, report, time_rounds
from torch import nn

from colossalai.nn.optimizer import DiskOptions, HybridAdam
from colossalai.nn.optimizer._disk_file import PrivateFolder, StateFile


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """Return GPT-2 small, from a seed, and tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    return model, torch.randint(50257, (args.batch, args.seq))


def optimizer_of(params: list[nn.Parameter], args: argparse.Namespace, kind: str) -> HybridAdam:
    """Return an optimizer with its states in "memory", in the "page cache" or on the "disk"."""
    if kind == "memory":
        return HybridAdam(params)
    options = DiskOptions(depth=args.depth, buffer_size=args.buffer_size, direct=kind == "disk")
    return HybridAdam(params, nvme_offload_fraction=1.0, nvme_offload_dir=args.dir, nvme_options=options)


def worker(args: argparse.Namespace) -> None:
    """Train and print what it took: run in a process of its own."""
    model, tokens = model_and_data(args)
    params = list(model.parameters())
    optimizer = optimizer_of(params, args, args.worker)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for param in params:
        digest.update(param.detach().numpy())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    numel = sum(param.numel() for param in params)
    print(json.dumps({"peak": peak, "numel": numel, "weights": digest.hexdigest()}))


def measure_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each place of the states."""
    found = {}
    for kind in ("memory", "disk"):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", kind]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    assert found["memory"]["weights"] == found["disk"]["weights"], "the weights differ"
    saved = found["memory"]["peak"] - found["disk"]["peak"]
    return [
        {
            "what": "peak resident memory",
            "variant": kind,
            "value": f"{result['peak'] / 2**20:.0f} MiB",
            "ratio": round((found["memory"]["peak"] - result["peak"]) / (8 * result["numel"]), 4),
            "quartiles": "saved / (8 bytes x parameters)" if saved and kind == "disk" else "",
        }
        for kind, result in found.items()
    ]


def measure_steps(args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Return rows of step times, and the seconds of an optimizer step on the disk."""
    model, tokens = model_and_data(args)
    params = list(model.parameters())
    optimizers = {kind: optimizer_of(params, args, kind) for kind in ("memory", "page cache", "disk")}

    def training_step(optimizer: HybridAdam) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step

    rows = []
    optimizer_seconds = 0.0
    for what, steps in (
        ("training step", {kind: training_step(optimizer) for kind, optimizer in optimizers.items()}),
        ("optimizer step", {kind: optimizer.step for kind, optimizer in optimizers.items()}),
    ):
        times = time_rounds(steps, rounds=args.rounds, warmup=1)
        for row in compare(times, baseline="memory"):
            value = f"{row['step_ms']:.0f} ms, best {1e3 * min(times[row['variant']]):.0f} ms"
            rows.append(
                {
                    "what": what,
                    "variant": row["variant"],
                    "value": value,
                    "ratio": row["ratio"],
                    "quartiles": str(row["ratio_quartiles"]),
                }
            )
        optimizer_seconds = sorted(times["disk"])[len(times["disk"]) // 2]
    return rows, optimizer_seconds


def measure_disk(args: argparse.Namespace, step_seconds: float) -> list[dict[str, Any]]:
    """Return the raw speeds of the disk, and a step's time against its time for the same bytes."""
    numel = 124_439_808
    size = -(-8 * numel // args.buffer_size) * args.buffer_size
    folder = PrivateFolder(args.dir)
    file = StateFile(folder.path / "raw", size, direct=True)
    seconds: dict[str, list[float]] = {"write": [], "read": [], "read and write": []}
    for _ in range(max(1, args.rounds // 2)):
        for name in seconds:
            seconds[name].append(_raw_seconds(file, name.split(" and "), args))
    rows = []
    for name, values in seconds.items():
        typical = sorted(values)[len(values) // 2]
        num_bytes = size * len(name.split(" and "))
        rows.append(
            {
                "what": "raw disk",
                "variant": name,
                "value": f"{1e3 * typical:.0f} ms, {num_bytes / typical / 2**20:.0f} MiB/s",
                "ratio": round(step_seconds / typical, 4) if name == "read and write" else "",
                "quartiles": "optimizer step / raw time" if name == "read and write" else "",
            }
        )
    return rows


def _raw_seconds(file: StateFile, acts: list[str], args: argparse.Namespace) -> float:
    import mmap

    def work(number: int) -> None:
        buffer = memoryview(mmap.mmap(-1, args.buffer_size))
        for offset in range(number * args.buffer_size, file.size, args.depth * args.buffer_size):
            for act in acts:
                getattr(file, act)(buffer, offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(args.depth) as pool:
        list(pool.map(work, range(args.depth)))
    return time.perf_counter() - start


def main() -> None:
    """Measure and report."""
    defaults = DiskOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="a folder on the disk (default: the temporary one)")
    parser.add_argument("--depth", type=int, default=defaults.depth, help="default: %(default)s")
    parser.add_argument("--buffer-size", type=int, default=defaults.buffer_size, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.worker:
        worker(args)
        return
    rows = measure_memory(args)
    step_rows, seconds = measure_steps(args)
    rows += [*step_rows, *measure_disk(args, seconds)]
    settings = {**vars(args), "dir": str(args.dir)}
    report("GPT-2 small, all optimizer states on disk", rows, settings=settings, json_file=args.json)


if __name__ == "__main__":
    main()
