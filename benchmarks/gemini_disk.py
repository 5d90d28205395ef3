"""Peak memory and step time of a GPT whose model data is four times its memory budget.

    python benchmarks/gemini_disk.py --dir /mnt/nvme --json benchmarks/results/gemini_disk.json

Two processes take turns at the same training. One keeps all model data in memory, the other uses
`placement_policy="nvme"` and a budget of a quarter of it. The peak is the resident memory of the process,
mapped files included, less the value after training a tiny GPT (libraries and their buffers); the parent
process reads it. The allowed peak is the budget plus the memory that is not model data, as counted in the
first step. The disk time is that of reading and writing the bytes of a step with a final sync. It is measured
in the same rounds, because the speed of a shared disk varies.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from harness.rounds import compare, report, time_rounds

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.zero.gemini import record_timeline
from colossalai.zero.gemini._hooks import handle_of

BYTES_OF_MODEL_DATA = 4 + 4 + 8  # parameter, gradient and Adam's two states
PIECE = 8 * 2**20
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # a launcher's variables


def build(seq: int, hidden: int, layers: int) -> GPT:
    """Return a GPT with seeded weights."""
    torch.manual_seed(0)
    rates = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)
    return GPT(
        GPTConfig(
            **rates,
            vocab_size=8192,
            max_position_embeddings=seq,
            hidden_size=hidden,
            num_layers=layers,
            num_attention_heads=hidden // 64,
        )
    )


def resident(field: str, pid: int | str = "self") -> int:
    """Return a field of `/proc/PID/status` in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def gemini_step(args: argparse.Namespace, raw: GPT, tokens: torch.Tensor, **more: Any) -> Callable[[], float]:
    """Return a function that runs a step under Gemini and returns the loss."""
    plugin = GeminiPlugin(
        precision="fp32", search_range_mb=2, min_chunk_size_mb=args.chunk_mb, recompute=True, **more
    )
    optimizer = torch.optim.Adam(raw.parameters(), lr=1e-4, fused=True)
    model, optimizer, *_ = Booster(plugin=plugin).boost(raw, optimizer)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def worker(args: argparse.Namespace) -> None:
    """Train one step per input line; print the initial memory, then the time and loss of each step."""
    torch.set_num_threads(args.threads)
    colossalai.launch_from_torch(config={}, verbose=False)
    tokens = torch.randint(8192, (args.batch, args.seq))
    gemini_step(args, build(args.seq, 64, 2), tokens)()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # release the heap of the tiny GPT: only the libraries' buffers count
    before = resident("VmRSS")
    model = build(args.seq, args.hidden, args.layers)
    numel = sum(param.numel() for param in model.parameters())
    more: dict[str, Any] = {}
    if args.worker == "disk":
        budget = int(BYTES_OF_MODEL_DATA * numel / args.times)
        more = {"placement_policy": "nvme", "memory_budget": budget, "offload_dir": args.dir}
    step = gemini_step(args, model, tokens, **more)
    print(json.dumps({"before": before, "numel": numel}), flush=True)
    other_bytes = 0
    for _ in sys.stdin:
        with nullcontext() if other_bytes else record_timeline(model) as iterations:
            start = time.perf_counter()
            loss = step()
            seconds = time.perf_counter() - start
        other_bytes = iterations[0].peak_other_bytes if iterations else other_bytes
        chunks = handle_of(next(model.parameters())).hooks.cache.chunks
        homes = [(chunk.home.name, chunk.states_home.name, chunk.num_bytes) for chunk in chunks]
        moved = {"sections": 0, "states": 0}
        for home, states_home, size in homes:
            moved["sections"] += size * (home == "DISK")
            moved["states"] += size * (states_home == "DISK")
        told = {"seconds": seconds, "loss": loss, "moved": moved, "other_bytes": other_bytes}
        print(json.dumps(told), flush=True)


