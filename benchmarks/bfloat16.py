"""Products of bfloat16 and float32 matrices, by the instruction set of the processor.

    python benchmarks/bfloat16.py --json benchmarks/results/bfloat16.json

`precision="auto"` depends on features of the processor (`is_fast_at_bfloat16` in
`colossalai/amp/_precision.py`); these figures are the reason for its rule. Each instruction set is measured
in a separate process, in which oneDNN is limited to that set (`ONEDNN_MAX_CPU_ISA`). A set that the processor
lacks repeats the figures of the next smaller one. `ratio` is the time in bfloat16 over the time in float32,
the median over the rounds: below 1, bfloat16 is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

import torch
from harness.rounds import report, time_rounds

from colossalai.amp import is_fast_at_bfloat16

ISAS = ("DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")  # the largest first
CALLS = 5  # in a row for one time


def measure(size: int, rounds: int) -> dict[str, float]:
    """Return the figures of square matrices in this process."""
    operands = {dtype: torch.randn(2, size, size).to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def multiply(dtype: torch.dtype) -> None:
        for _ in range(CALLS):
            torch.mm(*operands[dtype])

    variants = {str(dtype): (lambda dtype=dtype: multiply(dtype)) for dtype in operands}
    times = time_rounds(variants, rounds=rounds, warmup=2)
    full, low = times.values()
    return {
        "fp32_us": round(1e6 * statistics.median(full) / CALLS, 1),
        "ratio": round(statistics.median(b / a for a, b in zip(full, low, strict=True)), 2),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: %(default)s)")
    parser.add_argument("--isas", nargs="+", default=ISAS, help="instruction sets (default: all)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="of square matrices")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--in-this-process", action="store_true", help="print one instruction set as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.in_this_process:
        print(json.dumps([{"size": size} | measure(size, args.rounds) for size in args.sizes]))
        return
    sizes = map(str, args.sizes)
    command = [sys.executable, __file__, "--in-this-process", "--rounds", str(args.rounds), "--sizes", *sizes]
    rows = []
    for isa in args.isas:
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
        found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        rows += [{"isa": isa} | row for row in json.loads(found.splitlines()[-1])]
    is_fast, reason = is_fast_at_bfloat16(torch.device("cpu"))
    title = f"bfloat16 over float32, one thread; auto is {'bf16' if is_fast else 'fp32'} here: {reason}"
    report(title, rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
