"""`booster.gathered_grads`: under every plugin the gradients of one process, whole, by name."""

import copy

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from tests.turns import run_each

pytestmark = pytest.mark.dist

GEMINI = {"min_chunk_size_mb": 0.001, "search_range_mb": 0.001, "hidden_dim": 8}
CELLS = {
    "ddp": lambda: Booster(plugin=TorchDDPPlugin()),
    "ddp fp16": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16_apex"),
    "fsdp": lambda: Booster(plugin=TorchFSDPPlugin()),
    "zero1": lambda: Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")),
    "zero2 fp16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=2**8)),
    "gemini": lambda: Booster(plugin=GeminiPlugin(precision="fp32", **GEMINI)),
    "tp": lambda: Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")),
}


def build() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **options)
    )


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def read(name: str) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = CELLS[name]()
    model = build()
    twin = copy.deepcopy(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    axis = gpc.mesh.axis("dp")
    tolerance = {"rtol": 0.05, "atol": 2e-3} if "16" in name else {"rtol": 1e-4, "atol": 1e-6}
    for step in range(2):
        ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(step))
        twin.zero_grad()
        optimizer.zero_grad()
        loss_of(twin, ids).backward()
        booster.backward(loss_of(model, ids.chunk(axis.size)[axis.rank]), optimizer)
        if step == 1:
            optimizer.clip_grad_by_norm(0.1)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        found = booster.gathered_grads(model)
        expected = {name: param.grad for name, param in twin.named_parameters()}
        assert set(found) == set(expected)
        for key, grad in expected.items():
            torch.testing.assert_close(found[key].float(), grad, **tolerance, msg=f"{name} {step} {key}")
            found[key].zero_()  # a copy
        again = booster.gathered_grads(model)
        assert any(grad.abs().sum() > 0 for grad in again.values())
        optimizer.step()
        with torch.no_grad():
            for param in twin.parameters():
                param -= 0.1 * param.grad
    for param in dict(model.named_parameters()).values():
        param.grad = None
    assert booster.gathered_grads(model) == {}


def test_they_are_those_of_one_process() -> None:
    run_each(2, read, [(name,) for name in CELLS])


def windows() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"), gradient_accumulation=2)
    torch.manual_seed(0)
    x, model = torch.randn(4, 3).double(), nn.Linear(3, 1).double()
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="has not been boosted"):
        booster.gathered_grads(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    twin(x).square().mean().backward()
    parts = x.chunk(4)[gpc.get_global_rank() :: 2]
    for number, part in enumerate(parts):
        booster.backward(model(part).square().mean(), optimizer)
        if number == 0:
            with pytest.raises(ValueError, match="last microbatch"):
                booster.gathered_grads(model)
        else:
            torch.testing.assert_close(booster.gathered_grads(model)["weight"], twin.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    bare, *_ = booster.boost(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="without an optimizer"):
        booster.gathered_grads(bare)


def test_those_of_a_window_are_complete_at_its_end() -> None:
    run_each(2, windows, [()])
