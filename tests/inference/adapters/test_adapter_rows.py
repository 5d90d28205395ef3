"""Rows of a step by adapter: they travel as bytes, and each row gets what its own adapter adds."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.inference._request import Request
from colossalai.inference.paging import AdapterRows, PagedStep, StepArrays, pack_arrays, unpack_arrays
from colossalai.inference.paging._calls import PagedCall, _call
from colossalai.inference.products import LinearDelta
from colossalai.inference.scheduling import BatchStep, RunningSequence, SequenceChunk

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
SIZES = (12, 10)  # of inputs and outputs
NUMBERS = {"one": 1, "two": 2, "three": 3}


def step_of(chunks: list[tuple[int, str | None]]) -> BatchStep:
    """Return a step of chunks, each with its number of tokens and its adapter."""
    return BatchStep(
        tuple(
            SequenceChunk(
                RunningSequence(
                    Request(request_id=str(place), prompt_token_ids=(1,) * count, adapter=name),
                    index=0,
                    order=(0, place, 0),
                    root=b"",
                ),
                start=0,
                token_ids=(1,) * count,
                blocks=(place,),
                num_draws=1,
            )
            for place, (count, name) in enumerate(chunks)
        ),
        (),
    )


def matrix(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CHUNKS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([None, *NUMBERS])), min_size=1, max_size=8)


@settings(max_examples=200)
@given(chunks=CHUNKS, is_batch_invariant=st.booleans(), of_logits=st.booleans(), data=st.data())
def test_each_row_gets_what_its_adapter_adds(
    chunks: list[tuple[int, str | None]], is_batch_invariant: bool, of_logits: bool, data: Any
) -> None:
    total = sum(count for count, _ in chunks)
    kept = data.draw(st.lists(st.integers(0, total - 1), unique=True).map(sorted))
    sent = StepArrays.of(step_of(chunks), kept, NUMBERS)
    arrays = StepArrays(**unpack_arrays(pack_arrays(sent.arrays())))  # as ranks hand it on
    for field in dataclasses.fields(StepArrays):
        assert np.array_equal(getattr(arrays, field.name), getattr(sent, field.name))
    expected = [NUMBERS.get(name or "", 0) for count, name in chunks for _ in range(count)]
    found = arrays.adapters_of_tokens()
    assert found.tolist() == (expected if any(expected) else [])

    # The third adapter leaves the layer as it is.
    pairs = {number: (matrix(3, SIZES[0], seed=number), matrix(SIZES[1], 3, seed=9)) for number in (1, 2)}
    delta = LinearDelta(pairs, of_logits=of_logits, is_batch_invariant=is_batch_invariant)
    chosen = [expected[row] for row in kept] if of_logits else expected
    x, before = matrix(len(chosen), SIZES[0], seed=5), matrix(len(chosen), SIZES[1], seed=6)
    made = before.clone()
    step = PagedStep(arrays.starts, arrays.counts, [np.arange(1)] * len(chunks), 8, CPU)
    rows = AdapterRows.of(found, CPU), AdapterRows.of(found[arrays.rows] if len(found) else found, CPU)
    token = _call.set(PagedCall(step, {}, *rows))
    try:
        assert delta.is_due == any(chosen)
        delta.add(made, x)
    finally:
        _call.reset(token)
    for row, number in enumerate(chosen):
        if number not in pairs:
            assert torch.equal(made[row], before[row])
            continue
        first, second = pairs[number]
        assert torch.allclose(made[row], before[row] + second @ (first @ x[row]), rtol=0, atol=1e-10)


def test_outside_of_a_paged_call_nothing_is_added() -> None:
    delta = LinearDelta({1: (matrix(3, SIZES[0], seed=1), matrix(SIZES[1], 3, seed=2))})
    made = matrix(4, SIZES[1], seed=3)
    delta.add(made, matrix(4, SIZES[0], seed=4))
    assert torch.equal(made, matrix(4, SIZES[1], seed=3))
