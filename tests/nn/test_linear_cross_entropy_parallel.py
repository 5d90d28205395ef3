"""Linear layer and cross entropy in chunks over a vocabulary that is cut over ranks."""

import itertools

import pytest
import torch

import colossalai
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn import Linear1D_Row, LinearCrossEntropyLoss, VocabParallelClassifier1D
from colossalai.tensor import spec_of
from tests.nn.live_bytes import LiveBytes
from tests.nn.test_linear_cross_entropy import relative, whole_loss
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS, HIDDEN = 12, 5
CASES = {
    "plain": {},
    "sum": {"reduction": "sum", "chunk": 5},
    "none": {"reduction": "none", "chunk": 4},
    "all options": {"label_smoothing": 0.1, "z_loss": 0.01, "logits_scale": 0.7, "softcap": 3.0, "chunk": 5},
}


def against_whole(classes, options, *, has_bias):
    """Return the largest relative error of the loss and of each gradient."""
    head = VocabParallelClassifier1D(HIDDEN, classes, bias=has_bias)
    spec = spec_of(head.weight)
    weight = spec.whole(head.weight.detach()).clone().requires_grad_()
    bias = spec_of(head.bias).whole(head.bias.detach()).clone().requires_grad_() if has_bias else None
    x = torch.randn(ROWS, HIDDEN).requires_grad_()
    labels = torch.randint(classes, (ROWS,))
    labels[::5] = -100
    token_weights = torch.rand(ROWS)
    loss = LinearCrossEntropyLoss(**options)(x, head.weight, labels, head.bias, token_weights)
    arriving = torch.randn(loss.shape)
    loss.backward(arriving)
    dx, x.grad = x.grad, None
    wanted = whole_loss(x, weight, labels, bias, token_weights, **options)
    wanted.backward(arriving)
    found = [loss.detach(), dx, spec.whole(head.weight.grad)]
    exact = [wanted.detach(), x.grad, weight.grad]
    if bias is not None:
        found.append(spec_of(head.bias).whole(head.bias.grad))
        exact.append(bias.grad)
    padding = head.weight.grad[max(0, classes - len(head.weight) * gpc.mesh.axis_rank("tp")) :]
    assert not padding.any()
    return max(relative(mine, theirs) for mine, theirs in zip(found, exact, strict=True))


def all_cases(size):
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": size, "mode": "1d"}}}, verbose=False)
    torch.manual_seed(7)
    errors = {}
    # Of one class all but the first rank have padding only.
    for classes, (name, options), has_bias in itertools.product((1, 11, 12), CASES.items(), (False, True)):
        errors[f"{classes} {name} {has_bias}"] = against_whole(classes, options, has_bias=has_bias)
    traffic = count_traffic()
    peak = peak_of_step()
    refuse_another_cut()
    gpc.destroy()
    return errors, traffic, peak


def count_traffic():
    """Return what is sent: for each chunk of rows that count three numbers of each, and the gradient of x."""
    head = VocabParallelClassifier1D(HIDDEN, 12, bias=False)
    x, labels = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randint(12, (ROWS,))
    labels[:4] = -100
    with ledger() as sent:
        LinearCrossEntropyLoss(chunk=4)(x, head.weight, labels).backward()
    return [(entry.op, entry.num_bytes) for entry in sent.entries]


def peak_of_step():
    """Return the most memory that a rank takes, and what its slices of the whole would be at least."""
    rows, hidden, classes, chunk = 256, 8, 1000, 32
    head = VocabParallelClassifier1D(hidden, classes, bias=False)
    x, labels = torch.randn(rows, hidden, requires_grad=True), torch.randint(classes, (rows,))
    with LiveBytes(x, labels, head.weight) as live:
        LinearCrossEntropyLoss(chunk=chunk)(x, head.weight, labels).backward()
    return live.peak, 8 * len(head.weight) * (rows + hidden)


def refuse_another_cut():
    row = Linear1D_Row(12, 12)
    with pytest.raises(ValueError, match="along the classes over one axis"):
        LinearCrossEntropyLoss()(
            torch.randn(3, len(row.weight.t())), row.weight, torch.zeros(3, dtype=torch.long)
        )
    head = VocabParallelClassifier1D(HIDDEN, 12)
    with pytest.raises(ValueError, match="labels from 0 to 12, but there are 12 classes"):
        LinearCrossEntropyLoss()(torch.randn(2, HIDDEN), head.weight, torch.tensor([0, 12]))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_cut_vocabulary(num_ranks):
    for errors, traffic, (peak, of_whole) in run_ranks(all_cases, num_ranks, num_ranks):
        assert max(errors.values()) < 1e-12, {name: error for name, error in errors.items() if error >= 1e-12}
        assert [name for name, _ in traffic] == ["all_gather", "all_reduce"] * 2
        assert peak < of_whole / 2
