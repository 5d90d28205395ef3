"""A small Llama served with quantized weights: tokens per second, bytes, logits, and memory at load.

    python benchmarks/quantized.py --json benchmarks/results/quantized.json

Every variant answers the same requests (64-token prompts, 64 new tokens, no prefix cache) in one process;
`tokens_per_s` is the median over the rounds of tokens per second of CPU time, prompts included. Bytes are
those of all parameters, and of the linear layers alone; the embedding is not quantized. `peak_mib` is the
peak memory of a separate process that loads the model, sampled every millisecond without pages of the mapped
file, less that of a process that stops after building the model without memory.
"""

import argparse
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import compare, report, time_rounds

from colossalai.inference import LLM, SamplingParams, quantization_report

WAYS = ("int8", "int8-weights", "int4:64")
LOAD = """
import sys, torch
from colossalai.inference import EngineOptions, load_model
from colossalai.inference.models import resolve_model
torch.set_num_threads(1)
folder, dtype, way = sys.argv[1:]
if dtype != "none":
    kept = load_model(folder, EngineOptions(dtype=dtype, quantize=way or None))
print("loaded", flush=True)
input()
"""


def save_model(folder: str, args: argparse.Namespace) -> None:
    """Save a random model."""
    llama_of(args, heads=args.heads, kv_heads=args.heads // 2).save_pretrained(folder)


def peak_mib(folder: str, dtype: str, way: str) -> float:
    """Return the peak private memory of a process that loads the model."""
    command = [sys.executable, "-c", LOAD, folder, dtype, way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        most = 0
        while not select.select([child.stdout], [], [], 0.001)[0]:
            status = Path(f"/proc/{child.pid}/status").read_text()
            line = next((line for line in status.splitlines() if line.startswith("RssAnon")), None)
            most = max(most, int(line.split()[1]) if line else 0)
        if child.stdout.readline() != "loaded\n":
            raise RuntimeError(f"loading {folder} as {dtype} {way} failed")
        child.stdin.write("\n")
        child.stdin.close()
    return most / 1024


def answer(llm: LLM, prompts: list[list[int]], num_tokens: int) -> Callable[[], None]:
    """Return a function that answers the prompts."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return lambda: discard(llm.generate(prompts, params))


def discard(_: object) -> None:
    """Discard a result."""


def rows_of(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all variants."""
    variants = {
        f"{dtype}, {way}" if way else dtype: (dtype, way) for dtype in args.dtypes for way in ("", *WAYS)
    }
    engines = {
        name: LLM(folder, dtype=dtype, quantize=way or None, kv_memory=2**28, has_prefix_cache=False)
        for name, (dtype, way) in variants.items()
    }
    kv_dtypes = {f"{dtype}, cache in int8": dtype for dtype in args.dtypes}
    engines |= {
        name: LLM(folder, dtype=dtype, kv_dtype="int8", kv_memory=2**28, has_prefix_cache=False)
        for name, dtype in kv_dtypes.items()
    }
    found: list[dict[str, Any]] = []
    lowest = peak_mib(folder, "none", "")
    peaks = {name: peak_mib(folder, *variant) - lowest for name, variant in variants.items()}
    reports = {
        name: quantization_report(folder, way, dtype=dtype) for name, (dtype, way) in variants.items() if way
    }
    for num_requests in args.requests:
        prompts = torch.randint(0, args.vocab, (num_requests, args.prompt)).tolist()
        steps = {name: answer(llm, prompts, args.new) for name, llm in engines.items()}
        times = time_rounds(steps, rounds=args.rounds, warmup=1, clock=time.process_time)
        for row in compare(times, baseline=args.dtypes[0]):
            name = row["variant"]
            seconds = statistics.median(times[name])
            each = reports.get(name)
            more: dict[str, Any] = {"tokens_per_s": round(num_requests * args.new / seconds, 1)}
            more["peak_mib"] = round(peaks[name if name in peaks else kv_dtypes[name]], 1)
            more["bytes_ratio"] = round(each.bytes_after / each.bytes_before, 3) if each else 1
            more["product_bytes_ratio"] = (
                round(each.product_bytes_after / each.product_bytes_before, 3) if each else 1
            )
            more["logit_error"] = round(each.largest_error / each.largest_logit, 5) if each else 0
            more["kv_bytes_per_token"] = engines[name].engine.executor.runner.bytes_per_block // 16
            found.append({"requests": num_requests, **row, **more})
    return found


def main() -> None:
    """Measure and report."""
    parser = llama_parser(__doc__, heads=10, prompt=64, new=64, rounds=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args)
        rows = rows_of(folder, args)
    report(
        "Serving a small Llama with weights in few bits, one thread",
        rows,
        settings=vars(args),
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
