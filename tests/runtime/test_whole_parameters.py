"""Optimizers that need whole parameters, where ranks hold slices: right by the spec, or refused by name."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.nn import FusedLAMB, Lamb, Lars
from colossalai.nn.parallel import Bucketed
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble
from colossalai.tensor import PaddedSpec, ProcessGroup, spec_of
from colossalai.zero import ColoInitContext
from tests.parity.experts.tasks import CUT_BY_HAND, cut_net
from tests.parity.tasks import language
from tests.parity.training import Run, check_runs, grouped_runs
from tests.ranks import run_ranks
from tests.shardformer.models import gpt2 as hugging_gpt2
from tests.tensor.colo import gpt2

pytestmark = pytest.mark.dist
Build = Callable[[Any], torch.optim.Optimizer]
MEASURING: dict[str, Build] = {
    "Lamb": functools.partial(Lamb, lr=0.01, weight_decay=0.1),
    "Lars": functools.partial(Lars, lr=0.1, momentum=0.9, eeta=0.05, weight_decay=0.1),
}
CLIPPING = functools.partial(FusedLAMB, lr=0.01, max_grad_norm=0.1)


class OfUsers(torch.optim.Optimizer):
    """An optimizer that no one has declared."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


REFUSED: dict[str, Build] = {
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
    "Adafactor": torch.optim.Adafactor,
    "TransformersAdafactor": lambda params: TransformersAdafactor(list(params)),
    "LBFGS": torch.optim.LBFGS,
    "OfUsers": OfUsers,
}


BY_HYBRID = functools.partial(HybridParallelPlugin, tp_size=2, pp_size=1, precision="fp32")


def of_slices(num_ranks: int, optimizer: Build, zero_stage: int = 0) -> Run:
    """Return a run of GPT-2: fused query, key and value, a padded vocabulary, tied embeddings."""
    task = replace(language(hugging_gpt2), optimizer=optimizer)
    plugin = functools.partial(BY_HYBRID, zero_stage=zero_stage)
    return Run(task=task, num_ranks=num_ranks, plugin=plugin, check=something_is_cut)


def something_is_cut(model: nn.Module) -> None:
    assert any(spec is not None and spec.axes for spec in map(spec_of, model.parameters()))


def of_experts(optimizer: Build, **config: Any) -> Run:
    """Return a run of experts that two ranks share."""
    task = replace(CUT_BY_HAND, optimizer=optimizer)
    return Run(task=task, num_ranks=2, config={"parallel": {"moe": 2}, **config}, check=something_is_cut)


RUNS = [
    of_slices(2, CLIPPING),
    *(of_slices(2, optimizer) for optimizer in MEASURING.values()),
    *(of_slices(4, optimizer, zero_stage=1) for optimizer in MEASURING.values()),
    *(of_experts(optimizer) for optimizer in MEASURING.values()),
    *(of_experts(optimizer, zero={"stage": 1}) for optimizer in MEASURING.values()),
]


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RUNS))
def test_norms_of_slices_are_those_of_wholes(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


def refuse_experts() -> None:
    for zero in ({}, {"zero": {"stage": 1}}):
        colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}, **zero}, verbose=False)
        raw = cut_net(gpc.mesh)
        with pytest.raises(ValueError, match=r"Adafactor holds blocks\.0\.ffn\.weight"):
            colossalai.initialize(raw, torch.optim.Adafactor(raw.parameters()), verbose=False)
        dense = [param for param in raw.parameters() if spec_of(param) is None]
        colossalai.initialize(raw, torch.optim.Adafactor(dense), verbose=False)
        gpc.destroy()


