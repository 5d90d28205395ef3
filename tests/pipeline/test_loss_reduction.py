"""Means and sums are told apart: by what a criterion states, else by comparing once."""

from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from colossalai.logging import get_dist_logger
from colossalai.pipeline import PipelineOptions, ReductionCheck, reduction_of

pytestmark = pytest.mark.unit


def summed(output: Tensor, label: Tensor) -> Tensor:
    return cross_entropy(output, label, ignore_index=-100, reduction="sum")


def over_labels(output: Tensor, label: Tensor) -> Tensor:
    return summed(output, label) / (label != -100).sum()


class Around(nn.Module):
    """A module around a loss: nothing is known of what it does to it."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(reduction="sum")
        self.divides = divides

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return self.inner(output, label) / (len(output) if self.divides else 1)


def own(output: Tensor, label: Tensor, reduction: str = "sum") -> Tensor:
    return cross_entropy(output, label, reduction=reduction) / len(label)


@pytest.mark.parametrize(
    ("criterion", "reduction"),
    [
        (nn.CrossEntropyLoss(), "mean"),
        (nn.CrossEntropyLoss(reduction="sum"), "sum"),
        (partial(cross_entropy, reduction="sum"), "sum"),
        (partial(partial(cross_entropy, reduction="sum"), ignore_index=0), "sum"),
        (partial(nn.CrossEntropyLoss(reduction="sum")), "sum"),
        (nn.CrossEntropyLoss(reduction="sum").forward, "sum"),
        (mse_loss, "mean"),
        (summed, None),
        (Around(divides=False), None),
        (own, None),
        (None, None),
    ],
)
def test_what_a_criterion_states(criterion, reduction):
    assert reduction_of(criterion) == reduction


def compared(check, criterion, size=5, output_dim=0):
    """Let a criterion be compared; return what is logged."""
    generator = torch.Generator().manual_seed(size)
    output, label = torch.randn(size, 3, generator=generator), torch.randint(3, (size,), generator=generator)
    if size > 2:
        label[0] = -100  # the halves have two labels each, of three samples and two
    batch = {"label": label if output_dim == 0 else label[None]}
    output = output if output_dim == 0 else output.t().contiguous()
    dims = None if output_dim == 0 else {"label": 1, "output": output_dim}

    def loss_of(output, batch):
        return criterion(output, batch["label"])

    with patch.object(get_dist_logger(), "log_once") as log:
        check.compare_once(criterion, loss_of, output, batch, loss_of(output, batch), batch_dim=dims)
    return [call.args[0] for call in log.call_args_list]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("criterion", "is_sum"),
    [
        (summed, True),
        (over_labels, False),
        (Around(divides=False), True),
        (Around(divides=True), False),
        (lambda output, label: summed(output, label) / 64, True),  # by the user's batch size
        (lambda output, label: output.square().mean() + 3.0, False),
        (lambda output, label: -output.square().mean(), False),
        (lambda output, label: output.sum() * 0, False),
    ],
)
def test_sums_are_found_by_comparing(criterion, is_sum, size):
    found = compared(ReductionCheck(logs=True), criterion, size)
    assert len(found) == is_sum
    assert not is_sum or "returns sums over samples" in found[0]
    assert not compared(ReductionCheck(logs=False), criterion, size)


def test_samples_along_another_dimension():
    def transposed(output, label):
        return summed(output.t(), label[0])

    assert compared(ReductionCheck(logs=True), transposed, output_dim=1)


def test_a_criterion_is_compared_once_and_leaves_no_trace():
    calls = Counter()

    def noisy(output, label):
        calls["all"] += 1
        return summed(output.mul_(1.0) + torch.randn_like(output) * 1e-9, label)

    check = ReductionCheck(logs=True)
    torch.manual_seed(3)
    torch.randn(5, 3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    assert "returns sums" in compared(check, noisy)[0]
    assert torch.equal(torch.randn(4), expected)
    assert calls["all"] == 3
    assert not compared(check, noisy)
    assert not compared(check, partial(noisy))
    assert calls["all"] == 5


def test_a_criterion_that_takes_whole_microbatches_only():
    def strict(output, label):
        if len(label) != 5:
            raise RuntimeError("five labels are expected")
        return over_labels(output, label)

    (found,) = compared(ReductionCheck(logs=True), strict)
    assert "cannot be called on a part of a microbatch (RuntimeError: five labels" in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_reduction": "none"}, "loss_reduction is 'none'; it must be one of mean, sum"),
        ({"batch_dim": -1}, "batch_dim is -1; batch_dim is the dimension of the samples, at least 0, or"),
        ({"batch_dim": True}, "batch_dim is True"),
        ({"batch_dim": {"x": "1"}}, r"batch_dim\['x'\] is '1'"),
        ({"batch_dim": {"output": None}}, r"batch_dim\['output'\] is None"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineOptions(num_microbatches=2, **options)


def test_options_are_values():
    options = [PipelineOptions(num_microbatches=2, batch_dim={"x": dim}) for dim in (None, None, 0)]
    assert options[0] == options[1] != options[2]
    assert hash(options[0]) == hash(options[1])
