"""The loss and the metric that are not torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossalai.nn import Accuracy, CrossEntropyLoss
from colossalai.registry import LOSSES

pytestmark = pytest.mark.unit


def test_accuracy_counts() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    correct = Accuracy()(logits, torch.tensor([1, 1, 1]))
    assert correct.item() == 2
    assert correct.dtype is torch.int64


def test_accuracy_counts_every_position_of_a_sequence() -> None:
    labels = torch.randint(5, (2, 7))
    logits = torch.nn.functional.one_hot(labels, 5).float()
    assert Accuracy()(logits, labels).item() == 14


def test_accuracy_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3\) do not fit labels of shape \(4, 1\)"):
        Accuracy()(torch.zeros(4, 3), torch.zeros(4, 1))


def test_cross_entropy_takes_the_arguments_of_torch() -> None:
    arguments = {"label_smoothing": 0.1, "ignore_index": 2, "reduction": "sum", "weight": torch.rand(3)}
    logits, labels = torch.randn(8, 3), torch.randint(3, (8,))
    wanted = torch.nn.CrossEntropyLoss(**arguments)(logits, labels)
    torch.testing.assert_close(CrossEntropyLoss(**arguments)(logits, labels), wanted, rtol=0, atol=0)
    assert LOSSES.get_module("CrossEntropyLoss") is CrossEntropyLoss


def test_pairs_have_the_mean_of_torch_as_ratio() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, 3, dtype=torch.float64)  # (batch, classes, positions)
    labels = torch.randint(4, (6, 3))
    labels[0] = labels[2:, 1] = -100
    weight = torch.rand(4, dtype=torch.float64)
    options: list[dict[str, Any]] = [
        {},
        {"label_smoothing": 0.2},
        {"weight": weight},
        {"weight": weight, "label_smoothing": 0.2, "ignore_index": 2},
    ]
    for chosen in options:
        target = labels.clamp(min=0) if "ignore_index" in chosen else labels
        total, count = CrossEntropyLoss(with_count=True, **chosen)(logits, target)
        torch.testing.assert_close(total / count, nn.CrossEntropyLoss(**chosen)(logits, target))
    shares = torch.softmax(torch.randn_like(logits), 1)
    total, count = CrossEntropyLoss(with_count=True)(logits, shares)
    torch.testing.assert_close(total / count, nn.CrossEntropyLoss()(logits, shares))
    total, count = CrossEntropyLoss(with_count=True)(logits, torch.full((6, 3), -100))
    assert (total.item(), count.item()) == (0.0, 0)
    with pytest.raises(ValueError, match="reduction is 'sum', but with_count=True"):
        CrossEntropyLoss(with_count=True, reduction="sum")
