"""Chunk layout and search: every parameter lies once, in order, and no size that is tried wastes less."""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from colossalai.context import Mesh
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.tensor import cut_dims, set_spec
from colossalai.zero.gemini import (
    ChunkSizes,
    Packing,
    ParameterKind,
    log_search,
    pack,
    search,
    search_chunk_configuration,
    search_groups,
)

pytestmark = pytest.mark.unit

MB = 2**20
MOST_WASTE = 0.05

numels_lists = st.lists(st.integers(0, 60), max_size=30)
num_ranks_values = st.integers(1, 5)


def check(
    packing: Packing, numels: Sequence[int], num_ranks: int, alone: frozenset[int] = frozenset()
) -> None:
    """Assert what holds for every packing."""
    lying = [param for chunk in packing.chunks for param in chunk.params]
    assert sorted(lying) == list(range(len(numels)))
    assert [chunk.params[0] for chunk in packing.chunks] == sorted(
        chunk.params[0] for chunk in packing.chunks
    )
    shared = []
    for chunk in packing.chunks:
        ends = [start + numels[param] for param, start in zip(chunk.params, chunk.starts, strict=True)]
        assert chunk.starts == (0, *ends[:-1])  # one behind the other: no overlap, no hole
        assert chunk.num_used == ends[-1] <= chunk.size
        assert chunk.size % num_ranks == 0 < chunk.size
        first = chunk.params[0]
        if numels[first] > packing.chunk_size or first in alone:
            assert len(chunk.params) == 1
            assert chunk.size - max(numels[first], 1) < num_ranks
        else:
            assert chunk.size == packing.chunk_size
            shared.append(chunk)
    in_order = [param for chunk in shared for param in chunk.params]
    assert in_order == sorted(in_order)
    for chunk, later in pairwise(shared):  # closed only because the next does not fit
        assert chunk.num_used + numels[later.params[0]] > chunk.size
    assert packing.num_used == sum(numels)
    assert packing.num_wasted == sum(chunk.size for chunk in packing.chunks) - sum(numels)


@given(numels_lists, st.integers(1, 20), num_ranks_values, st.sets(st.integers(0, 29)))
def test_every_parameter_lies_once_in_order_and_fits(
    numels: list[int], section: int, num_ranks: int, alone: set[int]
) -> None:
    packing = pack(numels, section * num_ranks, num_ranks=num_ranks, alone=alone)
    assert packing.chunk_size == section * num_ranks
    check(packing, numels, num_ranks, frozenset(alone))


def test_a_large_parameter_does_not_part_its_neighbours() -> None:
    packing = pack([3, 100, 2, 4, 3], 8, num_ranks=2)
    assert [(chunk.params, chunk.starts, chunk.size) for chunk in packing.chunks] == [
        ((0, 2), (0, 3), 8),
        ((1,), (0,), 100),
        ((3, 4), (0, 4), 8),
    ]
    assert (packing.num_used, packing.num_wasted) == (112, 4)


