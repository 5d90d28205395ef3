"""Splits of items into parts: even ones, and those that no other split beats."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colossalai.pipeline.stages._partition import (
    even_parts,
    measure_weights,
    parameter_weights,
    partition_balanced,
    partition_uniform,
    parts_of,
    stages_of,
)

pytestmark = pytest.mark.unit


def in_order(by_rank):
    """Put parts back in order: chunk c of rank r is part c * ranks + r."""
    return [parts[chunk] for chunk in range(len(by_rank[0])) for parts in by_rank]


def heaviest(weights, parts):
    return max(sum(weights[start:end]) for start, end in parts)


def every_split(num_items, num_parts):
    for cuts in combinations(range(1, num_items), num_parts - 1):
        yield list(pairwise([0, *cuts, num_items]))


@pytest.mark.parametrize(
    ("num_items", "size", "chunks", "expected"),
    [
        (8, 2, 1, [[(0, 4)], [(4, 8)]]),
        (8, 2, 2, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (7, 2, 1, [[(0, 3)], [(3, 7)]]),
        (3, 1, 1, [[(0, 3)]]),
    ],
)
def test_uniform(num_items, size, chunks, expected):
    assert partition_uniform(num_items, size, chunks) == expected


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_uniform_covers_all_items_evenly(size, chunks, more):
    num_items = size * chunks + more
    parts = in_order(partition_uniform(num_items, size, chunks))
    assert [item for start, end in parts for item in range(start, end)] == list(range(num_items))
    lengths = [end - start for start, end in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 3), st.integers(1, 2))
def test_balanced_is_the_best_of_all_splits(weights, size, chunks):
    num_parts = size * chunks
    if len(weights) < num_parts:
        with pytest.raises(ValueError, match="cannot be split"):
            partition_balanced(weights, size, chunks)
        return
    parts = in_order(partition_balanced(weights, size, chunks))
    splits = list(every_split(len(weights), num_parts))
    assert parts in splits
    least = min(heaviest(weights, split) for split in splits)
    assert heaviest(weights, parts) == least

    def squares(split):
        return sum(sum(weights[a:b]) ** 2 for a, b in split), sum((b - a) ** 2 for a, b in split)

    assert squares(parts) == min(squares(s) for s in splits if heaviest(weights, s) == least)


def test_balanced_evens_out_what_the_heaviest_part_leaves_open():
    # (2, 4) and (1, 5) reach the minimum of 9, too
    assert in_order(partition_balanced([9, 1, 1, 1, 1, 1, 1], 3, 1)) == [(0, 1), (1, 4), (4, 7)]
    assert in_order(partition_balanced([0] * 6, 3, 1)) == [(0, 2), (2, 4), (4, 6)]


def test_balanced_takes_fractions():
    assert in_order(partition_balanced([0.1, 0.2, 0.3, 0.6], 2, 1)) == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_uniform(3, 2, 2), "3 items cannot be split into 4 parts"),
        (lambda: partition_uniform(3, 0, 1), "pipeline_parallel_size is 0"),
        (lambda: partition_balanced([1, 2], 1, 0), "num_chunks is 0"),
        (lambda: partition_balanced([1, -1, 2], 2, 1), "weight 1 is -1"),
        (lambda: partition_balanced([1, float("nan")], 2, 1), "weight 1 is nan"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_placement():
    assert [stages_of(6, rank, 3) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [stages_of(6, rank, 3, placement="v") for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert parts_of(even_parts(8, 4), 0, 2, placement="v") == [(0, 2), (6, 8)]


def test_weights_of_layers():
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)]
    assert parameter_weights(layers) == [9, 0, 3]


def test_measured_weights_follow_the_work():
    layers = [nn.Linear(8, 256), nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)]), nn.Linear(256, 2)]
    weights = measure_weights(layers, torch.randn(64, 8))
    assert len(weights) == 3
    assert weights[1] == max(weights)
    assert min(weights) > 0
    assert all(param.grad is None for layer in layers for param in layer.parameters())
