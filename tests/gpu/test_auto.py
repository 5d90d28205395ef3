"""Plans on an accelerator: rates are measured there, and a counted peak is what the allocator says."""

from typing import Any

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.auto_parallel import make_plan
from colossalai.auto_parallel.machine import measure_machine
from colossalai.booster import Booster
from colossalai.booster.plugin import AutoPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.auto_parallel.plan.models import RATES
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
BATCH, LENGTH, VOCAB = 8, 256, 4096


def gpt() -> GPT:
    sizes = {"hidden_size": 512, "num_layers": 6, "num_attention_heads": 8}
    return GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes, **RATES))


def arguments() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}


def planned_and_run(share: float | None) -> dict[str, Any]:
    colossalai.launch_from_torch({}, verbose=False)
    profile = measure_machine(dtypes=(torch.float32,), seconds=3.0, show_progress=False)
    how: dict[str, Any] = {"optimizer": "adamw", "profile": profile}
    free = make_plan(gpt(), arguments(), **how)
    budget = None if share is None else share * free.peak_bytes
    plan = make_plan(gpt(), arguments(), memory_budget=budget, **how)
    model = gpt()
    booster = Booster(plugin=AutoPlugin(plan))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    device = gpc.device
    ids = torch.randint(VOCAB, (BATCH, LENGTH), device=device)
    for _ in range(3):
        torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        booster.backward(loss, optimizer)
        optimizer.step()
        peak = torch.accelerator.max_memory_allocated()
    name = torch.get_device_module(device).get_device_name()
    gpc.destroy()
    assert profile.rates.device == name
    return {
        "predicted": plan.peak_bytes,
        "counted": plan.counted_bytes,
        "allocated": peak,
        "budget": budget,
    }


@pytest.mark.parametrize("share", [None, 0.7])
def test_a_step_takes_the_bytes_of_its_plan(share: float | None) -> None:
    (found,) = run_ranks(planned_and_run, 1, share)
    print(found)
    assert found["allocated"] == pytest.approx(found["predicted"], rel=0.25)
    if share is not None:
        assert found["allocated"] <= 1.02 * found["budget"]
