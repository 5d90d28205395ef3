"""Attention by an all-to-all of heads: values, gradients, masks, dropout, and bytes, beside the ring's."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from colossalai.communication import all_reduce, ledger
from colossalai.context import SEQUENCE_ATTENTIONS, Axis, ParallelMode, seed
from colossalai.core import global_context as gpc
from colossalai.nn.layer.sequence_parallel import (
    ATTENTIONS,
    numbered_lanes,
    own_positions,
    ring_attention,
    ulysses_attention,
)
from tests.harness.fake_job import fake_job
from tests.nn.layer.sequence_parallel.whole import BATCH, PADDINGS, SEQ, error_of, launch, whole_tensors
from tests.ranks import run_ranks
from tests.tiers import further

HEADS = 4


def parity(size: int) -> list[tuple[Any, float]]:
    """Return the error of each case against attention in one process."""
    axis, worst = launch(size, "ulysses"), []
    for order, causal, padding in itertools.product(("zigzag", "contiguous"), (False, True), PADDINGS):
        case = {"order": order, "causal": causal, "padding": padding, "scale": 0.3 if causal else None}
        worst.append((case, error_of(ulysses_attention, axis, heads=HEADS, **case)))
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, further(2), 4])
def test_values_and_gradients(size: int) -> None:
    for worst in run_ranks(parity, size, size):
        assert len(worst) == 16
        for case, error in worst:
            assert error < 1e-10, case


def masks_of(attend: Callable[..., Tensor], axis: Axis, order: Any, lanes: Tensor | None) -> list[Tensor]:
    mine = own_positions(SEQ, axis, order=order)
    q, k, v, grad = (tensor[:, :, mine] for tensor in whole_tensors(HEADS))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    with seed(ParallelMode.TENSOR):  # as an assembled model has it
        torch.manual_seed(5 + axis.rank)  # the first rank draws for all
        out = attend(*inputs, axis=axis, causal=True, dropout_p=0.3, order=order, tile_size=3, lanes=lanes)
    out.backward(grad)
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def dropped(size: int) -> None:
    axis = launch(size, "ulysses")
    others = numbered_lanes(BATCH, HEADS, device=torch.device("cpu")).flip(1)
    for order in ("zigzag", "contiguous"):
        results = []
        for lanes in (None, others):
            ring = masks_of(ring_attention, axis, order, lanes)
            ulysses = masks_of(ulysses_attention, axis, order, lanes)
            for first, second in zip(ring, ulysses, strict=True):
                torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
            results.append(ring[0])
        assert not torch.allclose(*results)  # other samples and heads, other masks


@pytest.mark.dist
def test_dropout_is_that_of_the_ring() -> None:
    run_ranks(dropped, 4, 4)


@pytest.mark.mesh
@pytest.mark.parametrize(("dtype", "with_padding"), [(torch.float64, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("size", [2, 4, 256])
def test_bytes_are_those_of_the_formula(size: int, dtype: torch.dtype, with_padding: bool) -> None:
    inputs = [torch.randn(2, size, 4, 6, dtype=dtype, requires_grad=True) for _ in range(3)]
    padding = torch.zeros(2, 4, dtype=torch.bool) if with_padding else None
    with fake_job({"parallel": {"sequence": {"size": size, "attention": "ulysses"}}}, size):
        axis = gpc.axis(ParallelMode.SEQUENCE)
        with ledger() as forward:
            out = ulysses_attention(*inputs, axis=axis, key_padding_mask=padding)
        with ledger() as backward:
            out.backward(torch.ones_like(out))
    n, m = inputs[0].nbytes, 0 if padding is None else padding.nbytes
    share = (size - 1) / size
    assert forward.num_bytes("all_to_all", axis.name) == 4 * n * share
    assert forward.num_bytes() == 4 * n * share + (size - 1) * m
    assert backward.num_bytes("all_to_all") == backward.num_bytes() == 4 * n * share
    assert (forward.count("all_to_all"), forward.count()) == (2, 2 + with_padding)
    assert backward.count() == 2


def refusals() -> list[str]:
    axis = launch(2, "ulysses")
    odd, lanes = torch.zeros(1, 3, 4, 2), torch.zeros(1, 2, dtype=torch.int64)
    even = torch.zeros(1, 4, 4, 2)
    attempts: list[Callable[[], Any]] = [
        lambda: ulysses_attention(odd, odd, odd, axis=axis),
        lambda: ulysses_attention(even, even, odd, axis=axis),
        lambda: ulysses_attention(even, even, even, axis=axis, lanes=lanes),
        lambda: ulysses_attention(even, even, even, axis=axis, order="spiral"),  # type: ignore[arg-type]
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are what is returned
            attempt()
        found.append(str(caught.value))
    all_reduce(torch.ones(()), axis)  # nothing was sent that this could meet
    return found


@pytest.mark.dist
def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    first, second = run_ranks(refusals, 2)
    assert first == second
    wanted = [
        "each of the 2 ranks that share a sequence some of the 3 heads (of a tensor-parallel rank)",
        "ulysses_attention: q, k, v are",
        "ulysses_attention: lanes is torch.int64 of shape (1, 2)",
        "order is 'spiral'",
    ]
    for message, part in zip(first, wanted, strict=True):
        assert part in message
    assert "attention='ring'" in first[0]


@pytest.mark.unit
def test_what_a_config_may_name_is_there() -> None:
    assert tuple(ATTENTIONS) == SEQUENCE_ATTENTIONS
    for name, attention in ATTENTIONS.items():
        assert attention.name == name
        assert attention.order(causal=False) == "contiguous"
