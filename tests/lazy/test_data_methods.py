"""A model that was built lazily trains under every data method as one process trains the eager one."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.zero import zero_model_wrapper
from tests.parity.tasks import NET
from tests.parity.training import Run, check_runs
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

METHODS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO 1": {"zero": {"stage": 1}},
    "ZeRO 2": {"zero": {"stage": 2}},
    "FSDP": {"zero": {"stage": 3}},
    "a handler": {"gradient_handler": [{"type": "DataParallelGradientHandler"}]},
}


def lazily(eager: nn.Module) -> nn.Module:
    with LazyInitContext():
        return type(eager)()


def test_three_steps() -> None:
    task = replace(NET, place=lazily)
    check_runs(2, [(Run(task=task, num_ranks=2, config=config),) for config in METHODS.values()])


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
