"""Parameters cut over a part of the data-parallel ranks, as experts are, below the doors and in 16 bits.

Their training through the doors: in the table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.amp import AMP_TYPE, Casts, OptimizerWrapper
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import DataParallelGradientHandler
from colossalai.nn.parallel import ArrivingParams, Bucketed, FullySharded, broadcast_from_first
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.experts.tasks import CutExperts, cut_net, sequences, shifted_copy
from tests.parity.training import whole
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped

MAX_NORM = 0.2  # of a norm of about 1


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def wholes(model: nn.Module, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    return {name: whole(param, of(param)) for name, param in model.named_parameters()}


def check(window: Callable[[nn.Module, Any], Callable[..., Tensor]]) -> None:
    """Train with windows of two microbatches.

    Args:
        window: Called with the model and its optimizer; returns a function of the microbatches of a step,
            which makes the gradients and returns the loss.
    """
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    case = ParityCase(
        build_model=cut_net,
        build_optimizer=partial(torch.optim.AdamW, lr=0.05),
        compute_loss=loss_of,
        batches=sequences(),
        max_norm=MAX_NORM,
    )

    def apply(plain: nn.Module) -> Subject:
        model = shifted_copy(plain)
        optimizer = OptimizerWrapper(case.build_optimizer(model.parameters()), max_norm=MAX_NORM)
        run = window(model, optimizer)

        def step(batch: tuple[Tensor, ...]) -> Tensor:
            optimizer.zero_grad()
            total = run(list(zip(*(tensor.chunk(2) for tensor in batch), strict=True)))
            optimizer.step()
            return total.detach()

        return Subject(
            step=step,
            gradients=lambda: wholes(model, lambda param: param.grad),
            parameters=lambda: wholes(model, lambda param: param),
        )

    check_parity(case, apply)


def in_buckets(model: nn.Module, optimizer: Any, *, syncs_always: bool) -> Callable[..., Tensor]:
    """Buckets of a few parameters; all forwards come before the first backward, as in a pipeline."""
    data = Bucketed(bucket_cap_mb=500 / 2**20).apply(
        model,
        blocks=[],
        replicas=gpc.mesh.axis("dp"),
        arriving=ArrivingParams(model, Casts(), torch.device("cpu")),
    )

    def run(parts: list[tuple[Tensor, ...]]) -> Tensor:
        data.set_sync(syncs_always)
        losses = [loss_of(model, part) / 2 for part in parts]
        losses[0].backward()
        if syncs_always:
            data.finish()
        data.set_sync(True)
        losses[1].backward()
        data.finish()
        return losses[0] + losses[1]

    return run


def by_handler(model: nn.Module, optimizer: Any) -> Callable[..., Tensor]:
    """Means by a gradient handler after each of two backwards; an expert is frozen until the first step."""
    experts = model.get_submodule("blocks.0.ffn").requires_grad_(False)
    handler = DataParallelGradientHandler(model, optimizer)
    experts.requires_grad_(True)
    broadcast_from_first(model, gpc.mesh.axis("dp"))

    def run(parts: list[tuple[Tensor, ...]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            loss = loss_of(model, part) / 2
            loss.backward()
            handler.handle_gradient()
            total += loss.detach()
        return total

    return run


in_one_sum, at_each = (partial(in_buckets, syncs_always=value) for value in (False, True))
CELLS: list[Any] = [
    (in_one_sum, 4),
    (at_each, 4),
    (by_handler, 4),
    further(at_each, 2),
    further(by_handler, 2),
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "cells"), grouped(CELLS, lambda window, num_ranks: num_ranks))
def test_means_of_microbatches(num_ranks: int, cells: list[tuple[Any, int]]) -> None:
    run_ranks(each_in_turn, num_ranks, check, [(window,) for window, _ in cells])


def local_gradients() -> None:
    """What autograd returns is not touched, and of two gradient handlers the one that is called averages."""
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    model = shifted_copy(cut_net().double())
    broadcast_from_first(model, gpc.mesh.axis("dp"))
    params = list(model.parameters())
    batch = tuple(part.chunk(2)[gpc.get_global_rank()] for part in sequences(1)[0])
    batch = batch[0].double(), batch[1]
    before = torch.autograd.grad(loss_of(model, batch), params)
    optimizer = OptimizerWrapper(torch.optim.SGD(params, lr=0.1))
    handlers = [DataParallelGradientHandler(model, optimizer) for _ in range(2)]
    loss_of(model, batch).backward()
    handlers[1].handle_gradient()
    first = [param.grad.clone() for param in params]
    for param, grad in zip(params, before, strict=True):
        param.grad = grad.clone()
    handlers[1].handle_gradient()
    for param, grad in zip(params, first, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=1e-12)
    handlers[0].handle_gradient()
    Booster(plugin=TorchDDPPlugin()).boost(model, torch.optim.SGD(params, lr=0.1))
    after = torch.autograd.grad(loss_of(model, batch), params)
    assert all(map(torch.equal, after, before))
    gpc.destroy()


@pytest.mark.dist
def test_gradients_that_no_reduction_has_seen_are_those_of_torch() -> None:
    run_ranks(local_gradients, 2)


def low_precision(config: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], dict[int, Any]]:
    """Return weights in 16 bits, their masters, and the states, all of this rank, after a step."""
    colossalai.launch_from_torch({**config, "parallel": {"moe": {"size": 2}}}, verbose=False)
    torch.manual_seed(1024)
    plain = cut_net()
    model = shifted_copy(plain).float()
    engine, *_ = colossalai.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), nn.functional.cross_entropy, verbose=False
    )
    x, y = (part.chunk(4)[gpc.get_global_rank()] for part in sequences(1)[0])
    engine.backward(engine.criterion(engine(x), y))
    assert engine.step()
    content = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(content)
    again = engine.optimizer.state_dict()
    for number, state in content["state"].items():
        assert all(torch.equal(again["state"][number][key], value) for key, value in state.items())
    for name, now in wholes(model, lambda param: param).items():  # a step of AdamW is at most its rate
        assert (now - plain.get_parameter(name)).abs().max() < 0.06, name
    weights = [param.detach().clone() for param in model.parameters()]
    masters = [master.clone() for _, master in sorted(content["masters"].items())]
    gpc.destroy()
    return weights, masters, content["state"]


@pytest.mark.dist
def test_ranks_that_hold_the_same_expert_have_the_same_bits() -> None:
    """Masters start equal among them, stay so, and are the same with ZeRO, whose states go out whole."""
    results = []
    for config in ({}, {"zero": {"stage": 1}}):
        of_ranks = run_ranks(
            low_precision, 4, {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**8}, **config}
        )
        for first, other in ((0, 2), (1, 3)):  # along `edp`
            for mine, theirs in zip(of_ranks[first][:2], of_ranks[other][:2], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        is_same = [torch.equal(a, b) for a, b in zip(of_ranks[0][1], of_ranks[1][1], strict=True)]
        assert is_same.count(False) == 4  # two weights, two biases of experts
        results.append(of_ranks[1])
    (_, masters, states), (_, zero_masters, zero_states) = results
    assert [m.shape for m in masters] == [m.shape for m in zero_masters]
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(masters, zero_masters, strict=True))
    assert {n: {key: v.shape for key, v in state.items()} for n, state in states.items()} == {
        n: {key: v.shape for key, v in state.items()} for n, state in zero_states.items()
    }


class Mixed(CutExperts):
    """Experts with a weight of their own that is not cut."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.unit
def test_fsdp_says_what_it_cannot_shard_together() -> None:
    mesh = Mesh({"edp": 2, "ep": 2}, rank=0, views={"dp": ("edp", "ep")})
    model = nn.Sequential(Mixed(mesh))
    with pytest.raises(
        ValueError, match=r"0 has parameters of its own that different ranks share.*a module of"
    ):
        FullySharded().check(model, [], blocks=[], replicas=mesh.axis("dp"))
    FullySharded().check(cut_net(mesh), [], blocks=[], replicas=mesh.axis("dp"))
    alone = Mesh({"edp": 4, "ep": 1}, rank=0, views={"dp": ("edp", "ep")})
    FullySharded().check(nn.Sequential(Mixed(alone)), [], blocks=[], replicas=alone.axis("dp"))
