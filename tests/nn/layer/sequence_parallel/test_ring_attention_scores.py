"""RingQK, RingAV and the self-attention layer on them, against plain attention in one process."""

import math

import pytest
import torch
from torch import nn

import colossalai
from colossalai.communication import ledger
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.sequence_parallel import RingAV, RingQK, TransformerSelfAttentionRing
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

BATCH, HEADS, SEQ, HEAD = 2, 3, 8, 5
ROWS = BATCH * HEADS


def launch(size):
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": size, "mode": "sequence"}}}, verbose=False)
    return gpc.axis(ParallelMode.SEQUENCE)


def draw(*shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole_and_mine(axis, *shape, seed):
    """A tensor cut along dim 1, and this rank's part; both collect gradients."""
    whole = draw(*shape, seed=seed)
    mine = whole.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    return whole.requires_grad_(), mine


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def products(size, dtype):
    axis = launch(size)
    n = SEQ // size
    q, sub_q = whole_and_mine(axis, ROWS, SEQ, HEAD, seed=1)
    k, sub_k = whole_and_mine(axis, ROWS, SEQ, HEAD, seed=2)
    v, sub_v = whole_and_mine(axis, ROWS, SEQ, HEAD, seed=3)
    with ledger() as forward:
        scores = RingQK.apply(sub_q, sub_k, BATCH, HEADS, n)
        sub_weights = scores.softmax(-1)
        mixed = RingAV.apply(sub_weights, sub_v, BATCH, HEADS, HEAD, n, axis)
    expected = (q @ k.transpose(1, 2)).softmax(-1) @ v
    grad = draw(ROWS, SEQ, HEAD, seed=4)
    expected.backward(grad)
    with ledger() as backward:
        mixed.backward(grad.chunk(size, 1)[axis.rank])
    close(scores, (q @ k.transpose(1, 2)).chunk(size, 1)[axis.rank])
    close(mixed, expected.chunk(size, 1)[axis.rank])
    for whole, mine in ((q, sub_q), (k, sub_k), (v, sub_v)):
        close(mine.grad, whole.grad.chunk(size, 1)[axis.rank])
    assert forward.num_bytes() == 2 * (size - 1) * sub_k.nbytes
    assert backward.num_bytes() == 2 * 2 * (size - 1) * sub_k.nbytes
    half = [tensor.detach().to(dtype).requires_grad_() for tensor in (sub_q, sub_k, sub_v)]
    mixed = RingAV.apply(RingQK.apply(*half[:2], BATCH, HEADS, n).softmax(-1), half[2], BATCH, HEADS, HEAD, n)
    mixed.sum().backward()
    assert {tensor.grad.dtype for tensor in half} == {mixed.dtype} == {dtype}
    for call in (
        lambda: RingQK.apply(sub_q, sub_k[:, :1], BATCH, HEADS, n),
        lambda: RingQK.apply(sub_q, sub_k, BATCH + 1, HEADS, n),
        lambda: RingAV.apply(sub_weights[:, :, 1:], sub_v, BATCH, HEADS, HEAD, n),
        lambda: RingAV.apply(sub_weights, sub_v, BATCH, HEADS, HEAD + 1, n),
    ):
        with pytest.raises(ValueError, match=r"has shape .* it must be"):
            call()


@pytest.mark.parametrize("size", [1, further(2), 4])
def test_products(size):
    run_ranks(products, size, size, torch.bfloat16)


def masked(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def plain_attention(layer, x, mask):
    """Attention over (seq, batch, hidden), head by head, with the layer's parameters."""
    seq, batch, hidden = x.shape
    heads, size = layer.num_attention_heads, hidden // layer.num_attention_heads
    fused = nn.functional.linear(x, layer.query_key_value.weight, layer.query_key_value.bias)
    fused = fused.view(seq, batch, heads, 3, size).permute(3, 1, 2, 0, 4)  # (3, batch, heads, seq, head)
    scores = fused[0] @ fused[1].transpose(-1, -2) / math.sqrt(size)
    weights = scores.masked_fill(mask, -10000.0).softmax(-1)
    mixed = (weights @ fused[2]).permute(2, 0, 1, 3).reshape(seq, batch, hidden)
    return nn.functional.linear(mixed, layer.dense.weight, layer.dense.bias)


def self_attention(size, options):
    axis = launch(size)
    torch.set_default_dtype(torch.float64)
    layer = TransformerSelfAttentionRing(12, HEADS, 0.0, masked, 3, **options)
    x, grad = draw(SEQ, BATCH, 12, seed=1).requires_grad_(), draw(SEQ, BATCH, 12, seed=2)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1).repeat(BATCH, 1, 1, 1)
    mask[1, :, :, 0] = True
    expected = plain_attention(layer, x, mask)
    expected.backward(grad)
    grads = [param.grad for param in layer.parameters()]
    layer.zero_grad()
    mine = x.detach().chunk(size)[axis.rank].requires_grad_()
    out = layer(mine, mask.chunk(size, 2)[axis.rank])
    out.backward(grad.chunk(size)[axis.rank])
    close(out, expected.chunk(size)[axis.rank])
    close(mine.grad, x.grad.chunk(size)[axis.rank])
    for param, whole in zip(layer.parameters(), grads, strict=True):
        torch.distributed.all_reduce(param.grad)
        close(param.grad, whole)
    assert layer(mine).shape == mine.shape  # without a mask


@pytest.mark.parametrize("options", [{}, {"apply_query_key_layer_scaling": True}])
@pytest.mark.parametrize("size", [2, 4])
def test_self_attention(size, options):
    run_ranks(self_attention, size, size, options)


def dropout_and_options():
    axis = launch(2)
    options = {"attn_mask_type": "padding", "fp16": True, "convert_fp16_to_fp32_in_softmax": True}
    layer = TransformerSelfAttentionRing(4, 2, 0.5, masked, 1, **options).to(torch.bfloat16)
    x = torch.ones(8, 3, 4, dtype=torch.bfloat16)
    first, second = layer(x), layer(x)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    on_ranks = [torch.empty_like(first) for _ in range(2)]
    torch.distributed.all_gather(on_ranks, first.detach())
    assert not torch.equal(*on_ranks)  # ranks draw masks of their own
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    with pytest.raises(ValueError, match="hidden_size is 5, which 2 attention heads do not divide"):
        TransformerSelfAttentionRing(5, 2, 0.0, masked, 1)
    with pytest.raises(ValueError, match="layer_number is 0"):
        TransformerSelfAttentionRing(4, 2, 0.0, masked, 0)
    return axis.rank


def test_dropout_and_options():
    assert run_ranks(dropout_and_options, 2) == [0, 1]


def no_such_axis():
    colossalai.launch_from_torch({}, verbose=False)
    with pytest.raises(ValueError, match=r"SEQUENCE is not part of this job"):
        TransformerSelfAttentionRing(4, 2, 0.0, masked, 1)
    with pytest.raises(ValueError, match=r"SEQUENCE is not part of this job"):
        RingQK.apply(torch.ones(1, 1, 1), torch.ones(1, 1, 1), 1, 1, 1)


def test_a_job_without_the_axis():
    run_ranks(no_such_axis, 1)
