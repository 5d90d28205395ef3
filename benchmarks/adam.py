"""Time of an Adam step: colossalai's HybridAdam, torch's fused AdamW and the memory bandwidth.

    python benchmarks/adam.py --json benchmarks/results/adam.json

The float32 rows compare HybridAdam with `torch.optim.AdamW(fused=True)`. The mixed rows have bfloat16 weights
and gradients with float32 masters and moments. HybridAdam works in blocks; its two peers make three passes
over memory. The first peer allocates the float32 gradient in each step (`param.grad.float()`), the second
keeps the buffer. Bandwidth counts the bytes that a step must move; a plain `torch.add` is the reference.
`best_ms` is the fastest round: the time without load from other processes.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness.rounds import compare, report, time_rounds
from torch import nn

from colossalai.nn.optimizer import HybridAdam

FLOAT32_BYTES = 28  # an element: the weight and both moments twice, the gradient once
MIXED_BYTES = 28  # master and both moments twice, half a gradient in, half a weight out
ADD_BYTES = 12


def shapes_of(numel: int) -> list[tuple[int, ...]]:
    """Return shapes of a GPT's layers with about `numel` elements: matrices, and small vectors."""
    hidden = 768
    block: list[tuple[int, ...]] = [
        (hidden, 3 * hidden),
        (3 * hidden,),
        (hidden, hidden),
        (hidden,),
        (hidden, 4 * hidden),
        (4 * hidden,),
        (4 * hidden, hidden),
        (hidden,),
    ]
    in_block = sum(torch.Size(shape).numel() for shape in block)
    num_blocks = numel // in_block
    return block * num_blocks + [((numel - num_blocks * in_block) // hidden, hidden)]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Return random parameters with gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


class ThreePasses:
    """An optimizer step in three passes: cast the gradients, step, cast the weights.

    Args:
        params: The half parameters.
        keep: Whether the memory of the float32 gradients is kept over the steps.
    """

    def __init__(self, params: list[nn.Parameter], *, keep: bool) -> None:
        self.params = params
        self.masters = [nn.Parameter(param.detach().float()) for param in params]
        self.keep = keep
        self.optimizer = torch.optim.AdamW(self.masters, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Make the three passes."""
        for param, master in zip(self.params, self.masters, strict=True):
            if self.keep and master.grad is not None:
                master.grad.copy_(param.grad)
            else:
                master.grad = param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
        if not self.keep:
            self.optimizer.zero_grad()


def rows_of(
    steps: dict[str, Callable[[], Any]], *, bytes_of: dict[str, int], numel: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each step; the first one is the baseline."""
    times = time_rounds(steps, rounds=args.rounds, warmup=args.warmup)
    rows = compare(times, baseline=next(iter(steps)))
    best = {name: 1e3 * min(seconds) for name, seconds in times.items()}
    for row in rows:
        name = row["variant"]
        row["best_ms"] = round(best[name], 3)
        row["best_ratio"] = round(best[name] / best[next(iter(steps))], 4)
        row["best_gb_per_s"] = round(bytes_of[name] * numel / best[name] / 1e6, 2)
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=50_000_000, help="parameters (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = shapes_of(args.numel)
    numel = sum(torch.Size(shape).numel() for shape in shapes)

    terms = torch.randn(3, numel).unbind()
    theirs, mine = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    steps = {
        "torch AdamW(fused)": torch.optim.AdamW(theirs, fused=True).step,
        "HybridAdam": HybridAdam(mine, weight_decay=1e-2).step,
        "streaming add": lambda: torch.add(terms[0], terms[1], out=terms[2]),
    }
    sizes = {"torch AdamW(fused)": FLOAT32_BYTES, "HybridAdam": FLOAT32_BYTES, "streaming add": ADD_BYTES}
    rows = [{"dtype": "float32"} | row for row in rows_of(steps, bytes_of=sizes, numel=numel, args=args)]
    del steps, theirs, mine

    copies = [parameters(shapes, torch.bfloat16) for _ in range(3)]
    steps = {
        "three passes": ThreePasses(copies[0], keep=False).step,
        "three passes, kept buffer": ThreePasses(copies[1], keep=True).step,
        "HybridAdam": HybridAdam(copies[2], weight_decay=1e-2).step,
    }
    sizes = dict.fromkeys(steps, MIXED_BYTES)
    rows += [{"dtype": "bfloat16"} | row for row in rows_of(steps, bytes_of=sizes, numel=numel, args=args)]
    for other in copies[1:]:
        assert all(torch.equal(x, y) for x, y in zip(copies[0], other, strict=True)), "results differ"
    report("An Adam step; ratios to the first row of a dtype", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
