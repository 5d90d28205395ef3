"""A model that was built lazily trains under every data method as one process trains the eager one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.testing import Subject, check_parity
from colossalai.zero import zero_model_wrapper
from tests.parity.subjects import doors, zero
from tests.parity.subjects.pipeline import slice_of_batch, subject_of
from tests.ranks import run_ranks
from tests.turns import run_each

pytestmark = pytest.mark.dist

METHODS = {
    "DDP": {},
    "ZeRO 1": {"zero": {"stage": 1}},
    "ZeRO 2": {"zero": {"stage": 2}},
    "FSDP": {"zero": {"stage": 3}},
    "a handler": {"gradient_handler": [{"type": "DataParallelGradientHandler"}]},
}


def train(config: dict[str, Any]) -> list[float]:
    colossalai.launch_from_torch(config, verbose=False)
    case = doors.make_case()

    def apply(eager: nn.Module) -> Subject:
        torch.manual_seed(case.seed)
        with LazyInitContext():
            model = doors.Net()
        model.double()
        if config.get("zero", {}).get("stage") in (1, 2):
            return zero.through_engine(case, model)
        optimizer = case.build_optimizer(model.parameters())
        engine, *_ = colossalai.initialize(model, optimizer, nn.functional.cross_entropy, verbose=False)

        def step(batch: tuple[Tensor, ...]) -> Tensor:
            engine.zero_grad()
            loss: Tensor = engine.criterion(engine(batch[0]), batch[1])
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return subject_of(engine.model, engine.optimizer, step)

    losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


def test_three_steps() -> None:
    for losses in run_each(2, train, [(config,) for config in METHODS.values()]):
        assert losses[0][-1] < losses[0][0]


def wrap() -> None:
    """The wrappers without a plan do not build models: they say who does."""
    colossalai.launch_from_torch({}, verbose=False)
    with LazyInitContext():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight .* has no values yet: call LazyInitContext.materialize"):
        zero_model_wrapper(model)
    gpc.destroy()


def test_what_cannot_materialize_refuses() -> None:
    run_ranks(wrap, 2)
