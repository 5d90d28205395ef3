"""Products of few rows with packed weights, compared with the memory bandwidth of one core.

    python benchmarks/packed_rows.py
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/packed_rows.py    # weights in pages of 2 MiB

The weights of a small Llama (218 MB in float32, larger than the caches) are multiplied in turn by 1, 2, 4 and
more rows. These are the products of a decoding step without its head, on one thread. `GB/s` is the memory
read per second; "of one row" is the time relative to the first number of rows. "sum" adds up the same number
of elements: the highest read rate of a core. "table" is one row with row tables, as in the engine where it
keeps them. Without tables the engine pads to `fewest_rows`, which the last line prints.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from harness.rounds import report, time_rounds

from colossalai.inference.products import FloatRowTable, fewest_rows

SHAPES = ((1280, 640), (640, 640), (1728, 640), (1728, 640), (640, 1728))


def huge_mib() -> int:
    """Return the MiB of this process's memory in huge pages; Linux only."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) // 1024
    return 0


@torch.inference_mode()
def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--num-rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 16, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.dtypes:
        dtype = getattr(torch, name)
        plain = [torch.randn(*shape).to(dtype) for _ in range(args.layers) for shape in SHAPES]
        num_bytes = sum(weight.nbytes for weight in plain)
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in plain]
        inputs = [weight.shape[1] for weight in plain]
        flat = torch.cat([weight.flatten() for weight in plain])
        tables = [FloatRowTable(weight) for weight in plain]
        del plain
        variants = {"sum": lambda flat=flat: flat.sum()}
        row = {size: torch.randn(1, size).to(dtype) for size in set(inputs)}

        def multiply_tables(row: dict[int, torch.Tensor] = row, tables: list[FloatRowTable] = tables) -> None:
            for size, table in zip(inputs, tables, strict=True):  # noqa: B023
                table.multiply(row[size])

        variants["table"] = multiply_tables
        for num_rows in args.num_rows:
            xs = {size: torch.randn(num_rows, size).to(dtype) for size in set(inputs)}

            def multiply(xs: dict[int, torch.Tensor] = xs, packed: list[torch.Tensor] = packed) -> None:
                for size, weight in zip(inputs, packed, strict=True):  # noqa: B023
                    torch.ops.mkldnn._linear_pointwise(xs[size], weight, None, "none", [], "")

            variants[f"{num_rows}"] = multiply
        times = time_rounds(variants, rounds=args.rounds, warmup=1, clock=time.thread_time)
        for variant, seconds in times.items():
            middle = statistics.median(seconds)
            rows.append(
                {
                    "dtype": name,
                    "rows": variant,
                    "ms": round(1e3 * middle, 2),
                    "GB/s": round(num_bytes / middle / 1e9, 1),
                    "of one row": round(middle / statistics.median(times[str(args.num_rows[0])]), 3),
                }
            )
    chosen = {name: fewest_rows(getattr(torch, name)) for name in args.dtypes}
    settings = vars(args) | {"fewest_rows": chosen, "huge_pages_mib": huge_mib()}
    report("Products of few rows, one thread", rows, settings=settings, json_file=args.json)
    print(f"filled up to so many rows: {chosen}; in huge pages: {settings['huge_pages_mib']} MiB")


if __name__ == "__main__":
    main()
