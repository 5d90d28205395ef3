"""Parameters cut over a part of the data-parallel ranks, as experts are, train as in one process.

Their gradients are summed over the ranks that hold the same slice, and divided by the number of all.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.amp import AMP_TYPE, Casts, OptimizerWrapper
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import DataParallelGradientHandler
from colossalai.nn.parallel import ArrivingParams, Bucketed, FullySharded, broadcast_from_first
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.subjects import doors, pipeline, zero
from tests.parity.subjects.experts import Experts, Net, cut_copy, make_batches
from tests.parity.subjects.pipeline import slice_of_batch
from tests.parity.subjects.tensor import whole
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped, in_turn

MAX_NORM = 0.2  # of a norm of about 1


class WholeSGD(torch.optim.SGD):
    """An optimizer that gets whole slices from ZeRO, and whose steps on them are those on the whole."""

    elementwise = False
    measures_wholes = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_case(**changes: Any) -> ParityCase:
    case = ParityCase(
        build_model=Net,
        build_optimizer=partial(torch.optim.AdamW, lr=0.05),
        compute_loss=loss_of,
        batches=make_batches(),
        max_norm=MAX_NORM,
    )
    return replace(case, **changes)


CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "handler": {"gradient_handler": [{"type": "DataParallelGradientHandler"}]},
    "zero 1": {"zero": {"stage": 1}},
    "zero 2": {"zero": {"stage": 2}},
    "fsdp": {"zero": {"stage": 3}},
}
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": partial(TorchDDPPlugin, gradient_as_bucket_view=True),
    "ddp unused": partial(TorchDDPPlugin, find_unused_parameters=True),
    "ddp static": partial(TorchDDPPlugin, static_graph=True),
    "zero 1": partial(LowLevelZeroPlugin, stage=1, precision="fp32", max_norm=MAX_NORM),
    "zero 2": partial(LowLevelZeroPlugin, stage=2, precision="fp32", max_norm=MAX_NORM),
    "fsdp": TorchFSDPPlugin,
}


def wholes(model: nn.Module, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    return {name: whole(param, of(param)) for name, param in model.named_parameters()}


def through_engine(case: ParityCase, accumulation: int, plain: nn.Module) -> Subject:
    model = cut_copy(plain, gpc.mesh)
    if gpc.config.get("zero") and gpc.config.zero.stage < 3:
        return zero.through_engine(case, model)
    subject = doors.through_engine(case, accumulation, model)
    return replace(
        subject,
        gradients=lambda: wholes(model, lambda param: param.grad),
        parameters=lambda: wholes(model, lambda param: param),
    )


def through_booster(
    case: ParityCase, method: str, accumulation: int, plain: nn.Module, *, all_sync: bool = False
) -> Subject:
    model = cut_copy(plain, gpc.mesh)
    if method.startswith("zero"):
        return zero.through_booster(case, PLUGINS[method](), accumulation, model, all_sync=all_sync)
    booster = Booster(plugin=PLUGINS[method]())
    boosted, optimizer, criterion, *_ = booster.boost(
        model, case.build_optimizer(model.parameters()), nn.functional.cross_entropy
    )

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        parts = list(zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True))
        for number, (x, y) in enumerate(parts):
            boosted.set_sync(all_sync or number == accumulation - 1)
            loss = criterion(boosted(x), y) / accumulation
            booster.backward(loss, optimizer)
            total += loss.detach()
        optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.step()
        return total

    return Subject(
        step=step,
        gradients=lambda: wholes(model, lambda param: param.grad),
        parameters=lambda: wholes(model, lambda param: param),
    )


def by_both_doors(method: str, accumulation: int) -> None:
    config = {**CONFIGS[method], "gradient_accumulation": accumulation, "clip_grad_norm": MAX_NORM}
    colossalai.launch_from_torch({**config, "parallel": {"moe": {"size": 2}}}, verbose=False)
    case = make_case()
    losses = check_parity(case, partial(through_engine, case, accumulation))
    assert losses[-1] < losses[0]
    if method in PLUGINS:
        assert check_parity(case, partial(through_booster, case, method, accumulation)) == losses
    gpc.destroy()


CELLS: list[Any] = [
    ("handler", 4),  # the others with layers of experts: in test_moe.py, and pairs with ZeRO 3
    *(
        further("fsdp", 4),
        further("ddp", 2),
        further("zero 1", 2),
        further("handler", 2),
        further("zero 2", 2),
        further("fsdp", 2),
        further("ddp", 4),
        further("zero 2", 4),
        further("zero 1", 4),
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "cells"), grouped(CELLS, lambda method, world_size: world_size))
def test_both_doors_against_one_process(world_size: int, cells: list[tuple[str, int]]) -> None:
    """On two ranks no other one holds the same expert: nothing is summed, and still divided by two."""
    accumulation = 2 if world_size == 4 else 1
    run_ranks(each_in_turn, world_size, by_both_doors, [(method, accumulation) for method, _ in cells])


def with_options_of_ddp() -> None:
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    case = make_case()
    losses = [
        check_parity(case, partial(through_booster, case, method, 1))
        for method in ("ddp unused", "ddp static")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    gpc.destroy()


def in_buckets(plain: nn.Module, case: ParityCase, *, all_sync: bool = False) -> Subject:
    """Buckets of a few parameters; all forwards come before the first backward, as in a pipeline."""
    model = cut_copy(plain, gpc.mesh)
    data = Bucketed(bucket_cap_mb=500 / 2**20).apply(
        model,
        blocks=[],
        replicas=gpc.mesh.axis("dp"),
        arriving=ArrivingParams(model, Casts(), torch.device("cpu")),
    )
    optimizer = OptimizerWrapper(case.build_optimizer(model.parameters()), max_norm=MAX_NORM)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        data.set_sync(all_sync)
        losses = [loss_of(model, part) / 2 for part in zip(*(t.chunk(2) for t in batch), strict=True)]
        losses[0].backward()
        if all_sync:
            data.finish()
        data.set_sync(True)
        losses[1].backward()
        data.finish()
        optimizer.step()
        return (losses[0] + losses[1]).detach()

    return Subject(
        step=step,
        gradients=lambda: wholes(model, lambda param: param.grad),
        parameters=lambda: wholes(model, lambda param: param),
    )


def through_handler(plain: nn.Module, case: ParityCase) -> Subject:
    """Means by a gradient handler after each of two backwards; an expert is frozen until the first step."""
    model = cut_copy(plain, gpc.mesh)
    experts = model.get_submodule("blocks.0.experts").requires_grad_(False)
    optimizer = OptimizerWrapper(case.build_optimizer(model.parameters()), max_norm=MAX_NORM)
    handler = DataParallelGradientHandler(model, optimizer)
    experts.requires_grad_(True)
    broadcast_from_first(model, gpc.mesh.axis("dp"))

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            loss = loss_of(model, part) / 2
            loss.backward()
            handler.handle_gradient()
            total += loss.detach()
        optimizer.step()
        return total

    return Subject(
        step=step,
        gradients=lambda: wholes(model, lambda param: param.grad),
        parameters=lambda: wholes(model, lambda param: param),
    )


def several_means_in_a_step(method: str) -> None:
    """Each backward of a window synchronizes: earlier means stay as they are."""
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    case = make_case()
    if method == "buckets":
        check_parity(case, partial(in_buckets, case=case, all_sync=True))
    elif method == "handler":
        check_parity(case, partial(through_handler, case=case))
    else:
        check_parity(case, partial(through_booster, case, method, 2, all_sync=True))
    gpc.destroy()


def local_gradients() -> None:
    """What autograd returns is not touched, and of two gradient handlers the one that is called averages."""
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    model = cut_copy(Net().double(), gpc.mesh)
    broadcast_from_first(model, gpc.mesh.axis("dp"))
    params = list(model.parameters())
    batch = tuple(part.chunk(2)[gpc.get_global_rank()] for part in make_batches(1)[0])
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


MEANS: list[Any] = [
    *((method, 4) for method in ("ddp", "ddp unused", "buckets", "handler", "zero 2")),
    *(further(method, 2) for method in ("ddp", "buckets", "handler", "fsdp", "zero 1", "zero 2")),
    *(further(method, 4) for method in ("ddp static", "zero 1", "fsdp")),
]


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "cells"), grouped(MEANS, lambda method, world_size: world_size))
def test_several_means_in_a_step(world_size: int, cells: list[tuple[str, int]]) -> None:
    run_ranks(each_in_turn, world_size, several_means_in_a_step, [(method,) for method, _ in cells])


def with_buckets() -> None:
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    case = make_case()
    check_parity(case, partial(in_buckets, case=case))
    gpc.destroy()


def in_a_pipeline() -> None:
    case = make_case()
    stages = {"pipeline": {"size": 2, "partition": "uniform"}, "moe": {"size": 2}}
    for zero_config in ({}, {"zero": {"stage": 1}}):
        config = {"parallel": stages, "NUM_MICRO_BATCHES": 2, "clip_grad_norm": MAX_NORM, **zero_config}
        colossalai.launch_from_torch(config, verbose=False)

        def apply(plain: nn.Module) -> Subject:
            through = zero.through_pipeline if gpc.config.get("zero") else pipeline.through_engine
            return through(case, cut_copy(plain, gpc.mesh))

        check_parity(case, apply, **slice_of_batch())
        gpc.destroy()


def whole_slices() -> None:
    """With an optimizer that takes no slices each parameter has one owner of those that hold it."""
    colossalai.launch_from_torch(
        {"parallel": {"moe": {"size": 2}}, "zero": {"stage": 1}, "clip_grad_norm": MAX_NORM}, verbose=False
    )
    case = make_case(build_optimizer=partial(WholeSGD, lr=0.5, momentum=0.9))
    check_parity(case, partial(through_engine, case, 1))
    gpc.destroy()


@pytest.mark.dist
def test_options_of_ddp_and_buckets_and_optimizers_of_whole_tensors() -> None:
    run_ranks(in_turn, 4, [(with_options_of_ddp,), (with_buckets,), (whole_slices,)])


@pytest.mark.long  # layers of experts in a pipeline, with ZeRO, are in test_pipeline.py
@pytest.mark.dist
def test_in_a_pipeline() -> None:
    run_ranks(in_a_pipeline, 4)


def low_precision(config: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], dict[int, Any]]:
    """Return weights in 16 bits, their masters, and the states, all of this rank, after a step."""
    colossalai.launch_from_torch({**config, "parallel": {"moe": {"size": 2}}}, verbose=False)
    torch.manual_seed(1024)
    plain = Net()
    model = cut_copy(plain, gpc.mesh).float()
    engine, *_ = colossalai.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), nn.functional.cross_entropy, verbose=False
    )
    x, y = (part.chunk(4)[gpc.get_global_rank()] for part in make_batches(1)[0])
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
    for config in ({}, CONFIGS["zero 1"]):
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


def one_step(folder: str, config: dict[str, Any], expert_size: int, first: int) -> dict[str, Tensor]:
    """Go on from a saved step, do one more, save; return the whole parameters."""
    config = {**config, "clip_grad_norm": MAX_NORM, "parallel": {"moe": {"size": expert_size}}}
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(1024)
    model = cut_copy(Net(), gpc.mesh)
    engine, *_ = colossalai.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), nn.functional.cross_entropy, verbose=False
    )
    if first:
        assert engine.load(folder).step == first
    x, y = make_batches(4)[first]
    rank, num_parts = gpc.mesh.axis_rank("dp"), gpc.data_parallel_size
    loss = engine.criterion(engine(x.double().chunk(num_parts)[rank]), y.chunk(num_parts)[rank])
    engine.backward(loss)
    engine.step()
    engine.save(folder, step=first + 1)
    params = wholes(engine.model, lambda param: param)
    gpc.destroy()
    return params


PLANS = [(4, "zero 1", 2), (1, "ddp", 1)]
THREE = [(4, "zero 1", 2), (4, "fsdp", 2), (1, "ddp", 1)]
FURTHER = [(4, "zero 1", 2), (1, "ddp", 1), (4, "fsdp", 2), (4, "ddp", 4)]


@pytest.mark.dist
@pytest.mark.parametrize("plans", [PLANS, further(THREE), further(FURTHER)])
def test_a_run_goes_on_under_other_plans(plans: list[tuple[int, str, int]], tmp_path: Path) -> None:
    torch.manual_seed(1024)
    plain = Net().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step, (world_size, method, expert_size) in enumerate(plans):
        x, y = make_batches(4)[step]
        optimizer.zero_grad()
        loss_of(plain, (x.double(), y)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()
        for params in run_ranks(one_step, world_size, str(tmp_path), CONFIGS[method], expert_size, step):
            for name, param in params.items():
                error = (param - plain.get_parameter(name)).abs().max()
                assert error <= 1e-10, (step, method, name)


class Mixed(Experts):
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
    FullySharded().check(Net(mesh), [], blocks=[], replicas=mesh.axis("dp"))
    alone = Mesh({"edp": 4, "ep": 1}, rank=0, views={"dp": ("edp", "ep")})
    FullySharded().check(nn.Sequential(Mixed(alone)), [], blocks=[], replicas=alone.axis("dp"))
