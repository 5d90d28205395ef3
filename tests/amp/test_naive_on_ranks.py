"""Low precisions over several ranks, by the config door."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.core import global_context as gpc
from colossalai.tensor import spec_of
from tests.model_zoo.tiny import build, criterion_of, make_batch
from tests.tiers import further
from tests.turns import run_each

pytestmark = pytest.mark.dist

NUM_STEPS = 12


def make_gpt():
    # Ranks start apart on purpose: the doors make them equal, masters included. Slices of one tensor do not.
    seed = 7 if gpc.mesh.axis_size("dp") == 1 else gpc.get_global_rank()
    torch.manual_seed(seed)
    model = build("gpt")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), criterion_of("gpt")


def my_batches():
    dp = gpc.mesh.axis("dp")
    for step in range(NUM_STEPS):
        yield tuple(part.chunk(dp.size)[dp.rank] for part in make_batch("gpt", 8, step % 2))


def masters_of(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {optimizer.param_names[param]: param for param in params}


def through_engine(parallel, fp16):
    config = {"parallel": parallel, "clip_grad_norm": 1.0, "gradient_accumulation": 2}
    if fp16 is not None:
        config["fp16"] = fp16
    colossalai.launch_from_torch(config=config, verbose=False)
    model, optimizer, criterion = make_gpt()
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    losses = []
    for ids, labels in my_batches():
        engine.zero_grad()
        loss = engine.criterion(engine(ids), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    masters = masters_of(engine.optimizer)
    cut = {name for name, master in masters.items() if spec_of(master) is not None}
    gpc.destroy()
    return losses, {name: master.detach() for name, master in masters.items()}, cut


# 11 bits: 0.05 % per operation, some thirty in a row, over 6 updates; bfloat16 keeps 8 bits
TOLERANCES = {AMP_TYPE.NAIVE: 0.02, AMP_TYPE.TORCH: 0.05, AMP_TYPE.BF16: 0.05}


@pytest.mark.parametrize("parallel", [{"tensor": {"size": 2, "mode": "1d"}}, {}], ids=["tp", "dp"])
def test_the_config_door_follows_float32(parallel):
    fp16 = {mode: {"mode": mode} for mode in TOLERANCES}
    fp16[AMP_TYPE.NAIVE]["initial_scale"] = 2.0**10
    reference, *found = run_each(2, through_engine, [(parallel, each) for each in (None, *fp16.values())])
    for of_mode, tolerance in zip(found, TOLERANCES.values(), strict=True):
        for (losses, _, cut), (expected, _, cut_before) in zip(of_mode, reference, strict=True):
            assert losses == pytest.approx(expected, rel=tolerance)
            assert losses != expected
            assert losses[-1] < losses[0]
            assert cut == cut_before
            assert bool(cut) == bool(parallel)
        (_, first, _), (_, second, _) = of_mode
        assert parallel or all(torch.equal(first[name], second[name]) for name in first)


def through_a_pipeline(fp16):
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4, "clip_grad_norm": 1.0}
    if fp16:
        config["fp16"] = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10, "hysteresis": 1}
    colossalai.launch_from_torch(config=config, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    stage = model[:2] if gpc.mesh.axis("pp").rank == 0 else model[2:]
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    engine, *_ = colossalai.initialize(stage, optimizer, nn.CrossEntropyLoss(), verbose=False)
    generator = torch.Generator().manual_seed(gpc.mesh.axis("dp").rank)
    losses, stepped = [], []
    for step in range(12):
        x = torch.randn(16, 8, generator=generator)
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([(x, x[:, :4].argmax(1))]))
        params = list(engine.model.unwrap().parameters())
        if step == 10 and gpc.get_global_rank() == 0:
            params[0].grad.view(-1)[0] = float("inf")
        engine.step()
        losses.append(loss.item())
        stepped.append(engine.optimizer.stepped)
    kinds = {(param.dtype, param.grad.dtype) for param in params}
    gpc.destroy()
    return losses, stepped, kinds


@pytest.mark.parametrize("world_size", [further(2), 4])
def test_a_pipeline_follows_float32(world_size):
    for (losses, stepped, kinds), (expected, *_) in zip(
        *run_each(world_size, through_a_pipeline, [(True,), (False,)]), strict=True
    ):
        # 11 bits: 0.05 % per operation, some ten in a row, over 10 updates
        assert losses[:11] == pytest.approx(expected[:11], rel=0.01)
        assert losses != expected
        assert stepped == [True] * 10 + [False, True]  # an overflow on one stage, on one replica
        assert kinds == {(torch.float16, torch.float32)}
