"""Products of float32 matrices on CPU: torch's own, torch at "medium", oneDNN for everything, and ours.

    python benchmarks/matmul.py --threads 1 2 --json benchmarks/results/matmul.json

For a linear layer of each shape: its forward, the gradient of its input and the gradient of its weight, as
matrix products with autograd's layouts. Variants take turns; `ours`, `medium` and `onednn` are ratios to
torch's time of the same round, medians over the rounds: below 1 is faster.

- `gflops` are torch's; `ours_gflops` follow from the ratio. With one thread, times are CPU times of that
  thread, unaffected by other processes; with more threads they are wall-clock times.
- `ours` uses figures of this processor, measured at the start (`colossalai.kernel.measured_profile`).
- `medium` is `torch.set_float32_matmul_precision("medium")`. The title gives the number of a float32's 24
  bits that are correct in its results on this processor: about 8 where it multiplies in bfloat16.
- `onednn` calls oneDNN for all sizes, without the rule of `ours`. `packed` does the same for a forward whose
  weight has been packed once, as serving and frozen layers could.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from harness.products import bits_at_medium, medium
from harness.rounds import report

from colossalai.kernel import measured_profile, onednn_products, why_unavailable

SHAPES = (
    *((rows, 512, 2048) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 4096)),
    *((1024, width, width) for width in (64, 128, 256, 512, 1024)),
    *((128, 64, 256), (256, 256, 768), (256, 256, 2048), (4096, 64, 64), (8, 4096, 4096), (64, 1024, 8192)),
    *((1, 4096, 4096), (2, 4096, 4096), (4096, 1024, 1), (4096, 1024, 8), (4096, 8, 1024), (301, 200, 1000)),
)
"""Rows of the input, features in and out of the layer."""

LAYOUTS = {"view": (512, 512, 512), "transposed": (512, 512, 512)}
"""Shapes that are measured with other inputs: columns of a wider matrix, and a matrix read by columns."""

Product = Callable[[], torch.Tensor]


def products(
    rows: int, terms: int, columns: int, layout: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the operands of the three products of a layer."""
    x = {
        "plain": lambda: torch.randn(rows, terms),
        "view": lambda: torch.randn(rows, 3 * terms)[:, terms : 2 * terms],
        "transposed": lambda: torch.randn(terms, rows).t(),
    }[layout]()
    weight, grad = torch.randn(columns, terms), torch.randn(rows, columns)
    return {"forward": (x, weight.t()), "input_grad": (grad, weight), "weight_grad": (grad.t(), x)}


SETTINGS: dict[str, Callable[[], Any]] = {
    "torch": nullcontext,
    "medium": medium,
    "onednn": nullcontext,
    "packed": nullcontext,
    "ours": lambda: onednn_products(measured_profile()),
}


def measure(a: torch.Tensor, b: torch.Tensor, *, rounds: int) -> dict[str, Any]:
    """Return the figures of a product; variants take turns, with several calls each if they are short."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    calls: dict[str, Product] = dict.fromkeys(SETTINGS, lambda: torch.mm(a, b))
    calls["onednn"] = lambda: linear(a, b.t(), None, "none", [], "")
    if b.t().is_contiguous():  # the weight of a forward
        packed = torch.ops.mkldnn._reorder_linear_weight(b.t(), a.shape[0])
        calls["packed"] = lambda: linear(a, packed, None, "none", [], "")
    else:
        del calls["packed"]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    count = 1
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(-2, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            call = calls[name]
            with SETTINGS[name]():
                call()
                start = clock()
                for _ in range(count):
                    call()
                taken = (clock() - start) / count
            if number >= 0:
                seconds[name].append(taken)
            elif name == "torch":
                count = max(1, min(200, int(1e-3 / max(taken, 1e-6))))
    ratios = {
        name: statistics.median(
            mine / base for mine, base in zip(seconds[name], seconds["torch"], strict=True)
        )
        for name in calls
    }
    middle = statistics.median(seconds["torch"])
    gflops = 2e-9 * a.numel() * b.shape[1] / middle
    return {
        "torch_us": round(1e6 * middle, 1),
        "gflops": round(gflops, 1),
        "ours_gflops": round(gflops / ratios["ours"], 1),
        "ours": round(ratios["ours"], 3),
        "onednn": round(ratios["onednn"], 3),
        "packed": round(ratios["packed"], 3) if "packed" in ratios else None,
        "medium": round(ratios["medium"], 3),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of threads (default: 1)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if why := why_unavailable():
        parser.error(f"nothing to compare: {why}")
    rows = []
    shapes = [(*shape, "plain") for shape in SHAPES] + [(*shape, name) for name, shape in LAYOUTS.items()]
    bits = bits_at_medium()
    profiles = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        profiles[threads] = asdict(measured_profile())
        for *sizes, layout in shapes:
            for product, (a, b) in products(*sizes, layout).items():
                shape = "x".join(map(str, sizes)) + ("" if layout == "plain" else f" {layout}")
                figures = measure(a, b, rounds=args.rounds)
                rows.append({"shape": shape, "product": product, "threads": threads} | figures)
    report(
        f"Products of float32 matrices; at medium {bits} bits of a result are right",
        rows,
        settings=vars(args) | {"medium_bits": bits, "profiles": profiles},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