def train_colo() -> None:
    """Train ColoParameters without Booster, and by it."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=BY_HYBRID(zero_stage=0))
    group = ProcessGroup(tp_degree=2)
    for (name, build), is_boosted in zip(MEASURING.items(), (True, False), strict=True):
        twin = gpt2.build()
        twin_optimizer = build(twin.parameters())
        with ColoInitContext(device=torch.device("cpu"), default_pg=group):
            raw = gpt2.build()
        gpt2.cut(raw, group)
        optimizer: Any = build(raw.parameters())
        model: Any = raw
        if is_boosted:
            model, optimizer, *_ = booster.boost(raw, optimizer)
        for _ in range(3):
            twin_optimizer.zero_grad()
            gpt2.loss_of(twin, gpt2.batch(1, 0)).backward()
            twin_optimizer.step()
            optimizer.zero_grad()
            loss = gpt2.loss_of(model, gpt2.batch(1, 0))
            booster.backward(loss, optimizer) if is_boosted else loss.backward()
            optimizer.step()
        for (key, param), other in zip(raw.named_parameters(), twin.parameters(), strict=True):
            wanted = gpt2.slice_like(other.detach(), param)
            found = torch.Tensor(param.detach().data)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10, msg=f"{name}: {key}")
    with ColoInitContext(device=torch.device("cpu"), default_pg=group):
        raw = gpt2.build()
    gpt2.cut(raw, group)
    with pytest.raises(ValueError, match=r"Adafactor holds transformer\.wte\.weight"):
        booster.boost(raw, torch.optim.Adafactor(raw.parameters()))
    loss = gpt2.loss_of(raw, gpt2.batch(1, 0))
    loss.backward()
    before = [param.detach().data.clone() for param in raw.parameters()]
    for build in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=r"holds a parameter of shape .* a slice"):
            build(raw.parameters()).step(lambda: loss)
    for param, other in zip(raw.parameters(), before, strict=True):
        assert torch.equal(torch.Tensor(param.detach().data), torch.Tensor(other))
    gpc.destroy()


def refuse() -> None:
    """See each optimizer refused at both doors, the model as it was, and taken where nothing is cut."""
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch_from_torch(config, verbose=False)
    booster = Booster(plugin=BY_HYBRID(zero_stage=0))
    for build in REFUSED.values():
        raw = hugging_gpt2()
        shapes = [param.shape for param in raw.parameters()]
        optimizer = build(raw.parameters())
        message = f"{type(optimizer).__name__} holds transformer.* a slice, .*declare_elementwise"
        with pytest.raises(ValueError, match=message):
            booster.boost(raw, optimizer)
        with pytest.raises(ValueError, match=message):
            colossalai.initialize(raw, optimizer, verbose=False)
        assert [param.shape for param in raw.parameters()] == shapes
    raw = hugging_gpt2()
    norms = [param for name, param in raw.named_parameters() if "ln_" in name]
    booster.boost(raw, torch.optim.Adafactor(norms))
    gpc.destroy()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.LBFGS, "each stage of a pipeline has a part"),
        (functools.partial(FusedLAMB, max_grad_norm=0.5), r"clips to max_grad_norm=0\.5"),
    ],
)
def test_stages_have_other_parameters(build: Build, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = Mesh({"dp": 1, "pp": 2}, rank=0)
    plan = Plan(data=Bucketed(), pipeline=PipelineOptions(num_microbatches=2))
    with pytest.raises(ValueError, match=message):
        assemble(plan, model, build(model.parameters()), mesh=mesh, device=torch.device("cpu"))


@pytest.mark.unit
def test_padding_is_left_out() -> None:
    whole = torch.arange(1.0, 31.0).view(10, 3)
    found = []
    for rank in range(4):
        mesh = Mesh({"tp": 4}, rank=rank)
        spec = PaddedSpec((16, 3), (("tp",), ()), mesh, parts=(2, 1), unpadded=(10, 3))
        own = spec.slice_of(whole)
        own[own == 0] = 100.0
        found += [entry for box in spec.boxes_without_padding(own) for entry in box.flatten().tolist()]
    assert sorted(found) == whole.flatten().tolist()


def test_norms_of_colo_parameters_are_those_of_wholes() -> None:
    run_ranks(train_colo, 2)


def test_optimizers_that_need_wholes_are_refused_by_name() -> None:
    run_ranks(refuse, 2)
    run_ranks(refuse_experts, 2)
