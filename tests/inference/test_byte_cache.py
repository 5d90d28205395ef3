"""Keys and values in 8 bits: attention over what is stored, whatever order it came in; bytes; texts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.inference import LLM, EngineOptions, SamplingParams
from colossalai.inference.paging._attention import AttentionOptions, PagedStep
from colossalai.inference.paging._cache import ByteLayerCache, FloatLayerCache, LayerShape
from tests.inference.models import MIXED, prompts, tiny

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


def caches(
    heads: int, sizes: tuple[int, int], dtype: torch.dtype, block_size: int, num_blocks: int
) -> tuple[ByteLayerCache, FloatLayerCache]:
    shape = LayerShape(heads, *sizes, dtype)
    return (
        ByteLayerCache(shape, num_blocks=num_blocks, block_size=block_size),
        FloatLayerCache(shape, num_blocks=num_blocks, block_size=block_size, device=CPU),
    )


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    shared=st.integers(1, 3),
    block_size=st.sampled_from([4, 16]),
    window=st.none() | st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gathers=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_attention_is_that_over_what_is_stored(
    counts: list[int],
    sizes: tuple[int, int],
    shared: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    gathers: bool,
    seed: int,
) -> None:
    """One sequence in chunks of these lengths; the cache of floats is given what the other one rounds to."""
    heads, total = 2, sum(counts)
    num_blocks = -(-total // block_size)
    in_bytes, as_floats = caches(heads, sizes, dtype, block_size, num_blocks + 2)
    table = np.random.default_rng(seed).permutation(num_blocks + 2)[:num_blocks]
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randn(total, many, sizes[0], generator=generator).to(dtype) for many in (heads * shared, heads)
    )
    value = torch.randn(total, heads, sizes[1], generator=generator).to(dtype)
    options = AttentionOptions(scale=sizes[0] ** -0.5, window=window)
    start = 0
    for count in counts:
        one = np.ones(1, np.int64)
        blocks = table[: -(-(start + count) // block_size)]
        step = PagedStep(one * start, one * count, [blocks], block_size, CPU, gathers=gathers)
        new = slice(start, start + count)
        stored = in_bytes.write(step.places, key[new], value[new])
        for was, is_now in zip((key[new], value[new]), stored, strict=True):
            largest = was.float().abs().amax(-1, keepdim=True)
            slack = 0.01 if dtype == torch.bfloat16 else 1e-6
            assert ((was.float() - is_now.float()).abs() <= (1 / 254 + slack) * largest + 1e-6).all()
        found = step.attend(in_bytes, query[new], key[new], value[new], options)
        expected = step.attend(as_floats, query[new], *stored, options)
        bound = 0.03 if dtype == torch.bfloat16 else 1e-4
        assert (found.float() - expected.float()).abs().max() <= bound * expected.float().abs().max()
        start += count
    found_both = in_bytes.read(torch.from_numpy(table), total)
    for found, expected in zip(found_both, as_floats.read(torch.from_numpy(table), total), strict=True):
        assert (found.float() - expected.float()).abs().max() <= 1e-5 * expected.float().abs().max()


def test_blocks_are_copied_whole() -> None:
    cache, _ = caches(2, (4, 6), torch.float32, 4, 3)
    step = PagedStep(np.array([0]), np.array([4]), [np.array([1])], 4, CPU)
    cache.write(step.places, torch.randn(4, 2, 4), torch.randn(4, 2, 6))
    cache.copy(torch.tensor([1]), torch.tensor([2]))
    for one, other in zip(cache.read(torch.tensor([1]), 4), cache.read(torch.tensor([2]), 4), strict=True):
        assert torch.equal(one, other)
        assert one.abs().sum() > 0


def test_bytes_of_a_block_are_those_of_its_memory() -> None:
    in_bytes, as_floats = caches(5, (64, 64), torch.float32, 16, 7)
    shape = LayerShape(5, 64, 64, torch.float32, is_in_bytes=True)
    assert 7 * shape.bytes_of_block(16) == sum(pool.nbytes for pool in in_bytes.pools)
    assert 7 * as_floats.shape.bytes_of_block(16) == sum(pool.nbytes for pool in as_floats.pools)
    assert shape.bytes_of_block(16) < 0.34 * as_floats.shape.bytes_of_block(16)


def answers(**options: object) -> list[tuple[int, ...]]:
    llm = LLM(tiny("Llama"), kv_dtype="int8", kv_memory=2**22, **options)
    params = SamplingParams(max_tokens=12, temperature=0)
    found = [output.outputs[0].token_ids for output in llm.generate(prompts(*MIXED), params)]
    assert all(shape.is_in_bytes for shape in llm.engine.executor.runner.shapes.values())
    return found


def test_texts_do_not_depend_on_how_prompts_are_cut() -> None:
    whole = answers(is_batch_invariant=True, max_running=16)
    cut = answers(is_batch_invariant=True, max_running=16, max_tokens_per_step=23)
    assert whole == cut


def test_another_type_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="kv_dtype='int4'; it must be 'auto' or 'int8'"):
        EngineOptions(kv_dtype="int4")
