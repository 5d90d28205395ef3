"""Evaluation mode for a block of code: each module gets its own mode back."""

from __future__ import annotations

from typing import Self

import pytest
from torch import nn

from colossalai.tensor import evaluation_mode

pytestmark = pytest.mark.unit


class KeepsNormFrozen(nn.Sequential):
    """Freezes its norm in `train`, as users do."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the norm."""
        super().train(mode)
        self[0].eval()
        return self


def modes_of(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_each_module_has_its_own_mode_after_the_block() -> None:
    shared = nn.Dropout()
    model = nn.Sequential(
        nn.Sequential(shared, nn.Linear(2, 2)),
        nn.Sequential(nn.Sequential(nn.Dropout()), shared, nn.BatchNorm1d(2)).eval(),
        KeepsNormFrozen(nn.BatchNorm1d(2), nn.Dropout()).train(),
    )
    model[1][0].train()
    shared.train()
    model[0][1].eval()
    before = modes_of(model)
    with evaluation_mode(model):
        assert not any(modes_of(model))
    assert modes_of(model) == before
    assert before.count(True) == 7


@pytest.mark.parametrize("mode", [True, False])
def test_a_module_that_is_added_in_the_block_has_the_mode_of_the_model(mode: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).train(mode)

    def add_and_fail() -> None:
        with evaluation_mode(model):
            model.append(nn.Dropout().train(not mode))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        add_and_fail()
    assert modes_of(model) == [mode] * 3
