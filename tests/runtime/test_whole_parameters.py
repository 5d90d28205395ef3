"""Optimizers that need whole parameters, where ranks hold slices: right by the spec, or refused by name."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
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
from tests.parity.subjects import experts
from tests.ranks import run_ranks
from tests.tensor.colo import gpt2
from tests.turns import in_turn

pytestmark = pytest.mark.dist
Build = Callable[[Any], torch.optim.Optimizer]
MEASURING: dict[str, Build] = {
    "Lamb": functools.partial(Lamb, lr=0.01, weight_decay=0.1),
    "Lars": functools.partial(Lars, lr=0.1, momentum=0.9, eeta=0.05, weight_decay=0.1),
}
CLIPPING: dict[str, Build] = {"FusedLAMB": functools.partial(FusedLAMB, lr=0.01, max_grad_norm=0.1)}


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


def tiny_gpt() -> nn.Module:
    """Return GPT-2 with fused query, key and value, a vocabulary that is padded, and tied embeddings."""
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 13}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops)).double()


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(step))


def train_tensors(zero_stage: int, tp_size: int, names: tuple[str, ...]) -> None:
    """Train by Hybrid and in one process, and compare all parameters."""
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(tp_size=tp_size, pp_size=1, zero_stage=zero_stage, precision="fp32")
    booster = Booster(plugin=plugin)
    num_parts, part = gpc.mesh.axis_size("dp"), gpc.mesh.axis("dp").rank
    for name, build in (MEASURING | CLIPPING).items():
        if name not in names:
            continue
        raw = tiny_gpt()
        twin = copy.deepcopy(raw)
        twin_optimizer = build(twin.parameters())
        model, optimizer, *_ = booster.boost(raw, build(raw.parameters()))
        for step in range(3):
            twin_optimizer.zero_grad()
            twin(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            twin_optimizer.step()
            optimizer.zero_grad()
            ids = tokens(step).chunk(num_parts)[part]
            booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
            optimizer.step()
        compare(name, raw, twin)
    gpc.destroy()


def compare(name: str, model: nn.Module, twin: nn.Module) -> None:
    expected = dict(twin.named_parameters())
    num_cut = 0
    for key, param in model.named_parameters():
        spec, wanted = spec_of(param), expected[key].detach()
        num_cut += bool(spec is not None and spec.axes)
        wanted = wanted if spec is None else spec.slice_of(wanted)
        torch.testing.assert_close(
            param.detach().as_subclass(torch.Tensor), wanted, rtol=0, atol=1e-10, msg=f"{name}: {key}"
        )
    assert num_cut


def test_norms_of_slices_are_those_of_wholes() -> None:
    run_ranks(train_tensors, 2, 0, 2, (*MEASURING, *CLIPPING))


def test_norms_of_slices_are_those_of_wholes_under_zero() -> None:
    run_ranks(train_tensors, 4, 1, 2, tuple(MEASURING))


def train_experts(zero_stage: int) -> None:
    """Train experts that two ranks share, by a config."""
    config: dict[str, Any] = {"parallel": {"moe": {"size": 2}}}
    if zero_stage:
        config["zero"] = {"stage": zero_stage}
    colossalai.launch_from_torch(config, verbose=False)
    for name, build in MEASURING.items():
        torch.manual_seed(0)
        twin = experts.Net().double()
        raw = experts.cut_copy(twin, gpc.mesh)
        twin_optimizer = build(twin.parameters())
        engine, *_ = colossalai.initialize(raw, build(raw.parameters()), nn.MSELoss(), verbose=False)
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for _ in range(3):
            twin_optimizer.zero_grad()
            twin(x).square().mean().backward()
            twin_optimizer.step()
            engine.zero_grad()
            engine.backward(engine(x.chunk(2)[gpc.mesh.axis("dp").rank]).square().mean())
            engine.step()
        compare(name, raw, twin)
    raw = experts.cut_copy(twin, gpc.mesh)
    with pytest.raises(ValueError, match=r"Adafactor holds blocks\.0\.experts\.weight"):
        colossalai.initialize(raw, torch.optim.Adafactor(raw.parameters()), nn.MSELoss(), verbose=False)
    dense = [param for param in raw.parameters() if spec_of(param) is None]
    colossalai.initialize(raw, torch.optim.Adafactor(dense), nn.MSELoss(), verbose=False)
    gpc.destroy()


def train_colo() -> None:
    """Train ColoParameters without Booster, and by it."""
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=0, precision="fp32")
    booster = Booster(plugin=plugin)
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
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=0, precision="fp32"))
    for build in REFUSED.values():
        raw = tiny_gpt()
        shapes = [param.shape for param in raw.parameters()]
        optimizer = build(raw.parameters())
        message = f"{type(optimizer).__name__} holds transformer.* a slice, .*declare_elementwise"
        with pytest.raises(ValueError, match=message):
            booster.boost(raw, optimizer)
        with pytest.raises(ValueError, match=message):
            colossalai.initialize(raw, optimizer, verbose=False)
        assert [param.shape for param in raw.parameters()] == shapes
    raw = tiny_gpt()
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


def test_norms_of_experts_are_those_of_wholes() -> None:
    run_ranks(in_turn, 2, [(train_experts, 0), (train_experts, 1)])


def test_norms_of_colo_parameters_are_those_of_wholes() -> None:
    run_ranks(train_colo, 2)


def test_optimizers_that_need_wholes_are_refused_by_name() -> None:
    run_ranks(refuse, 2)
