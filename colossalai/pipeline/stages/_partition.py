"""Partitions of items (layers, blocks) into stages: contiguous, evenly by count or optimal by weight.

With several chunks per rank the items are split into as many parts as there are chunks on all ranks, and part
`chunk * ranks + rank` goes to `rank`: consecutive parts are on consecutive ranks (Megatron-LM, 2104.04473).
"""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

Part = tuple[int, int]
Placement = Literal["loop", "v"]


def partition_uniform(num_items: int, pipeline_parallel_size: int, num_chunks: int) -> list[list[Part]]:
    """Split items into parts whose numbers of items differ by at most one.

    The longer parts are last: early stages keep the activations of more microbatches.

    Args:
        num_items: Number of items.
        pipeline_parallel_size: Number of pipeline ranks.
        num_chunks: Number of parts of each rank.

    Returns:
        For each rank its parts (start, end), `end` excluded, in the order of the items.

    Raises:
        ValueError: The items are fewer than the parts.
    """
    num_parts = _num_parts(num_items, pipeline_parallel_size, num_chunks)
    return _by_rank(even_parts(num_items, num_parts), pipeline_parallel_size)


def partition_balanced(
    weights: Sequence[float], pipeline_parallel_size: int, num_chunks: int
) -> list[list[Part]]:
    """Split items so that the heaviest part is as light as a contiguous split allows.

    The parts of all ranks and chunks count, since the slowest stage sets the pace of a pipeline. Among the
    splits that reach the minimum, the one with the least sum of squares is taken, of weights, then of counts.

    Args:
        weights: A weight for each item, not negative: its parameters, or its running time (see
            `measure_weights`).
        pipeline_parallel_size: Number of pipeline ranks.
        num_chunks: Number of parts of each rank.

    Returns:
        For each rank its parts (start, end), `end` excluded, in the order of the items.

    Raises:
        ValueError: The items are fewer than the parts, or a weight is negative or not finite.
    """
    num_parts = _num_parts(len(weights), pipeline_parallel_size, num_chunks)
    return _by_rank(balanced_parts(weights, num_parts), pipeline_parallel_size)


def even_parts(num_items: int, num_parts: int) -> list[Part]:
    """Return the parts of `partition_uniform` in the order of the items."""
    size, longer = divmod(num_items, num_parts)
    sizes = [size + (part >= num_parts - longer) for part in range(num_parts)]
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def balanced_parts(weights: Sequence[float], num_parts: int) -> list[Part]:
    """Return the parts of `partition_balanced` in the order of the items."""
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight {index} is {weight}: weights must be finite and not negative")
    sums = [0, *accumulate(weights)]
    return _least_squares(sums, num_parts, limit=_least_maximum(sums, num_parts))


def parts_of(
    parts: Sequence[Part], rank: int, num_ranks: int, *, placement: Placement = "loop"
) -> list[Part]:
    """Return the parts of a rank, in the order of the items; see `stages_of`."""
    return [parts[stage] for stage in stages_of(len(parts), rank, num_ranks, placement=placement)]


def stages_of(num_stages: int, rank: int, num_ranks: int, *, placement: Placement = "loop") -> list[int]:
    """Return the stages of a rank, in ascending order.

    Args:
        num_stages: Number of stages, a multiple of `num_ranks`.
        rank: The pipeline rank.
        num_ranks: Number of pipeline ranks.
        placement: "loop": rank r holds r, r + ranks, r + 2 ranks, ... "v": the order of the ranks is reversed
            in every second round, so that neighbouring stages are on the same rank at the turns
            (zero-bubble ZB-V, 2401.10241).
    """
    stages = []
    for first in range(0, num_stages, num_ranks):
        turns = placement == "v" and (first // num_ranks) % 2 == 1
        stages.append(first + (num_ranks - 1 - rank if turns else rank))
    return stages


def parameter_weights(layers: Iterable[nn.Module]) -> list[float]:
    """Return the number of parameters of each layer, as weights for a split."""
    return [sum(param.numel() for param in layer.parameters()) for layer in layers]


def measure_weights(layers: Iterable[nn.Module], sample: Any, *, repeats: int = 5) -> list[float]:
    """Return the median seconds of forward and backward of each layer, as weights for a split.

    Gradients of the layers are dropped.

    Args:
        layers: The layers; each takes the output of the one before.
        sample: The input of the first one.
        repeats: Number of timed runs of each layer, after one run to warm up.
    """
    weights = []
    for layer in layers:
        seconds = []
        for _ in range(repeats + 1):
            elapsed, output = _timed(layer, sample)
            seconds.append(elapsed)
        weights.append(float(np.median(seconds[1:])))
        layer.zero_grad(set_to_none=True)
        sample = output
    return weights


def _timed(layer: nn.Module, sample: Any) -> tuple[float, Any]:
    """Run a layer forward and backward once; return the seconds and its detached output."""
    given = tree_map(_as_leaf, sample)
    _wait()
    start = time.perf_counter()
    output = layer(given)
    outputs = torch.utils._pytree.tree_leaves(output)
    sources = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if sources:
        torch.autograd.backward(sources, [torch.ones_like(leaf) for leaf in sources])
    _wait()
    elapsed = time.perf_counter() - start
    return elapsed, tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _num_parts(num_items: int, pipeline_parallel_size: int, num_chunks: int) -> int:
    for name, count in (("pipeline_parallel_size", pipeline_parallel_size), ("num_chunks", num_chunks)):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    num_parts = pipeline_parallel_size * num_chunks
    if num_items < num_parts:
        raise ValueError(
            f"{num_items} items cannot be split into {num_parts} parts ({pipeline_parallel_size} pipeline "
            f"ranks x {num_chunks} chunks): each part needs one at least; use fewer ranks or chunks"
        )
    return num_parts


def _by_rank(parts: Sequence[Part], num_ranks: int) -> list[list[Part]]:
    return [parts_of(parts, rank, num_ranks) for rank in range(num_ranks)]


def _least_maximum(sums: Sequence[float], num_parts: int) -> float:
    """Return the least possible weight of the heaviest part, given the running sums of the weights."""
    num_items = len(sums) - 1
    # best[end]: for items[:end] in the number of parts so far.
    best: list[float] = [sums[end] if end else math.inf for end in range(num_items + 1)]
    for num_before in range(1, num_parts):
        best = [
            min((max(best[cut], sums[end] - sums[cut]) for cut in range(num_before, end)), default=math.inf)
            for end in range(num_items + 1)
        ]
    return best[num_items]


def _least_squares(sums: Sequence[float], num_parts: int, *, limit: float) -> list[Part]:
    """Return the most even split without a part heavier than `limit`."""
    num_items = len(sums) - 1
    impossible = (math.inf, math.inf)

    def squares(start: int, end: int) -> tuple[float, float]:
        weight = sums[end] - sums[start]
        return (weight * weight, float((end - start) ** 2)) if weight <= limit else impossible

    best = [squares(0, end) if end else impossible for end in range(num_items + 1)]
    cuts: list[list[int]] = []
    for num_before in range(1, num_parts):
        found, at = [impossible] * (num_items + 1), [0] * (num_items + 1)
        for end in range(num_before + 1, num_items + 1):
            for cut in range(num_before, end):
                last = squares(cut, end)
                total = (best[cut][0] + last[0], best[cut][1] + last[1])
                if total < found[end]:
                    found[end], at[end] = total, cut
        best = found
        cuts.append(at)
    bounds = [num_items]
    for at in reversed(cuts):
        bounds.append(at[bounds[-1]])
    bounds.append(0)
    bounds.reverse()
    return list(pairwise(bounds))
