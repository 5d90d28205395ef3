"""The loss and the metric that are not torch's."""

from __future__ import annotations

import pytest
import torch

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