@settings(max_examples=300)
@given(
    numels_lists,
    st.integers(1, 40),
    st.integers(0, 60),
    st.integers(1, 12),
    num_ranks_values,
    st.booleans(),
)
@example([40, 40], 33, 30, 1, 1, False)  # at first each has a chunk of its own, then both fit
@example([0, 0, 0], 1, 0, 1, 3, True)
@example([70, 80, 90], 1, 5, 2, 4, True)  # nothing fits
@example([], 1, 5, 2, 4, True)
def test_no_candidate_wastes_less(
    numels: list[int], least: int, extent: int, interval: int, num_ranks: int, filters: bool
) -> None:
    sizes = ChunkSizes(least, extent, interval)
    packing = search(numels, sizes, num_ranks=num_ranks, filters_outliers=filters)
    candidates = every_candidate(least, extent, interval, num_ranks)
    assert sizes.candidates(num_ranks).tolist() == candidates
    alone = own_chunks(numels, candidates, filters)
    check(packing, numels, num_ranks, alone)
    sharing = sum(numel for position, numel in enumerate(numels) if position not in alone)
    if len(alone) < len(numels) and sharing <= candidates[0]:
        assert packing.chunk_size == max(-(-sharing // num_ranks), 1) * num_ranks
        assert len(packing.chunks) == 1 + len(alone)
        return
    tried = [pack(numels, size, num_ranks=num_ranks, alone=alone) for size in candidates]
    best = min(tried, key=lambda packing: (packing.num_wasted, -packing.chunk_size))
    assert packing == best


def every_candidate(least: int, extent: int, interval: int, num_ranks: int) -> list[int]:
    """Return the multiples of the interval in the range, or the first behind it, rounded up to ranks."""
    first = next(size for size in range(least, least + interval) if size % interval == 0)
    multiples = range(first, max(least + extent, first) + 1, interval)
    return [
        next(size for size in range(each, each + num_ranks) if size % num_ranks == 0) for each in multiples
    ]


def own_chunks(numels: list[int], candidates: list[int], filters: bool) -> frozenset[int]:
    """Return the parameters that never share a chunk: larger than all candidates, or outliers."""
    values = torch.tensor(numels, dtype=torch.float64)
    bound = float(candidates[-1])
    if filters and numels:
        bound = min(bound, max(candidates[0], float(values.mean() + 3 * values.std(correction=0))))
    return frozenset(position for position, numel in enumerate(numels) if numel > bound)


def test_outliers_have_chunks_of_their_own_unless_told_otherwise() -> None:
    numels = [60, *[10] * 14]
    sizes = ChunkSizes(least=25, extent=75, interval=5)
    filtered = search(numels, sizes)
    assert (filtered.chunk_size, [len(chunk.params) for chunk in filtered.chunks]) == (70, [1, 7, 7])
    whole = search(numels, sizes, filters_outliers=False)
    assert (whole.chunk_size, [len(chunk.params) for chunk in whole.chunks]) == (100, [5, 10])
    assert filtered.num_wasted == whole.num_wasted == 0


def test_candidates_are_tried_in_blocks_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    numels = [17, 40, 9, 33, 25, 8, 61, 12, 5] * 4
    sizes = ChunkSizes(least=30, extent=90, interval=1)
    whole = search(numels, sizes, num_ranks=2)
    monkeypatch.setattr("colossalai.zero.gemini._search._BLOCK", 7)
    assert search(numels, sizes, num_ranks=2) == whole


def test_groups_have_sizes_of_their_own_and_positions_among_all() -> None:
    sizes = ChunkSizes(least=4, extent=8, interval=1)
    groups = search_groups([6, 3, 6, 3, 6, 3], list("ababab"), sizes, num_ranks_of={"a": 2, "b": 3}.get)
    assert [(group.key, group.packing.chunk_size) for group in groups] == [("a", 6), ("b", 9)]
    assert [chunk.params for group in groups for chunk in group.packing.chunks] == [
        (0,),
        (2,),
        (4,),
        (1, 3, 5),
    ]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def gpt2(num_layers: int, hidden: int, heads: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=num_layers, n_embd=hidden, n_head=heads))


def sized(model_class: Any, config_class: Any, **options: Any) -> Callable[[int, int, int], nn.Module]:
    """Return what makes a model of transformers of some layers, hidden size and heads."""
    return lambda num_layers, hidden, heads: model_class(
        config_class(
            num_hidden_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            **options,
        )
    )


bert = sized(BertForMaskedLM, BertConfig)
vit = sized(ViTForImageClassification, ViTConfig, num_labels=1000)


def resnet(depths: list[int], kind: str) -> nn.Module:
    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    return ResNetForImageClassification(
        ResNetConfig(depths=depths, layer_type=kind, hidden_sizes=widths, num_labels=1000)
    )


MODELS = {
    "gpt2": (gpt2, (12, 768, 12)),
    "gpt2-medium": (gpt2, (24, 1024, 16)),
    "gpt2-xl": (gpt2, (48, 1600, 25)),
    "bert-base": (bert, (12, 768, 12)),
    "bert-large": (bert, (24, 1024, 16)),
    "vit-small": (vit, (12, 384, 6)),
    "vit-base": (vit, (12, 768, 12)),
    "vit-large": (vit, (24, 1024, 16)),
    "vit-huge": (vit, (32, 1280, 16)),
    "resnet-18": (resnet, ([2, 2, 2, 2], "basic")),
    "resnet-50": (resnet, ([3, 4, 6, 3], "bottleneck")),
    "resnet-152": (resnet, ([3, 8, 36, 3], "bottleneck")),
}


@pytest.mark.parametrize("name", MODELS)
def test_little_is_wasted(name: str) -> None:
    make, shape = MODELS[name]
    model = on_meta(lambda: make(*shape))
    total = sum(param.numel() for param in model.parameters())
    replicas = Mesh({"dp": 4}, rank=0).axis("dp")
    for min_chunk_size_mb in (32, 4, 0.25):
        groups, num_used, num_wasted = search_chunk_configuration(
            model, 32, 1024, min_chunk_size_mb, replicas=replicas
        )
        assert num_used == total
        assert num_wasted < MOST_WASTE * (num_used + num_wasted)
        (group,) = groups
        check(
            group.packing,
            [param.numel() for param in model.parameters()],
            4,
            frozenset(chunk.params[0] for chunk in group.packing.chunks if len(chunk.params) == 1),
        )


def test_gpt2_wastes_what_the_documents_print(capsys: pytest.CaptureFixture[str]) -> None:
    model = on_meta(lambda: gpt2(12, 768, 12))
    _, num_used, num_wasted = search_chunk_configuration(model, 32, 768)
    assert round(num_used / MB, 2) == 118.68
    log_search(0.274, num_used, num_wasted)
    said = [line.partition(" | ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "searching chunk configuration is completed in 0.27 s.",
        "used number: 118.68 MB, wasted number: 0.75 MB",
        "total wasted percentage is 0.63%",
    ]


def test_a_model_without_parameters_has_no_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_chunk_configuration(nn.ReLU(), 32, 1024) == ((), 0, 0)
    log_search(0.0, 0, 0)
    assert "total wasted percentage is 0.00%" in capsys.readouterr().err


def ten_billion_elements() -> nn.Module:
    model = on_meta(lambda: GPT(GPTConfig(num_layers=96, hidden_size=2944, num_attention_heads=32)))
    assert 9.9e9 < sum(param.numel() for param in model.parameters()) < 10.6e9
    return model


def unequal_numels() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    numels: list[int] = torch.randint(0, 2_500_000, (8000,), generator=generator).tolist()
    assert sum(numels) > 9.9e9
    return numels


def effort_of(do: Callable[[], object]) -> tuple[int, int]:
    """Return how many lines of Python run, and how many borders of parameters numpy looks up."""
    num_lines = num_lookups = 0
    tracer, searchsorted = sys.gettrace(), np.searchsorted

    def count_line(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal num_lines
        num_lines += event == "line"
        return count_line

    def count_lookups(borders: Any, values: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_lookups
        num_lookups += np.size(values)
        return searchsorted(borders, values, *args, **options)

    with patch.object(np, "searchsorted", count_lookups):
        sys.settrace(count_line)
        try:
            do()
        finally:
            sys.settrace(tracer)
    return num_lines, num_lookups


def test_ten_billion_elements_take_few_steps() -> None:
    """1156 parameters and 11,398 candidates: 15,000 lookups, as most candidates pack like smaller ones."""
    model = ten_billion_elements()
    num_lines, num_lookups = effort_of(lambda: search_chunk_configuration(model, 32, 2944))
    assert 1000 < num_lines < 150_000
    assert 1000 < num_lookups < 25_000


def test_thousands_of_unequal_parameters_take_few_steps() -> None:
    """8000 parameters and 32,769 candidates: each candidate looks up the end of each of its chunks."""
    numels, sizes = unequal_numels(), ChunkSizes.in_mb()
    num_lines, num_lookups = effort_of(lambda: search(numels, sizes, num_ranks=8))
    assert 1000 < num_lines < 150_000
    assert 10_000 < num_lookups < 10_000_000


@pytest.mark.long
def test_a_search_takes_less_than_a_minute_of_processor_time() -> None:
    """The measurement of time: 0.1 s on one slow core."""
    model, numels, sizes = ten_billion_elements(), unequal_numels(), ChunkSizes.in_mb()
    begun = time.process_time()
    search_chunk_configuration(model, 32, 2944)
    search(numels, sizes, num_ranks=8)
    assert time.process_time() - begun < 60.0


def test_fractions_of_a_mb() -> None:
    sizes = ChunkSizes.in_mb(search_range_mb=0.5, search_interval_byte=8, min_chunk_size_mb=0.001)
    assert sizes == ChunkSizes(least=1049, extent=MB // 2, interval=8)
    groups, _, num_wasted = search_chunk_configuration(on_meta(lambda: nn.Linear(100, 50)), 0.01, 8, 0.001)
    assert (groups[0].packing.chunk_size, num_wasted) == (5056, 6)


def mixed_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 8))
    model[2].bias.requires_grad_(False)
    return model


def test_groups_are_by_dtype_cut_and_being_trained() -> None:
    model = mixed_model()
    mesh = Mesh({"dp": 4, "tp": 2}, rank=0)
    set_spec(model[0].weight, cut_dims((16, 8), [("tp",), ()], mesh))
    groups, num_used, num_wasted = search_chunk_configuration(model, 1, 8, replicas=mesh.axis("dp"))
    named = {group.key: [chunk.params for chunk in group.packing.chunks] for group in groups}
    assert named == {
        ParameterKind(torch.float32, ("tp",), True): [(0,)],
        ParameterKind(torch.float32, (), True): [(1, 4)],
        ParameterKind(torch.bfloat16, (), True): [(2, 3)],
        ParameterKind(torch.float32, (), False): [(5,)],
    }
    assert (num_used, num_wasted) == (3 * 72, 0)


def test_chunks_of_experts_are_cut_over_those_that_share_them() -> None:
    model = nn.Linear(7, 1, bias=False)
    mesh = Mesh({"edp": 2, "ep": 3}, rank=0)
    set_spec(model.weight, cut_dims((3, 7), [("ep",), ()], mesh))
    groups, _, _ = search_chunk_configuration(model, 1, 8, replicas=mesh.axis(("edp", "ep")))
    assert groups[0].packing.chunk_size == 8  # a multiple of 2, not of 6


def test_strict_data_parallelism_refuses_a_parameter_that_is_cut() -> None:
    model = mixed_model()
    search_chunk_configuration(model, 1, 8, strict_ddp_flag=True)
    set_spec(model[0].weight, cut_dims((16, 8), [("tp",), ()], Mesh({"tp": 2}, rank=0)))
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is cut over tp: .*give False"):
        search_chunk_configuration(model, 1, 8, strict_ddp_flag=True)


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert search_chunk_configuration(model, 1, 8)[1] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (-1, 1024),
            r"search_range_mb=-1 must be a number of 0 or more: .*2\*\*20 elements.* the default is 32",
        ),
        ((float("nan"), 1024), r"search_range_mb=nan must be"),
        (("32", 1024), r"search_range_mb='32' must be"),
        ((32, 0), r"search_interval_byte=0 must be an integer of 1 or more: .*give the hidden size"),
        ((32, -5), r"search_interval_byte=-5 must be"),
        ((32, 0.5), r"search_interval_byte=0\.5 must be"),
        ((32, 1024, 0), r"min_chunk_size_mb=0 must be a number above 0"),
        ((32, 1024, -32), r"min_chunk_size_mb=-32 must be"),
        ((32, 1024, 1e-9), r"min_chunk_size_mb=1e-09 must be .* 1 element"),
        ((32, 1024, float("inf")), r"min_chunk_size_mb=inf must be"),
    ],
)
def test_bad_ranges_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_chunk_configuration(nn.Linear(2, 2), *arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([1], 0), r"chunk_size=0 cannot be cut into equal sections for num_ranks=1"),
        (
            lambda: pack([1], 6, num_ranks=4),
            r"chunk_size=6 cannot be cut .* num_ranks=4: give a positive multiple",
        ),
        (lambda: pack([1], 6, num_ranks=0), r"num_ranks=0"),
        (lambda: pack([1, -2], 6), r"numels\[1\]=-2 is negative"),
        (lambda: search([1, -2], ChunkSizes(1, 0, 1)), r"numels\[1\]=-2 is negative"),
        (lambda: search([1], ChunkSizes(1, 0, 1), num_ranks=0), r"num_ranks=0 must be 1 or more"),
        (lambda: ChunkSizes(0, 0, 1), r"least=0, extent=0, interval=1 are no range of chunk sizes: give"),
        (lambda: ChunkSizes(1, -1, 1), r"extent=-1"),
        (lambda: ChunkSizes(1, 0, 0), r"interval=0"),
    ],
)
def test_impossible_layouts_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
