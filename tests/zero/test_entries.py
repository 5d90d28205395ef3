"""How many functions a step enters for each parameter: what does not change between steps is lowered once."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

PACKAGE = Path(colossalai.__file__).parent
FOLDERS = tuple(str(PACKAGE / each) for each in ("zero", "nn/parallel"))


def entered(plugin: Plugin, num_layers: int) -> Counter[str]:
    """Return how often the third step of a model enters each function of `FOLDERS`."""
    booster = Booster(plugin=plugin)
    raw = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            found[frame.f_code.co_qualname] += 1

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        optimizer.zero_grad()
        booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
    sys.setprofile(None)
    return found


def twice_the_layers() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    plugins: dict[str, Plugin] = {
        "DDP": TorchDDPPlugin(),
        "ZeRO 1": LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=1.0),
        "ZeRO 2": LowLevelZeroPlugin(stage=2, precision="fp32", max_norm=1.0),
    }
    for name, plugin in plugins.items():
        few, many = entered(plugin, 4), entered(plugin, 8)
        assert many - few == {"_on_grad": 8}, (name, many - few)  # one hook of a weight, one of a bias
    gpc.destroy()


def test_a_step_enters_one_function_for_each_gradient() -> None:
    run_ranks(twice_the_layers, 2)
