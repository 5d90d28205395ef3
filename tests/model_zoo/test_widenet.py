"""WideNet: what its layers share, and the documented script. Its parity: in tests/parity/experts/table.py."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.model_zoo.moe.models import VanillaFFN, Widenet, moe_mlp_args, moe_sa_args
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import NormalNoiseGenerator
from tests.parity.experts.tasks import TINY
from tests.ranks import run_ranks


@pytest.mark.unit
def test_what_layers_share() -> None:
    """One attention and one set of experts; two norms and a gate for each layer."""
    small, deep = (Widenet(4, 1.2, **{**TINY, "depth": depth}) for depth in (1, 5))
    difference = sum(p.numel() for p in deep.parameters()) - sum(p.numel() for p in small.parameters())
    assert difference == 4 * (2 * 2 * 8 + 4 * 8)
    blocks = list(deep.blocks)
    assert all(block.attention is blocks[0].attention for block in blocks)
    assert all(block.ffn.experts is blocks[0].ffn.experts for block in blocks)
    assert all(block.ffn.router is blocks[0].ffn.router for block in blocks)
    assert isinstance(blocks[0].ffn.router.noisy_func, NormalNoiseGenerator)
    assert blocks[0].ffn.router.capacity_factor_train == 1.2
    assert deep.eval()(torch.randn(2, 3, 8, 8)).shape == (2, 3)


@pytest.mark.unit
def test_the_documented_sizes() -> None:
    with torch.device("meta"):
        expert = VanillaFFN(**moe_mlp_args(d_model=768, d_ff=4096, drop_rate=0.1))
    assert sum(param.numel() for param in expert.parameters()) == 2 * 768 * 4096 + 768 + 4096
    assert moe_sa_args(768, 12, 64)["n_heads"] == 12


def losses_of_the_script() -> list[float]:
    """Train by the documented script, noise and dropout and all."""
    from colossalai.context.random import moe_set_seed

    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    moe_set_seed(42)
    model = Widenet(num_experts=4, capacity_factor=1.2, **TINY)
    criterion = MoeLoss(aux_weight=0.01, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)
    engine, *_ = colossalai.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), criterion, verbose=False
    )
    generator = torch.Generator().manual_seed(gpc.get_global_rank())
    x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
    losses = []
    for _ in range(30):
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    gpc.destroy()
    return losses


@pytest.mark.dist
def test_the_documented_script_learns() -> None:
    for losses in run_ranks(losses_of_the_script, 2):
        assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