class Trainer:
    """A process that runs a training step on request.

    Args:
        kind: Location of its model data, "memory" or "disk".
    """

    def __init__(self, kind: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", kind]
        alone = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=alone, **pipes)
        self.first = self._next()
        self.losses: list[float] = []
        self.moved: dict[str, int] = {}
        self.other_bytes = 0

    def step(self) -> None:
        """Run a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told = self._next()
        self.losses.append(told["loss"])
        self.moved, self.other_bytes = told["moved"], told["other_bytes"]

    @property
    def peak(self) -> int:
        """Peak resident memory so far, less the value before the model was built."""
        return resident("VmHWM", self._process.pid) - int(self.first["before"])

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                told: dict[str, Any] = json.loads(line)
                return told
        raise RuntimeError(f"the process ended with {self._process.wait()}")


def exchange_raw(folder: str | None, num_read: int, num_written: int) -> Callable[[], None]:
    """Return a function that reads and writes a file, with direct I/O where possible, and syncs."""
    num_bytes = -(-max(num_read, num_written, 1) // PIECE) * PIECE
    buffer = memoryview(mmap.mmap(-1, PIECE))
    path = tempfile.NamedTemporaryFile(dir=folder, delete=False).name  # noqa: SIM115 - opened again below
    try:
        file = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        file = os.open(path, os.O_RDWR)
    os.unlink(path)
    os.posix_fallocate(file, 0, num_bytes)
    for offset in range(0, num_bytes, PIECE):
        os.pwritev(file, [buffer], offset)

    def exchange() -> None:
        for offset in range(0, num_written, PIECE):
            os.pwritev(file, [buffer], offset)
        for offset in range(0, num_read, PIECE):
            os.preadv(file, [buffer], offset)
        os.fdatasync(file)

    return exchange


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", help="a folder on the disk (default: the temporary one)")
    parser.add_argument("--times", type=float, default=4.0, help="model data / budget (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=768, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--chunk-mb", type=float, default=6.5, help="2**20 elements (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dir = args.dir or tempfile.gettempdir()
    if args.worker:
        worker(args)
        return
    if os.environ.get("RANK", "0") != "0":
        return  # the script starts its processes itself; rank 0 prints the table
    trainers = {kind: Trainer(kind) for kind in ("memory", "disk")}
    for trainer in trainers.values():
        trainer.step()  # recorded
        trainer.step()  # the first that follows the plan
    moved = trainers["disk"].moved
    # Sections are read in forward and backward, and with states and gradients read and written in the step.
    num_read, num_written = (
        3 * moved["sections"] + 3 * moved["states"],
        moved["sections"] + 3 * moved["states"],
    )
    acts = {kind: trainer.step for kind, trainer in trainers.items()}
    acts["the disk alone"] = exchange_raw(args.dir, num_read, num_written)
    times = time_rounds(acts, rounds=args.rounds, warmup=1)
    alone = times["memory"], times["the disk alone"]
    times["the larger of both"] = [max(its) for its in zip(*alone, strict=True)]
    assert trainers["memory"].losses == trainers["disk"].losses, "losses differ"
    numel = int(trainers["disk"].first["numel"])
    budget = BYTES_OF_MODEL_DATA * numel / args.times
    other_bytes = trainers["disk"].other_bytes
    whole = budget + other_bytes
    rows = [
        {
            "what": "peak resident memory",
            "variant": kind,
            "value": f"{trainer.peak / 2**20:.0f} MiB",
            "ratio": round(trainer.peak / whole, 3),
            "quartiles": f"of {whole / 2**20:.0f} MiB",
        }
        for kind, trainer in trainers.items()
    ]
    for baseline in ("memory", "the disk alone", "the larger of both"):
        rows += [
            {
                "what": f"step / {baseline}",
                "variant": row["variant"],
                "value": f"{row['step_ms']:.0f} ms",
                "ratio": row["ratio"],
                "quartiles": str(row["ratio_quartiles"]),
            }
            for row in compare(times, baseline=baseline)
            if row["variant"] in ("disk", baseline)
        ]
    for trainer in trainers.values():
        trainer.end()
    sizes = f"{budget / 2**20:.0f} MiB, with {other_bytes / 2**20:.0f} that are not model data"
    title = f"a GPT of {numel / 1e6:.0f} million parameters in {sizes}"
    settings = {
        **vars(args),
        "budget": budget,
        "other_bytes": other_bytes,
        "bytes_read": num_read,
        "bytes_written": num_written,
    }
    report(title, rows, settings=settings, json_file=args.json)


if __name__ == "__main__":
    main()
