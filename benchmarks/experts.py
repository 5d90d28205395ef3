"""Computation of the experts of one rank on one core: transformers' implementations and ours, on one module.

    python benchmarks/experts.py --json benchmarks/results/experts.json

The module is `MixtralExperts` of transformers, with a gated pair for each expert: `gate_up_proj` (E, 2I, H)
and `down_proj` (E, H, I). A step is forward and backward, with gradients of the tokens, of the routing
weights and of both parameters; a token has two choices. "eager", "grouped_mm" and "batched_mm" are the
library's own (`config._experts_implementation`); "batched_mm" copies a matrix for each row and runs where
these copies take at most 48 MiB. "colossalai" sorts the rows by expert, calls `grouped_linear` twice with the
module's own gate in between, and adds the results of a token in the order of its choices.

- Routing: "uniform", "zipf" (probability of the n-th expert proportional to 1/n), and "one" (all choices are
  the same expert). It is drawn for each step, outside the timed region: in training, the number of rows per
  expert changes from step to step.
- Times are CPU times of the thread. `ratio` is relative to the library's implementation with the smallest
  median and the same products: torch's own or, in float32, those of a job with `matmul="onednn"`.
- `peak_mib` is counted: the most live bytes of all tensors of a step, gradients included.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from harness.memory import PeakBytes
from harness.rounds import compare, report, time_rounds
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from colossalai.kernel import onednn_products, torch_products, why_unavailable
from colossalai.nn.layer.moe import dispatch_here, grouped_linear

NUM_CHOICES = 2
MOST_COPIED = 48 << 20  # bytes that "batched_mm" may copy
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTINGS = ("uniform", "zipf", "one")
PEERS = ("eager", "grouped_mm", "batched_mm")


def draw_routing(kind: str, num_tokens: int, num_experts: int) -> Tensor:
    """Return the experts that tokens choose, (tokens, choices)."""
    if kind == "one":
        return torch.zeros(num_tokens, NUM_CHOICES, dtype=torch.int64)
    chances = torch.ones(num_experts) if kind == "uniform" else 1 / torch.arange(1, num_experts + 1)
    return torch.multinomial(chances.expand(num_tokens, -1), NUM_CHOICES)


def by_grouped_linear(module: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the output of the module, computed with `grouped_linear`."""

    def compute(rows: Tensor, sizes: Sequence[int]) -> Tensor:
        inner = module._apply_gate(grouped_linear(rows, module.gate_up_proj, sizes))
        return grouped_linear(inner, module.down_proj, sizes)

    return dispatch_here(hidden, experts, weights, compute, num_experts=module.num_experts)


class Cell:
    """A module, its tokens and the routing of the next step.

    Args:
        size: Experts, hidden size, intermediate size.
        dtype: Data type of parameters and tokens.
        routing: Distribution of the tokens over the experts.
        num_tokens: Number of tokens.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype, routing: str, num_tokens: int) -> None:
        self.num_experts, self.hidden_size, intermediate_size = size
        config = MixtralConfig(
            num_local_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=intermediate_size,
        )
        self.module = MixtralExperts(config)
        for param in self.module.parameters():
            nn.init.normal_(param, std=self.hidden_size**-0.5)
        self.module.to(dtype)
        self.hidden = torch.randn(num_tokens, self.hidden_size).to(dtype).requires_grad_()
        self.weights = torch.rand(num_tokens, NUM_CHOICES).to(dtype).requires_grad_()
        self.grad = torch.randn(num_tokens, self.hidden_size).to(dtype)
        self.routing = routing
        self.redraw()

    def redraw(self) -> None:
        """Draw a new routing."""
        self.experts = draw_routing(self.routing, len(self.hidden), self.num_experts)

    @contextmanager
    def drawn(self, products: AbstractContextManager[None]) -> Iterator[None]:
        """Set a new routing and the library of the matrix products around a step."""
        self.redraw()
        with products:
            yield

    def forward(self, variant: str) -> Tensor:
        """Return the output of a variant."""
        if variant == "colossalai":
            return by_grouped_linear(self.module, self.hidden, self.experts, self.weights)
        self.module.config._experts_implementation = variant
        output: Tensor = self.module(self.hidden, self.experts, self.weights)
        return output

    def step(self, variant: str) -> list[Tensor]:
        """Run forward and backward; return the output and the gradients."""
        parts = [self.hidden, self.weights, *self.module.parameters()]
        for part in parts:
            part.grad = None
        output = self.forward(variant)
        output.backward(self.grad)
        return [output.detach(), *(part.grad for part in parts if part.grad is not None)]

    def variants(self) -> list[str]:
        """Return the names of the variants that run here."""
        num_rows = len(self.hidden) * NUM_CHOICES
        copied = num_rows * self.module.gate_up_proj[0].nbytes
        return [*(name for name in PEERS if name != "batched_mm" or copied <= MOST_COPIED), "colossalai"]

    def require_agreement(self) -> None:
        """Raise an error if ours differs from "eager" by more than rounding."""
        tolerance = 1e-4 if self.grad.dtype == torch.float32 else 5e-2
        for found, truth in zip(self.step("colossalai"), self.step("eager"), strict=True):
            error = (found - truth).abs().max() / truth.abs().max()
            if not error < tolerance:
                raise RuntimeError(f"colossalai differs from eager by {error:.1e}")


def rows_of(cell: Cell, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all variants of a cell."""
    cell.require_agreement()
    steps: dict[str, Callable[[], Any]] = {}
    around: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    replaces = cell.grad.dtype == torch.float32 and why_unavailable() is None
    for name in cell.variants():
        for products in ("torch", "onednn") if replaces else ("torch",):
            key = f"{name} {products}"
            steps[key] = lambda name=name: cell.step(name)
            around[key] = lambda products=products: cell.drawn(
                torch_products() if products == "torch" else nullcontext()
            )
    with onednn_products() if replaces else nullcontext():
        times = time_rounds(
            steps, rounds=args.rounds, warmup=args.warmup, around=around, clock=time.thread_time
        )
    found = []
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for products in ("torch", "onednn") if replaces else ("torch",):
        alike = {name: seconds for name, seconds in times.items() if name.endswith(products)}
        best = min((name for name in alike if not name.startswith("colossalai")), key=medians.__getitem__)
        for row in compare(alike, baseline=best):
            name, _ = row.pop("variant").split()
            for part in (cell.hidden, cell.weights, *cell.module.parameters()):
                part.grad = None
            with PeakBytes() as peak:
                cell.step(name)
            found.append(
                {"variant": name, "products": products, **row, "peak_mib": round(peak.peak / 2**20, 2)}
            )
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["8x64x64", "8x512x512", "64x64x64", "64x256x256", "256x64x64"],
        help="experts x hidden size x intermediate size (default: %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of two choices (default: %(default)s)")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=list(TYPES))
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS)
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    for size in args.sizes:
        for dtype in args.types:
            for routing in args.routings:
                cell = Cell([int(part) for part in size.split("x")], TYPES[dtype], routing, args.tokens)
                label = {"size": size, "type": dtype, "routing": routing}
                rows += [{**label, **row} for row in rows_of(cell, args)]
                gc.collect()
    report(
        f"Experts, forward and backward, {args.tokens * NUM_CHOICES} rows, {args.threads} threads",
        rows,
        settings=vars(args),
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
