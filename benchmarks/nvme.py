"""Optimizer states on disk: saved memory and additional time, for GPT-2 small.

    python benchmarks/nvme.py --dir /mnt/nvme --json benchmarks/results/nvme.json

Memory is the peak resident memory of two processes that train the model from the same seed, one with all
states in memory and one with all on disk; their weights are compared. Time is that of training steps and of
optimizer steps, in rounds, with the files in the page cache and with direct I/O. The disk time is that of the
same number of threads that only read and write the same bytes, in pieces of the same size. It is measured in
the same rounds, because the speed of a shared disk varies.
"""

import argparse
import hashlib
import json
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.rounds import compare, report, time_rounds
from torch import nn

from colossalai.nn.optimizer import DiskOptions, HybridAdam
from colossalai.nn.optimizer._disk_file import PrivateFolder, StateFile

RAW = ("write", "read", "read and write")
"""Measured operations of the disk alone; a step does the last one."""


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """Return GPT-2 small with seeded weights, and tokens."""
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
    """Train and print the figures; runs in a separate process."""
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
    """Return a row for each location of the states: the median of three processes (peaks vary by 4 %)."""
    found: dict[str, list[dict[str, Any]]] = {"memory": [], "disk": []}
    for _ in range(3):
        for kind, results in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    assert len({result["weights"] for results in found.values() for result in results}) == 1, "weights differ"
    peaks = {kind: sorted(result["peak"] for result in results) for kind, results in found.items()}
    numel = found["memory"][0]["numel"]
    return [
        {
            "what": "peak resident memory",
            "variant": kind,
            "value": f"{low / 2**20:.0f} to {high / 2**20:.0f} MiB, median {middle / 2**20:.0f} MiB",
            "ratio": round((peaks["memory"][1] - middle) / (8 * numel), 4),
            "quartiles": "saved / (8 bytes x parameters)" if kind == "disk" else "",
        }
        for kind, (low, middle, high) in peaks.items()
    ]


def measure_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rows of step times; those of the disk itself are measured in the same rounds."""
    model, tokens = model_and_data(args)
    params = list(model.parameters())
    optimizers = {kind: optimizer_of(params, args, kind) for kind in ("memory", "page cache", "disk")}

    def training_step(optimizer: HybridAdam) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step

    training = {kind: training_step(optimizer) for kind, optimizer in optimizers.items()}
    times = time_rounds(training, rounds=args.rounds, warmup=1)
    rows = [_row("training step", row, times, "") for row in compare(times, baseline="memory")]

    num_bytes = 8 * sum(param.numel() for param in params)
    num_bytes = -(-num_bytes // args.buffer_size) * args.buffer_size
    folder = PrivateFolder(args.dir)
    file = StateFile(folder.path / "raw", num_bytes, direct=True)
    raw = {act: partial(exchange_raw, file, act.split(" and "), args) for act in RAW}
    updates = {kind: optimizer.step for kind, optimizer in optimizers.items()}
    times = time_rounds({**updates, **raw}, rounds=args.rounds, warmup=1)
    by_memory = compare(times, baseline="memory")
    rows += [_row("optimizer step", row, times, "") for row in by_memory if row["variant"] in updates]
    for row in by_memory:
        if row["variant"] in raw:
            moved = num_bytes * len(row["variant"].split(" and "))
            rows.append(_row("raw disk", row, times, f", {moved / row['step_ms'] / 1e6:.2f} GB/s"))
    last = next(row for row in compare(times, baseline=RAW[-1]) if row["variant"] == "disk")
    return [*rows, _row("optimizer step / raw disk", last, times, "")]


def _row(what: str, row: dict[str, Any], times: dict[str, list[float]], more: str) -> dict[str, Any]:
    name = row["variant"]
    return {
        "what": what,
        "variant": name,
        "value": f"{row['step_ms']:.0f} ms, best {1e3 * min(times[name]):.0f} ms{more}",
        "ratio": row["ratio"],
        "quartiles": str(row["ratio_quartiles"]),
    }


def exchange_raw(file: StateFile, acts: list[str], args: argparse.Namespace) -> None:
    """Read or write a file, or both, with one thread per buffer; each thread takes the next piece."""
    offsets = iter(range(0, file.size, args.buffer_size))

    def work(buffer: memoryview) -> None:
        for offset in offsets:
            for act in acts:
                getattr(file, act)(buffer, offset)

    buffers = [memoryview(mmap.mmap(-1, args.buffer_size)) for _ in range(args.depth)]
    with ThreadPoolExecutor(args.depth) as pool:
        list(pool.map(work, buffers))


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
    rows = [*measure_memory(args), *measure_steps(args)]
    settings = {**vars(args), "dir": str(args.dir)}
    report("GPT-2 small, all optimizer states on disk", rows, settings=settings, json_file=args.json)


if __name__ == "__main__":
    main()
