"""Paged attention: each token's result is that of its own sequence, computed plainly, in any company."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.inference.paging._attention import (
    BAG_TOKENS,
    AttentionOptions,
    PagedStep,
)
from colossalai.inference.paging._cache import FloatLayerCache, LayerShape
from tests.tiers import soaked

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
ERROR = {torch.float64: 1e-12, torch.float32: 5e-6}


def plainly(query, keys, values, options):
    """Return what the last token sees: `query` is (heads, size), the others (length, heads, size)."""
    shared = query.shape[0] // keys.shape[1]
    keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query, keys) * options.scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    positions = torch.arange(len(keys))
    if options.slopes is not None:
        scores = scores + positions * options.slopes[:, None]
    if options.window:
        scores[:, positions <= len(keys) - 1 - options.window] = -math.inf
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[:, None]), -1)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(keys)], values)


@dataclass
class Sequence:
    """Keys and values of all its tokens so far, and its blocks."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    """Sizes of a layer, what it asks for, and the chunks of each step, by sequence; 0 for none in a step."""

    num_heads: int
    shared: int
    key_size: int
    value_size: int
    block_size: int
    options: dict[str, object]
    chunks: list[list[int]]
    bags_only: bool
    seed: int
    gathers: bool = False


@st.composite
def setups(draw):
    num_sequences = draw(st.integers(1, 6))
    near = st.sampled_from((BAG_TOKENS - 1, BAG_TOKENS, BAG_TOKENS + 1))
    length = st.sampled_from((0, 1, 1, 1, 2)) | near | st.integers(1, 40)
    options = {
        "window": draw(st.none() | st.integers(1, 50)),
        "softcap": draw(st.none() | st.sampled_from((0.5, 5.0))),
        "sinks": draw(st.booleans()),
        "slopes": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options = {"window": options["window"], "softcap": None, "sinks": False, "slopes": False}
    steps = st.lists(length, min_size=num_sequences, max_size=num_sequences)
    return Setup(
        num_heads=draw(st.integers(1, 3)),
        shared=draw(st.integers(1, 3)),
        key_size=draw(st.sampled_from((1, 5, 8, 16))),
        value_size=draw(st.sampled_from((1, 5, 8, 16))),
        block_size=draw(st.sampled_from((1, 2, 4, 16))),
        options=options,
        chunks=draw(st.lists(steps.filter(any), min_size=1, max_size=5)),
        bags_only=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        gathers=draw(st.booleans()),
    )


def run(setup, dtype):
    """Yield for each step the results, those expected, and how many tokens of which sequence they are."""
    generator = torch.Generator().manual_seed(setup.seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_query_heads = setup.num_heads * setup.shared
    options = AttentionOptions(
        scale=0.3,
        window=setup.options["window"],
        softcap=setup.options["softcap"],
        sinks=drawn(num_query_heads) if setup.options["sinks"] else None,
        slopes=drawn(num_query_heads) * 0.1 if setup.options["slopes"] else None,
    )
    total = sum(-(-sum(lengths) // setup.block_size) for lengths in zip(*setup.chunks, strict=True))
    free = np.random.default_rng(setup.seed).permutation(total + 3).tolist()
    shape = LayerShape(setup.num_heads, setup.key_size, setup.value_size, dtype)
    cache = FloatLayerCache(shape, num_blocks=total + 3, block_size=setup.block_size, device=CPU)
    cache.keys.fill_(math.nan)  # who reads what nobody has written finds out
    cache.values.fill_(math.nan)
    sequences = [
        Sequence(drawn(0, setup.num_heads, setup.key_size), drawn(0, setup.num_heads, setup.value_size))
        for _ in setup.chunks[0]
    ]
    for lengths in setup.chunks:
        here = [(each, length) for each, length in zip(sequences, lengths, strict=True) if length]
        starts = [len(each.keys) for each, _ in here]
        queries, keys, values = [], [], []
        for each, length in here:
            queries.append(drawn(length, num_query_heads, setup.key_size))
            keys.append(drawn(length, setup.num_heads, setup.key_size))
            values.append(drawn(length, setup.num_heads, setup.value_size))
            each.keys, each.values = torch.cat((each.keys, keys[-1])), torch.cat((each.values, values[-1]))
            while len(each.blocks) * setup.block_size < len(each.keys):
                each.blocks.append(free.pop())
        step = PagedStep(
            np.array(starts),
            np.array([length for _, length in here]),
            [np.array(each.blocks) for each, _ in here],
            setup.block_size,
            CPU,
            setup.bags_only,
            gathers=setup.gathers,
        )
        found = step.attend(cache, torch.cat(queries), torch.cat(keys), torch.cat(values), options)
        wide = replace(
            options,
            sinks=None if options.sinks is None else options.sinks.double(),
            slopes=None if options.slopes is None else options.slopes.double(),
        )
        expected = [
            plainly(query.double(), each.keys[:end].double(), each.values[:end].double(), wide)
            for (each, _), start, of_chunk in zip(here, starts, queries, strict=True)
            for end, query in enumerate(of_chunk, start + 1)
        ]
        yield found, torch.stack(expected)


def check(setup, dtype):
    for found, expected in run(setup, dtype):
        assert found.dtype == dtype
        assert found.shape == expected.shape
        assert (found.double() - expected).abs().max() <= ERROR[dtype]


@given(setups(), st.sampled_from((torch.float64, torch.float32)))
@settings(max_examples=40)
def test_any_chunks(setup, dtype):
    check(setup, dtype)


@pytest.mark.long
@pytest.mark.soak
@given(setups(), st.sampled_from((torch.float64, torch.float32)))
@settings(max_examples=soaked(10_000))
def test_any_of_many_chunks(setup, dtype):
    check(setup, dtype)


OPTIONS = (
    {},
    {"window": 7},
    {"softcap": 5.0},
    {"sinks": True},
    {"slopes": True},
    {"window": 20, "softcap": 3.0, "sinks": True, "slopes": True},
)
LENGTHS = [
    [3, 50, 1, 33, 12, 12, 100],
    [20, 20, 20, 1, 9, 2, 60],
    [1] * 7,
    [1, 9, 1, 30, 3, 1, 1],
    [12, 1, 1, 1, 1, 40, 2],
    [30] * 7,
]


@pytest.mark.each_value
@pytest.mark.parametrize("way", [{}, {"bags_only": True}, {"gathers": True}], ids=["", "bags", "gathered"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_option(dtype, options, way):
    all_options = {"window": None, "softcap": None, "sinks": False, "slopes": False} | options
    check(Setup(3, 2, 8, 5, 4, all_options, LENGTHS, way.get("bags_only", False), 0, "gathers" in way), dtype)


@pytest.mark.parametrize("options", OPTIONS)
def test_in_bags_a_token_has_the_same_result_in_any_company(options):
    """The sequences of a step one by one, with other blocks and chunks, bit for bit."""
    sizes = {"scale": 0.3, "window": options.get("window"), "softcap": options.get("softcap")}
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.randn(6, generator=generator) for name in ("sinks", "slopes") if options.get(name)}
    asked = AttentionOptions(**sizes, **named)
    lengths = [37, 1, 20, 64, 3]
    parts = [
        [torch.randn(length, heads, size, generator=generator) for heads, size in ((6, 8), (3, 8), (3, 5))]
        for length in lengths
    ]

    def results(chunks_of, first_block):
        """Return results by sequence; `chunks_of` has, for each, where it is cut."""
        cache = FloatLayerCache(LayerShape(3, 8, 5, torch.float32), num_blocks=100, block_size=4, device=CPU)
        tables, block = {}, first_block
        for number in chunks_of:
            count = -(-lengths[number] // 4)
            tables[number] = np.arange(block, block + count)[::-1].copy()
            block += count
        found = {number: [] for number in chunks_of}
        for turn in range(max(map(len, chunks_of.values())) - 1):
            here = [number for number, cuts in chunks_of.items() if turn + 1 < len(cuts)]
            spans = [slice(chunks_of[number][turn], chunks_of[number][turn + 1]) for number in here]
            step = PagedStep(
                np.array([span.start for span in spans]),
                np.array([span.stop - span.start for span in spans]),
                [tables[number][: -(-span.stop // 4)] for number, span in zip(here, spans, strict=True)],
                4,
                CPU,
                bags_only=True,
            )
            given = [
                torch.cat([parts[number][kind][span] for number, span in zip(here, spans, strict=True)])
                for kind in range(3)
            ]
            output = step.attend(cache, *given, asked)
            counts = [span.stop - span.start for span in spans]
            for number, part in zip(here, output.split(counts), strict=True):
                found[number].append(part)
        return {number: torch.cat(each) for number, each in found.items()}

    together = results({number: [0, length] for number, length in enumerate(lengths)}, 0)
    in_chunks = results(
        {n: sorted({0, length // 3, length // 2, length}) for n, length in enumerate(lengths)}, 7
    )
    for number, length in enumerate(lengths):
        alone = results({number: [0, length]}, 50)[number]
        assert torch.equal(together[number], alone)
        assert torch.equal(in_chunks[number], alone)
        one_by_one = results({number: list(range(length + 1))}, 3)[number]
        assert torch.equal(one_by_one, alone)


def test_blocks_are_copied_whole_though_a_copy_takes_the_place_of_another_source():
    cache = FloatLayerCache(LayerShape(1, 2, 3, torch.float32), num_blocks=4, block_size=2, device=CPU)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy(torch.tensor([0, 1]), torch.tensor([1, 2]))
    for now, before in ((cache.keys, keys), (cache.values, values)):
        assert torch.equal(now, before[[0, 0, 1, 3]])
