"""Possible gain of compiling the small operations between the matrix products of a serving step.

    python benchmarks/fused_parts.py --json benchmarks/results/fused_parts.json

The parts of a Llama layer between its matrix products are the residual sum with RMSNorm, the rotary positions
of queries and keys, and the gated activation. They run as in the engine, operation by operation, and compiled
by `torch.compile` with a dynamic number of rows, which requires a C++ compiler. One thread; variants take
turns. Figures are medians in microseconds per call, guards and the call itself included. `layer_us` is the
sum over the calls of a layer.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.rounds import report, time_rounds
from torch import Tensor
from torch.nn import functional

CALLS = {"norm": 2, "rotary": 1, "gate": 1}  # calls per layer


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual sum and its RMSNorm."""
    summed = x + residual
    return summed, functional.rms_norm(summed, weight.shape, weight, 1e-6)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys (rows, heads, features) turned by their positions."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(query), turned(key)


def gate(both: Tensor) -> Tensor:
    """Return silu(a) * b of (rows, [a, b])."""
    first, second = both.chunk(2, -1)
    return functional.silu(first) * second


def calls_of(args: argparse.Namespace, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return the parts with their operands, plain and compiled, by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    size = args.hidden // args.heads
    operands = {
        norm: (random(rows, args.hidden), random(rows, args.hidden), random(args.hidden)),
        rotary: (
            random(rows, args.heads, size),
            random(rows, args.key_heads, size),
            random(rows, 1, size),
            random(rows, 1, size),
        ),
        gate: (random(rows, 2 * args.intermediate),),
    }
    found: dict[str, Callable[[], Any]] = {}
    for part, given in operands.items():
        compiled = torch.compile(part, dynamic=True)
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(compiled(*given), part(*given), atol=tolerance, rtol=tolerance)
        found[part.__name__] = partial(part, *given)
        found[f"{part.__name__} compiled"] = partial(compiled, *given)
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("hidden", 640, "features"),
        ("intermediate", 1728, "features between the products of an MLP"),
        ("heads", 10, "heads of queries"),
        ("key-heads", 5, "heads of keys"),
        ("rounds", 300, "rounds that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="tokens of a step")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="types")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for dtype in args.dtypes:
            for rows in args.rows:
                calls = calls_of(args, rows, getattr(torch, dtype))
                times = time_rounds(calls, rounds=args.rounds, warmup=20, clock=time.thread_time)
                micros = {name: 1e6 * statistics.median(each) for name, each in times.items()}
                for way in ("", " compiled"):
                    parts = {part: round(micros[part + way], 1) for part in CALLS}
                    whole = sum(number * micros[part + way] for part, number in CALLS.items())
                    named = {"dtype": dtype, "rows": rows, "way": way.strip() or "plain"}
                    found.append({**named, **parts, "layer_us": round(whole, 1)})
    report("Between the products of a layer, one thread", found, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
