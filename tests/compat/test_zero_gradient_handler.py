"""`ZeROGradientHandler`: the backward sends all gradients; the handler waits, and the step sends none."""

from functools import partial

import pytest
import torch
from torch import nn

import colossalai
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import ZeROGradientHandler
from tests.turns import run_each

pytestmark = pytest.mark.dist


class HalfUsed(nn.Module):
    """A model with a parameter that no backward reaches, so that its bucket waits for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.rest = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def train(stage: int, with_handler: bool) -> tuple[list[int], torch.Tensor]:
    """Return the numbers of reductions in a backward, in the handler and in a step, and the weights."""
    config = {"zero": {"stage": stage}}
    if with_handler:
        config["gradient_handler"] = [{"type": "ZeROGradientHandler"}]
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(0)
    model = HalfUsed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
    counts = []
    x = torch.full((4, 3), 1.0 + gpc.get_global_rank())
    for _ in range(2):
        engine.zero_grad()
        loss = engine.criterion(engine(x), torch.zeros(4, 2))
        handlers = [handler.handle_gradient for handler in engine.gradient_handlers]
        for act in (partial(engine.backward, loss), *handlers, engine.step):
            with ledger() as book:
                act()
            counts.append(book.count("reduce_scatter"))
    weights = torch.cat([param.detach().flatten() for param in engine.model.parameters()])
    gpc.destroy()
    return counts, weights


def test_it_ends_the_reduction() -> None:
    found = run_each(2, train, [(stage, with_handler) for stage in (1, 2) for with_handler in (True, False)])
    for with_handler, without in ((found[0], found[1]), (found[2], found[3])):
        for (counts, weights), (plain, expected) in zip(with_handler, without, strict=True):
            assert counts == [1, 0, 0] * 2
            assert plain == [1, 0] * 2
            assert torch.equal(weights, expected)


def test_without_zero_it_is_refused() -> None:
    model = HalfUsed()
    with pytest.raises(ValueError, match="needs an optimizer under ZeRO"):
        ZeROGradientHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
