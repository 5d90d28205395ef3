"""Any schedule on any number of ranks computes what one process computes."""

import copy
import itertools

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.pipeline.execution._executor import PipelineExecutor
from colossalai.pipeline.execution._microbatches import microbatch_weights, split_batch
from colossalai.pipeline.schedules._generators import make_schedule
from colossalai.pipeline.stages._stage import PipelineStage
from tests.tiers import further
from tests.turns import run_each

pytestmark = pytest.mark.dist

WIDTH = 5
NUM_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2, "interleaved": 2}


class Plain(nn.Module):
    """A tensor in, a tensor out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.layers(x)


class Masked(Plain):
    """A tuple with an integer mask that travels along, and a float that needs no gradient."""

    def forward(self, x, mask=None, scale=None):
        if mask is None:
            mask, scale = (x.sum(-1, keepdim=True) > 0).long(), x.detach().abs().mean(-1, keepdim=True)
        return super().forward(x) * (1 + mask) * scale, mask, scale


class Named(Plain):
    """A dict, with a constant, a tensor of no use and an entry of the data that every stage takes."""

    def forward(self, x, shift, factor=1.0, unused=None):
        return {"x": super().forward(x) * factor + shift, "factor": 0.5, "unused": x * 2}


class Own(PipelineStage):
    def __init__(self):
        super().__init__()
        self.plain = Plain()

    def forward(self, received, data):
        return self.plain(data["x"] if received is None else received) + data["shift"]


KINDS = {"plain": Plain, "masked": Masked, "named": Named, "own": Own}


def data_of(kind, num_samples, *, inner=(3,), seed=1):
    torch.manual_seed(seed)
    x = torch.randn(num_samples, *inner, WIDTH, dtype=torch.float64)
    if kind in ("named", "own"):
        return {"x": x, "shift": torch.randn(num_samples, *inner, 1, dtype=torch.float64)}
    return x


def first_of(output):
    if isinstance(output, dict):
        return output["x"]
    return output[0] if isinstance(output, tuple) else output


def loss_of(output):
    return first_of(output).square().mean()


def stages_of(kind, count):
    torch.manual_seed(0)
    return [KINDS[kind]().double() for _ in range(count)]


def through(stages, data):
    """Run all stages in one process."""
    value = None
    for stage in stages:
        if isinstance(stage, Own):
            value = stage(value, data)
        elif isinstance(stage, Named):
            value = stage(**({"x": data["x"]} if value is None else value), shift=data["shift"])
        else:
            value = stage(*(value if isinstance(value, tuple) else (data if value is None else value,)))
    return value


def executor_of(stages, name, **options):
    axis = gpc.mesh.axis("pp")
    chunks = NUM_CHUNKS[name]
    schedule = make_schedule(name, axis.size, 2 * axis.size, None)
    return PipelineExecutor(
        [stages[stage] for stage in schedule.stages_of(axis.rank)],
        axis,
        make_schedule=lambda count: make_schedule(name, axis.size, count, chunks),
        device=torch.device("cpu"),
        **options,
    ), schedule.stages_of(axis.rank)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def parity(name, kind, size, num_samples, inner_sizes, options):
    colossalai.launch_from_torch({"parallel": {"pipeline": size}}, verbose=False)
    twins = stages_of(kind, size * NUM_CHUNKS[name])
    stages = copy.deepcopy(twins)
    executor, mine = executor_of(stages, name, **options)
    for step, inner in enumerate(inner_sizes):
        batch = data_of(kind, num_samples, inner=inner, seed=step)
        parts = split_batch(batch, 2 * size)
        weights = microbatch_weights(parts)
        result = executor.run(
            parts,
            compute_loss=lambda output, _: loss_of(output),
            loss_factors=[3 * weight for weight in weights],
            keep_outputs=True,
        )
        expected = through(twins, batch)
        loss = loss_of(expected)
        (loss * 3).backward()
        if gpc.mesh.axis("pp").rank == (0 if name == "zb-v" else size - 1):
            close(sum(w * found for w, found in zip(weights, result.losses, strict=True)), loss)
            close(torch.cat([first_of(output) for output in result.outputs]), first_of(expected))
            assert not any(first_of(output).requires_grad for output in result.outputs)
        else:
            assert result.outputs is None
            assert result.losses is None
        for stage in mine:
            for param, other in zip(stages[stage].parameters(), twins[stage].parameters(), strict=True):
                close(param.grad, other.grad)
    gpc.destroy()
    return executor.peak_live


@pytest.mark.parametrize("size", [further(2), 4])
def test_parity(size):
    cases = [(name, "plain", size, 4 * size, [(3,)], {}) for name in NUM_CHUNKS]
    peaks = dict(zip(NUM_CHUNKS, run_each(size, parity, cases), strict=True))
    assert peaks["1f1b"] == [[size - rank] for rank in range(size)]
    assert peaks["gpipe"] == [[2 * size]] * size


SCHEDULES, OUTPUTS = ("1f1b", "zb-v", "interleaved"), ("masked", "named", "own")


@pytest.mark.parametrize(
    "cells",
    [[*zip(SCHEDULES, OUTPUTS, strict=True)], further([*itertools.product(SCHEDULES, OUTPUTS)])],
    ids=["few", "all"],
)
def test_nested_outputs_uneven_microbatches_and_changing_shapes(cells):
    run_each(2, parity, [(name, kind, 2, 11, [(3,), (4, 2), (3,)], {}) for name, kind in cells])


def test_fixed_shapes():
    options = {"tensor_shape": (2, 3, WIDTH), "dtype": torch.float64}
    run_each(2, parity, [(name, "plain", 2, 8, [(3,), (3,)], options) for name in ("1f1b", "zb-v")])
