"""GPT, BERT and ViT in tensor modes: the published vocabulary, precision, dropout, bad sizes.

That they train as in one process is in tests/parity/table.py.
"""

from functools import cache
from unittest import mock

import pytest
import torch

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.model_zoo import _attention
from colossalai.model_zoo.gpt import gpt2_small
from tests.model_zoo.tiny import BATCH, build, criterion_of, make_batch
from tests.parity.table import MODES
from tests.ranks import run_ranks
from tests.tiers import further, in_soak

pytestmark = pytest.mark.dist


def published_loss(mode):
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[mode]} if mode else {}}, verbose=False)
    torch.manual_seed(3)
    model = gpt2_small(num_layers=1, hidden_size=16, num_attention_heads=4).eval()
    ids = torch.tensor([50256, 0, 31337, 7]).repeat(8, 1)
    return criterion_of("gpt")(model(ids), ids).item()


@cache
def whole_published_loss():
    return run_ranks(published_loss, 1, None)[0]


@pytest.mark.parametrize("mode", [further("1d"), "2d"])
def test_the_published_vocabulary(mode):
    expected = whole_published_loss()
    for loss in run_ranks(published_loss, MODES[mode]["size"], mode):
        assert loss == pytest.approx(expected, rel=1e-6)


def losses_in(precision, name, mode):
    """Return the losses of three steps; without a mode, of a plain model in float32."""
    config = {"parallel": {"tensor": MODES[mode]} if mode else {}}
    config |= {"fp16": {"mode": precision, "init_scale": 256.0}} if precision == AMP_TYPE.TORCH else {}
    config |= {"fp16": {"mode": precision}} if precision == AMP_TYPE.BF16 else {}
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(3)
    model = build(name, vocab_parallel_limit=1, init_std=0.1, num_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = colossalai.initialize(model, optimizer, criterion_of(name), verbose=False)
    losses = []
    for seed in range(3):
        inputs, labels = make_batch(name, BATCH, seed)
        engine.zero_grad()
        output = engine(inputs)
        assert output.dtype == torch.float32
        loss = engine.criterion(output, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@cache
def float32_losses(name):
    return run_ranks(losses_in, 1, None, name, None)[0]


PRECISIONS = [("gpt", AMP_TYPE.BF16), ("vit", AMP_TYPE.BF16), ("gpt", AMP_TYPE.TORCH)]


@pytest.mark.parametrize(  # mode "1d" in bfloat16 is in tests/parity/test_pairs.py, too
    ("name", "precision", "mode"),
    [
        (*PRECISIONS[0], "2d"),
        *(further(*PRECISIONS[0], mode) for mode in ("1d", "2.5d", "3d")),
        *(further(*PRECISIONS[1], mode) for mode in ("1d", "2.5d")),
        *(further(*PRECISIONS[2], mode) for mode in ("2d", "3d")),
        *(in_soak(*PRECISIONS[1], mode) for mode in ("2d", "3d")),
        *(in_soak(*PRECISIONS[2], mode) for mode in ("1d", "2.5d")),
    ],
)
def test_mixed_precision_stays_near_float32(name, precision, mode):
    losses = run_ranks(losses_in, MODES[mode]["size"], precision, name, mode)
    assert losses.count(losses[0]) == len(losses)
    # bfloat16 has 8 bits, float16 11: some 0.4% and 0.05% of numbers of size 1, over a few layers.
    allowed = 0.03 if precision == AMP_TYPE.BF16 else 0.004
    assert losses[0] == pytest.approx(float32_losses(name), abs=allowed)
    assert losses[0] != float32_losses(name)


def draws(mode):
    """Return what an attention would draw, what comes out of the embedding, and of the whole model."""
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[mode]}}, verbose=False)
    model = build("gpt", embedding_dropout=0.5, dropout=0.5, attention_dropout=0.5)
    seen = []
    attend = _attention.functional.scaled_dot_product_attention

    def spy(*args, **options):
        seen.append(torch.rand(4).tolist())
        return attend(*args, **options)

    zeros = model.embedding.dropout(torch.ones(64)) == 0
    with mock.patch.object(_attention.functional, "scaled_dot_product_attention", spy):
        logits = model(make_batch("gpt", BATCH, 0)[0])
    return seen[0], zeros.tolist(), logits.tolist()


def test_dropout_differs_where_the_ranks_hold_different_slices():
    (a, b), (zeros_a, zeros_b), (logits_a, logits_b) = zip(*run_ranks(draws, 2, "1d"), strict=True)
    assert a != b  # other heads
    assert zeros_a == zeros_b  # the same residual stream
    assert logits_a == logits_b
    heads, zeros, _ = zip(*run_ranks(draws, 4, "2d"), strict=True)
    assert len(set(map(tuple, heads))) == 4
    assert len(set(map(tuple, zeros))) == 4


def refusal(mode, overrides):
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[mode]}}, verbose=False)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is returned
        build("gpt", vocab_parallel_limit=1, **overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mode", "overrides", "message"),
    [
        ("1d-4", {"num_attention_heads": 2}, "2 attention heads, which the 4 ranks along tp do not divide"),
        ("2d", {"hidden_size": 15, "num_attention_heads": 3}, "VocabParallelEmbedding2D: dimension 1"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide_are_refused(mode, overrides, message):
    assert all(message in found for found in run_ranks(refusal, 4, mode, overrides))
