"""Embeddings with a cached table in memory: time of a step, and rows moved, with and without prefetch.

    python benchmarks/cached_embedding_step.py --json benchmarks/results/cached_embedding_step.json

A step is the forward of bags of ids by a power law, their backward and SGD, on one thread of torch. Steps of
`nn.EmbeddingBag` and of cached bags are timed in rounds, by the clock and by the processor time of all
threads: prefetch has a thread of its own. Products of matrices stand for the layers of a model. The second
table has the rows that enter in a step, and their ratio to the fewest possible (Belady: all batches known).
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from harness.rounds import compare, report, time_rounds
from numpy.typing import NDArray
from torch import Tensor, nn

from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag, EvictionStrategy

IDS_PER_BAG, POWER = 4, 1.05


def draw(args: argparse.Namespace, number: int) -> list[Tensor]:
    """Return batches of ids by a power law, the first rows the most frequent."""
    generator = torch.Generator().manual_seed(0)
    share = frequencies(args).cumsum_(0)
    share /= share[-1].clone()
    return [
        torch.searchsorted(
            share, torch.rand(args.bags, IDS_PER_BAG, generator=generator, dtype=torch.float64)
        )
        for _ in range(number)
    ]


def frequencies(args: argparse.Namespace) -> Tensor:
    """Return how often each row is used, in any unit."""
    return torch.arange(1, args.rows + 1, dtype=torch.float64) ** -POWER


def cached(args: argparse.Namespace, ratio: float, strategy: EvictionStrategy) -> CachedEmbeddingBag:
    """Return a bag whose cache is full of the most frequent rows."""
    return CachedEmbeddingBag(
        args.rows,
        args.dim,
        mode="sum",
        sparse=True,
        cache_ratio=ratio,
        warmup_ratio=1.0,
        evict_strategy=strategy,
        ids_freq_mapping=frequencies(args) if strategy is not EvictionStrategy.LFU else None,
    )


def stepper(bag: nn.Module, batches: Iterable[Tensor], *, products: int) -> Callable[[], None]:
    """Return a function that takes a batch and makes a step."""
    optimizer, source = torch.optim.SGD(bag.parameters(), lr=0.01), iter(batches)
    square = torch.randn(256, 256)

    def step() -> None:
        output = bag(next(source))
        output.backward(torch.ones_like(output))
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(products):
            square @ square

    return step


def time_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the times of steps."""
    repeats, warmup = 4, 5
    batches = draw(args, repeats * (warmup + args.rounds))
    rows = []
    for products in args.products:
        found = []
        for clock in (time.perf_counter, time.process_time):
            variants = {
                "nn.EmbeddingBag": stepper(
                    nn.EmbeddingBag(args.rows, args.dim, mode="sum", sparse=True), batches, products=products
                )
            }
            for ratio in args.ratios:
                for depth in (None, args.depth):
                    bag = cached(args, ratio, EvictionStrategy.BELADY)
                    loader = batches if depth is None else bag.prefetch(batches, depth=depth)
                    name = f"{100 * ratio:g} %" + ("" if depth is None else f", prefetch {depth}")
                    variants[name] = stepper(bag, loader, products=products)
            times = time_rounds(
                variants, rounds=args.rounds, warmup=warmup, repeats=repeats, timed=repeats - 1, clock=clock
            )
            found.append(compare(times, baseline="nn.EmbeddingBag"))
        for by_clock, by_processor in zip(*found, strict=True):
            rows.append(
                {
                    "variant": by_clock["variant"],
                    "products": products,
                    "step_ms": by_clock["step_ms"],
                    "ratio": by_clock["ratio"],
                    "ratio_quartiles": by_clock["ratio_quartiles"],
                    "processor_ms": by_processor["step_ms"],
                    "processor_ratio": by_processor["ratio"],
                }
            )
    return rows


def least_moves(batches: list[Tensor], num_rows: int, num_slots: int) -> list[int]:
    """Return how many rows enter for each batch if those of the furthest next use leave."""
    all_rows = [batch.unique().numpy() for batch in batches]
    never = len(batches)
    following: list[NDArray[np.int32]] = []  # for each batch the next use of its rows
    next_use = np.full(num_rows, never, dtype=np.int32)
    for step in reversed(range(len(batches))):
        following.append(next_use[all_rows[step]])
        next_use[all_rows[step]] = step
    following.reverse()
    is_cached = np.zeros(num_rows, dtype=bool)
    is_cached[:num_slots] = True
    numbers = []
    for rows, after in zip(all_rows, following, strict=True):
        missing = rows[~is_cached[rows]]
        is_cached[rows] = False  # they stay
        others = np.flatnonzero(is_cached)
        kept = others
        if missing.size:
            kept = others[np.argpartition(next_use[others], num_slots - rows.size)[: num_slots - rows.size]]
        is_cached[others] = False
        is_cached[kept] = True
        is_cached[rows] = True
        next_use[rows] = after
        numbers.append(int(missing.size))
    return numbers


def count_moves(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows that enter in a step, of the middle third of a trace."""
    batches = draw(args, 3 * args.steps)
    part = slice(args.steps, 2 * args.steps)

    def row(
        ratio: float, name: str, depth: int | None, numbers: Iterable[int], best: float
    ) -> dict[str, Any]:
        mean = statistics.mean([*numbers][part])
        return {
            "strategy": name,
            "cache": f"{100 * ratio:g} %",
            "prefetch": depth,
            "rows_in": mean,
            "of_fewest": mean / best if best else None,
        }

    rows = []
    for ratio in args.ratios:
        fewest = least_moves(batches, args.rows, round(ratio * args.rows))
        best = statistics.mean(fewest[part])
        rows.append(row(ratio, "all batches known", None, fewest, best))
        for strategy, depth in (
            *itertools.product(EvictionStrategy, (None,)),
            *((EvictionStrategy.BELADY, depth) for depth in (args.depth, 4 * args.depth, 16 * args.depth)),
        ):
            if strategy is EvictionStrategy.BELADY and depth is None:
                continue  # DATASET
            bag = cached(args, ratio, strategy)
            step = stepper(bag, _loader(bag, batches, depth), products=0)
            for _ in batches:
                step()
            rows.append(row(ratio, strategy.name, depth, bag.num_miss_history, best))
    return rows


def _loader(bag: CachedEmbeddingBag, batches: list[Tensor], depth: int | None) -> Iterator[Tensor]:
    return iter(batches if depth is None else bag.prefetch(batches, depth=depth))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--bags", type=int, default=4096, help="of 4 ids (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.02], help="default: %(default)s")
    parser.add_argument("--depth", type=int, default=4, help="of prefetch (default: %(default)s)")
    parser.add_argument(
        "--products",
        type=int,
        nargs="+",
        default=[0, 30],
        help="of 256 x 256, in a step (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=100, help="of the moves (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    title = f"{args.rows} x {args.dim}, {args.bags} bags of {IDS_PER_BAG} ids: a step, rows that enter"
    rows, moves = time_steps(args), count_moves(args)
    report(title, rows, settings=vars(args), json_file=args.json, more={"moves": moves})


if __name__ == "__main__":
    main()
