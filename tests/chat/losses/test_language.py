"""Log-probabilities, entropy and the loss of supervised fine-tuning, against loops over tokens."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossalai.chat.losses import _language, entropy, sequence_logprobs, sft_loss, token_logprobs
from tests.chat.losses.parts import (
    assert_masked_places_have_no_say,
    assert_parts_add_up,
    assert_same,
    masks,
    normal,
    with_grads,
)
from tests.nn.live_bytes import LiveBytes

pytestmark = pytest.mark.unit

VOCAB = 7


def one_logprob(x: Tensor, label: int) -> Tensor:
    return x[label] - sum(x[j].exp() for j in range(len(x))).log()


def one_entropy(x: Tensor) -> Tensor:
    return -sum(one_logprob(x, j).exp() * one_logprob(x, j) for j in range(len(x)))


def loop_sft(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = []
    for b in range(len(labels)):
        for t in range(1, labels.shape[1]):
            if mask[b, t]:
                losses.append(-one_logprob(logits[b, t - 1], int(labels[b, t])))
    return sum(losses) / len(losses)


def labels_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("piece", [1, 9 * VOCAB, 1 << 23])
def test_logprobs_and_entropy_are_those_of_a_loop(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_language, "_PIECE_ELEMENTS", piece)
    logits, labels, weights = normal(0, 3, 4, VOCAB, scale=3.0), labels_of(3, 4), normal(2, 3, 4)

    def loop_logprobs(x: Tensor) -> Tensor:
        rows = [[one_logprob(x[b, t], int(labels[b, t])) for t in range(4)] for b in range(3)]
        return (torch.stack([torch.stack(row) for row in rows]) * weights).sum()

    def loop_entropy(x: Tensor) -> Tensor:
        rows = [[one_entropy(x[b, t]) for t in range(4)] for b in range(3)]
        return (torch.stack([torch.stack(row) for row in rows]) * weights).sum()

    found = with_grads(lambda x: (token_logprobs(x, labels) * weights).sum(), logits)
    assert_same(found, with_grads(loop_logprobs, logits))
    assert_same(with_grads(lambda x: (entropy(x) * weights).sum(), logits), with_grads(loop_entropy, logits))
    strided = logits.transpose(0, 1)
    assert torch.equal(token_logprobs(strided, labels.t()), token_logprobs(logits, labels).t())
    assert torch.equal(entropy(strided), entropy(logits).t())


def test_extreme_logits() -> None:
    logits = torch.tensor([[[1000.0, 0.0, -1000.0], [-torch.inf, 2.0, 2.0]]], requires_grad=True)
    logp = token_logprobs(logits, torch.tensor([[2, 1]]))
    torch.testing.assert_close(
        logp, torch.tensor([[-2000.0, -0.5]]).put_(torch.tensor(1), -torch.tensor(2.0).log())
    )
    logp.sum().backward()
    assert logits.grad.tolist() == [[[-1.0, 0.0, 1.0], [0.0, 0.5, -0.5]]]
    logits.grad = None
    found = entropy(logits)
    torch.testing.assert_close(
        found, torch.tensor([[0.0, 2.0]]).log1p().put_(torch.tensor(1), torch.tensor(2.0).log())
    )
    found.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(1, 2, 3), atol=1e-6, rtol=0)
    impossible = token_logprobs(torch.tensor([[[-torch.inf, 0.0]]]), torch.tensor([[0]]))
    assert impossible.item() == -torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_reduced_in_float32(dtype: torch.dtype) -> None:
    logits, labels = (10 * torch.randn(2, 5, 50)).to(dtype), torch.randint(50, (2, 5))
    wide = with_grads(lambda x: token_logprobs(x, labels).mean() + entropy(x).mean(), logits.float())
    assert token_logprobs(logits, labels).dtype == entropy(logits).dtype == torch.float32
    value, grad = with_grads(lambda x: token_logprobs(x, labels).mean() + entropy(x).mean(), logits)
    assert torch.equal(value, wide[0])
    assert grad.dtype == dtype
    # The gradient of each of the two is rounded once, and their sum once more.
    torch.testing.assert_close(grad.float(), wide[1], atol=3 * torch.finfo(dtype).eps * 0.1, rtol=0.01)


def test_logits_are_gone_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_language, "_PIECE_ELEMENTS", 1 << 12)
    logits = torch.randn(2, 64, 512).bfloat16().requires_grad_()
    labels, mask = torch.randint(512, (2, 64)), torch.ones(2, 64, dtype=torch.bool)
    num_bytes = logits.nbytes
    with LiveBytes(logits) as forward:
        loss = sft_loss(logits, labels, mask)
    assert forward.peak < 0.4 * num_bytes
    with LiveBytes(logits) as backward:
        loss.backward()
    assert num_bytes <= backward.peak < 1.6 * num_bytes  # the gradient, and a piece
    with LiveBytes(logits) as of_entropy:
        entropy(logits.detach())
    assert of_entropy.peak < 0.6 * num_bytes


@given(masks(), st.integers(0, 99))
@settings(max_examples=25)
def test_sft_is_the_mean_over_the_tokens_of_the_mask(mask: Tensor, seed: int) -> None:
    logits, labels = normal(seed, *mask.shape, VOCAB), labels_of(*mask.shape, seed=seed)
    wanted = with_grads(lambda x: loop_sft(x, labels, mask), logits)
    assert_same(with_grads(lambda x: sft_loss(x, labels, mask), logits), wanted)
    assert_same(
        with_grads(lambda x: sft_loss(x, labels.masked_fill(~mask, -100), mask.long()), logits), wanted
    )


def test_sft_is_what_torch_has() -> None:
    logits, labels = normal(0, 3, 6, VOCAB), labels_of(3, 6)
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(sft_loss(logits, labels, torch.ones(3, 6, dtype=torch.bool)), wanted)


@given(masks(max_batch=5), st.integers(1, 4), st.booleans())
@settings(max_examples=20)
def test_parts_of_a_batch_add_up(mask: Tensor, first: int, is_tensor: bool) -> None:
    first = min(first, len(mask))
    logits, labels = normal(3, *mask.shape, VOCAB), labels_of(*mask.shape)
    count = mask[:, 1:].sum() if is_tensor else int(mask[:, 1:].sum())
    assert_parts_add_up(
        lambda *part: sft_loss(*part, num_tokens=count),
        sft_loss,
        [logits, labels, mask],
        [first, len(mask) - first],
    )


def test_masked_logits_have_no_say() -> None:
    mask = torch.tensor([[True, False, True, True, False], [False, False, True, False, False]])
    labels = labels_of(2, 5)
    predicts = mask.roll(-1, 1)
    predicts[:, -1] = False
    assert_masked_places_have_no_say(lambda x: sft_loss(x, labels, mask), [normal(0, 2, 5, VOCAB)], predicts)
    assert_masked_places_have_no_say(
        lambda x: torch.where(predicts, token_logprobs(x, labels) + entropy(x), 0).sum(),
        [normal(0, 2, 5, VOCAB)],
        predicts,
    )


def test_a_mask_without_tokens() -> None:
    logits, labels, none = normal(0, 2, 3, VOCAB), labels_of(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    none[:, 0] = True  # the first token is predicted by nothing
    with pytest.raises(
        ValueError, match="no tokens to take the mean of; leave this batch out, or give num_tok"
    ):
        sft_loss(logits, labels, none)
    loss, grad = with_grads(lambda x: sft_loss(x, labels, none, num_tokens=8), logits)
    assert loss == 0
    assert not grad.any()
    with pytest.raises(ValueError, match="num_tokens is 0; it must be above 0"):
        sft_loss(logits, labels, none, num_tokens=0)


def test_logprobs_of_sequences() -> None:
    logp = torch.tensor([[-1.0, -2.0, torch.nan], [-torch.inf, -3.0, -5.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert sequence_logprobs(logp, mask).tolist() == [-3.0, -8.0]
    mean = sequence_logprobs(logp, mask, mean=True)
    assert mean.tolist() == [-1.5, -4.0]
    mean.sum().backward()
    assert logp.grad.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    assert sequence_logprobs(logp.bfloat16(), mask).dtype == torch.float32
    mask[1] = 0
    assert sequence_logprobs(logp, mask).tolist() == [-3.0, 0.0]
    with pytest.raises(ValueError, match=r"sequences \[1\] have no token in mask, and so no mean"):
        sequence_logprobs(logp, mask, mean=True)


def test_what_is_refused() -> None:
    logits, labels, mask = normal(0, 2, 3, VOCAB), labels_of(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"logits have shape \(3, 7\) .* must be \(batch, length, vocabulary\)"
    ):
        entropy(logits[0])
    with pytest.raises(ValueError, match=r"type torch.int64; they must be"):
        entropy(logits.long())
    with pytest.raises(ValueError, match=r"labels has shape \(2, 2\); it must be \(batch, length\)"):
        token_logprobs(logits, labels[:, 1:])
    with pytest.raises(ValueError, match=r"labels are of type torch.float64"):
        token_logprobs(logits, labels.double())
    with pytest.raises(ValueError, match=r"labels go from -100 to \d, but the vocabulary has 7 tokens"):
        token_logprobs(logits, labels.index_fill(1, torch.tensor(1), -100))
    with pytest.raises(ValueError, match=r"labels go from \d to 7"):
        sft_loss(logits, labels.index_fill(1, torch.tensor(1), 7), mask)
    with pytest.raises(
        ValueError, match=r"labels has shape \(2, 3\); it must be .* as the others, .* \(2, 2\)"
    ):
        sft_loss(logits, labels, mask[:, 1:])
    with pytest.raises(
        ValueError, match=r"labels has shape \(2, 3\); it must be .* as the others, .* \(2, 2\)"
    ):
        sft_loss(logits[:, 1:], labels, mask)
    with pytest.raises(ValueError, match=r"mask is of type torch.float32; it must be of booleans"):
        sft_loss(logits, labels, mask.float())
    with pytest.raises(ValueError, match=r"logp has shape \(2, 3, 7\)"):
        sequence_logprobs(logits, mask)


@pytest.mark.parametrize("function", [entropy, lambda x: token_logprobs(x, labels_of(2, 3))])
def test_there_is_no_second_derivative(function: Callable[[Tensor], Tensor]) -> None:
    logits = normal(0, 2, 3, VOCAB).requires_grad_()
    found = function(logits).sum()
    with pytest.raises(RuntimeError, match="have no second derivative: leave create_graph out"):
        torch.autograd.grad(found, logits, create_graph=True)
