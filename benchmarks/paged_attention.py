"""Attention of one token of each sequence to its cache blocks: bags of rows, and alternatives in torch.

    python benchmarks/paged_attention.py --json benchmarks/results/paged_attention.json
    python benchmarks/paged_attention.py --device cuda --batch 32 --length 512 --heads 8

One layer's attention for sequences that add a token each, on one thread. Each call uses the cache of the next
of several layers, as in a step, so that the processor's cache does not hold the data of the previous call.
All variants store the new keys and values first. `bags` is our attention on a CPU, `gathered` ours on other
devices. `gather` copies the blocks together and calls `scaled_dot_product_attention`; `contiguous` calls it
on caches that are not paged, with one length for all sequences. Times are CPU times of the thread, on an
accelerator the times to completion; figures are medians in microseconds. The results of all variants are
compared first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from harness.rounds import report, time_rounds
from torch import Tensor
from torch.nn import functional

from colossalai.inference.paging import AttentionOptions, FloatLayerCache, LayerShape, PagedStep


class Layers:
    """Caches of several layers, paged and contiguous, with the same random content.

    Args:
        dtype: Data type of the caches.
        sizes: Parsed command line.
        block_size: Number of tokens in a block.
    """

    def __init__(self, dtype: torch.dtype, sizes: argparse.Namespace, block_size: int) -> None:
        self.batch, self.heads, self.head_size = sizes.batch, sizes.heads, sizes.head_size
        self.length, self.block_size = sizes.length, block_size
        generator = torch.Generator().manual_seed(0)
        per_sequence = -(-self.length // block_size)
        num_blocks = self.batch * per_sequence
        self.table = torch.randperm(num_blocks, generator=generator).view(self.batch, per_sequence)
        shape = LayerShape(self.heads, self.head_size, self.head_size, dtype)
        device = torch.device(sizes.device)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.paged, self.contiguous = [], []
        for _ in range(sizes.layers):
            cache = FloatLayerCache(shape, num_blocks=num_blocks, block_size=block_size, device=device)
            cache.keys.copy_(random(*cache.keys.shape))
            cache.values.copy_(random(*cache.values.shape))
            self.paged.append(cache)
            self.contiguous.append(self._gathered(cache))
        self.query = random(self.batch, self.heads * sizes.queries_per_head, self.head_size)
        self.key, self.value = (random(self.batch, self.heads, self.head_size) for _ in range(2))
        self.options = AttentionOptions(scale=self.head_size**-0.5)
        self.in_bags, self.in_blocks = (
            PagedStep(
                np.full(self.batch, self.length - 1),
                np.ones(self.batch, np.int64),
                list(self.table.numpy()),
                block_size,
                device,
                gathers=gathers,
            )
            for gathers in (False, True)
        )
        self._next = cycle(range(sizes.layers))

    def _gathered(self, cache: FloatLayerCache) -> tuple[Tensor, Tensor]:
        blocks = self.table.reshape(-1).to(cache.keys.device)
        wide = (self.batch, -1, self.heads, self.head_size)
        keys = cache.keys.index_select(0, blocks).view(self.batch, -1, *cache.keys.shape[1:])
        keys = keys.permute(0, 2, 1, 4, 3).flatten(2, 3)  # (batch, heads, length, head_size)
        values = cache.values.index_select(0, blocks).view(wide).transpose(1, 2).contiguous()
        return keys, values

    def _attend(self, keys: Tensor, values: Tensor) -> Tensor:
        query = self.query.view(self.batch, -1, 1, self.head_size)
        seen = (each[:, :, : self.length] for each in (keys, values))
        return functional.scaled_dot_product_attention(query, *seen, enable_gqa=True).flatten(1, 2)

    def bags(self, layer: int | None = None) -> Tensor:
        """Attend as the engine does on a CPU."""
        cache = self.paged[next(self._next) if layer is None else layer]
        return self.in_bags.attend(cache, self.query, self.key, self.value, self.options)

    def gathered(self, layer: int | None = None) -> Tensor:
        """Attend as the engine does on an accelerator."""
        cache = self.paged[next(self._next) if layer is None else layer]
        return self.in_blocks.attend(cache, self.query, self.key, self.value, self.options)

    def gather(self, layer: int | None = None) -> Tensor:
        """Copy the blocks together, then attend."""
        cache = self.paged[next(self._next) if layer is None else layer]
        cache.write(self.in_bags.places, self.key, self.value)
        return self._attend(*self._gathered(cache))

    def unpaged(self, layer: int | None = None) -> Tensor:
        """Attend over caches in the layout of `scaled_dot_product_attention`."""
        keys, values = self.contiguous[next(self._next) if layer is None else layer]
        keys[:, :, self.length - 1], values[:, :, self.length - 1] = self.key, self.value
        return self._attend(keys, values)


def clock_of_device() -> float:
    """Return the time after all work of the accelerator has completed."""
    torch.accelerator.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("batch", 16, "sequences"),
        ("length", 96, "tokens of each, the new one included"),
        ("heads", 5, "heads of keys and values"),
        ("queries-per-head", 2, "query heads that share one of these"),
        ("head-size", 64, "features of a head"),
        ("layers", 12, "layers whose caches take turns"),
        ("rounds", 300, "rounds that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32], help="tokens of a block")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="types of the cache")
    parser.add_argument("--device", default="cpu", help="device of the caches (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for dtype in args.dtypes:
            for block_size in args.block_sizes:
                layers = Layers(getattr(torch, dtype), args, block_size)
                found = [layers.bags(0), layers.gathered(0), layers.gather(0), layers.unpaged(0)]
                tolerance = 1e-4 if dtype == "float32" else 3e-2
                for each in found[1:]:
                    torch.testing.assert_close(found[0], each, atol=tolerance, rtol=tolerance)
                variants: dict[str, Callable[[], Any]] = {
                    "bags": layers.bags,
                    "gathered": layers.gathered,
                    "gather": layers.gather,
                    "contiguous": layers.unpaged,
                }
                clock = time.thread_time if args.device == "cpu" else clock_of_device
                times = time_rounds(variants, rounds=args.rounds, warmup=20, clock=clock)
                micros = {f"{name}_us": round(1e6 * statistics.median(times[name]), 1) for name in variants}
                rows.append({"dtype": dtype, "block_size": block_size, **micros})
    title = f"Attention of {args.batch} sequences of {args.length} tokens, {args.device}"
    report(title, rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
