"""Embeddings with a cached table: a table in a file, of four times the memory, against its rows alone.

    python benchmarks/cached_embedding.py --dir /mnt/nvme --json benchmarks/results/cached_embedding.json

A process trains a bag whose table is a file, in a control group with a quarter of the table's size of memory,
page cache included. Another process in such a group reads and writes the same rows of a file of the same
size, each with a call of its own, by one thread and by several. The moves of rows are compared, medians of
rounds. Root makes the groups; with --unlimited there are none, and the page cache has the whole table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness.rounds import report
from torch import Tensor

from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag

BAGS, IDS_PER_BAG, POWER = 4096, 4, 1.05


@contextmanager
def memory_group(num_bytes: int) -> Iterator[Path]:
    """Make a control group with a limit of memory."""
    root = Path("/sys/fs/cgroup")
    is_first_version = (root / "memory").is_dir()
    group = (root / "memory" if is_first_version else root) / f"cached-embedding-{os.getpid()}"
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if is_first_version else "memory.max"
        (group / limit).write_text(str(num_bytes))
        yield group
    finally:
        group.rmdir()


def batches(args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield ids by a power law, the first rows the most frequent."""
    generator = torch.Generator().manual_seed(0)
    share = (torch.arange(1, args.rows + 1, dtype=torch.float32) ** -POWER).cumsum_(0)
    share /= share[-1].clone()
    for _ in range(args.steps):
        yield torch.searchsorted(share, torch.rand(BAGS, IDS_PER_BAG, generator=generator))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and save which rows each step has moved; return the times."""
    bag = CachedEmbeddingBag(
        args.rows,
        args.dim,
        mode="sum",
        sparse=True,
        cache_ratio=args.cache_ratio,
        warmup_ratio=1.0,
        weight_path=args.dir / "table",
    )
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    cache = bag.cache_weight_mgr
    trace, seconds, held = [], [], cache.row_of.clone()
    num_warm, row_mb = int((held >= 0).sum()), args.dim * bag.element_size() / 1e6
    warming = num_warm * row_mb / bag.swap_in_bandwidth  # these rows are neighbours, which is faster
    for ids in batches(args):
        start = time.perf_counter()
        optimizer.zero_grad()
        bag(ids).square().sum().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        moved = held != cache.row_of
        trace.append((held[moved], cache.row_of[moved]))
        held = cache.row_of.clone()
    torch.save(trace, args.dir / "trace")
    num_in, num_out = sum(bag.num_miss_history), sum(bag.num_write_back_history)
    moving = (num_warm + num_in) * row_mb / bag.swap_in_bandwidth - warming
    if num_out:  # else the bandwidth is 0
        moving += num_out * row_mb / bag.swap_out_bandwidth
    status = Path("/proc/self/status").read_text()
    anonymous = (
        int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024
    )
    return {
        "moving": moving,
        "step": statistics.median(seconds),
        "anonymous_MB": anonymous,
        "rows_in": num_in,
        "rows_out": num_out,
    }


def move_raw(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Write and read the rows of the trace, each with a call of its own; return the time."""
    trace = torch.load(args.dir / "trace")
    row_bytes = args.dim * 4
    offset = 4096  # the header
    file = os.open(args.dir / "table", os.O_RDWR)
    data = b"\0" * row_bytes

    def write(rows: list[int]) -> None:
        for row in rows:
            os.pwrite(file, data, offset + row * row_bytes)

    def read(rows: list[int]) -> None:
        for row in rows:
            os.pread(file, row_bytes, offset + row * row_bytes)

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        for leaving, entering in trace:
            for move, rows in ((write, leaving), (read, entering)):
                list(pool.map(move, _parts(rows.tolist(), threads)))
        moving = time.perf_counter() - start
    os.close(file)
    return {"moving": moving}


def _parts(rows: list[int], number: int) -> Iterator[list[int]]:
    rows.sort()
    cuts = [len(rows) * part // number for part in range(number + 1)]
    for begin, end in pairwise(cuts):
        yield rows[begin:end]


def run(args: argparse.Namespace, worker: str) -> dict[str, Any]:
    """Return the figures of a process in a group of its own, which begins without pages of the file."""
    for name in ("table", "trace"):
        if (args.dir / name).exists():
            file = os.open(args.dir / name, os.O_RDWR)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    limit = args.rows * args.dim  # a quarter of four bytes
    command = [sys.executable, __file__, *sys.argv[1:], "--dir", str(args.dir), "--worker", worker]
    with nullcontext() if args.unlimited else memory_group(limit) as group:
        if group is not None:
            command += ["--group", str(group)]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way of moving rows."""
    run(args, "train")  # makes the table
    rounds = [
        {worker: run(args, worker) for worker in ("train", "raw 1", "raw 16")} for _ in range(args.rounds)
    ]
    rows = []
    for name, worker in (
        ("cached bag", "train"),
        ("rows, 1 thread", "raw 1"),
        ("rows, 16 threads", "raw 16"),
    ):
        ratios = [each[worker]["moving"] / each["raw 1"]["moving"] for each in rounds]
        seconds = statistics.median(each[worker]["moving"] for each in rounds)
        row = {"variant": name, "moves_ms": 1e3 * seconds / args.steps, "ratio": statistics.median(ratios)}
        first = [each["train"] for each in rounds]
        of_bag = {
            "step_ms": 1e3 * statistics.median(each["step"] for each in first),
            "anonymous_MB": statistics.median(each["anonymous_MB"] for each in first),
            "rows_in": first[0]["rows_in"] / args.steps,
            "rows_out": first[0]["rows_out"] / args.steps,
        }
        rows.append(row | (of_bag if worker == "train" else dict.fromkeys(of_bag)))
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="a folder on the disk (default: a new temporary one)")
    parser.add_argument("--rows", type=int, default=8_000_000, help="default: %(default)s")
    parser.add_argument("--dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--cache-ratio", type=float, default=0.02, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--unlimited", action="store_true", help="without control groups")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        if args.group is not None:
            (args.group / "cgroup.procs").write_text(str(os.getpid()))
        kind, _, threads = args.worker.partition(" ")
        print(json.dumps(train(args) if kind == "train" else move_raw(args, int(threads))))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        settings = {**vars(args), "dir": str(args.dir)}
        args.dir = Path(folder)
        rows = measure(args)
    size = args.rows * args.dim * 4 / 1e9
    memory = "any" if args.unlimited else f"{size / 4:.1f} GB of"
    title = f"Table of {size:.1f} GB in a file, in {memory} memory: moves of rows in a step"
    report(title, rows, settings=settings, json_file=args.json)


if __name__ == "__main__":
    main()
