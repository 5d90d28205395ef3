"""Which parameter overflowed first, the history of the scale, and the end of a run that only skips."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.amp import (
    AMP_TYPE,
    DynamicLossScaler,
    OptimizerGroup,
    OptimizerWrapper,
    RepeatedOverflowError,
    ScaleRecord,
    StaticLossScaler,
    precision_of,
)
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

INF = float("inf")


def make_scaler(**options):
    defaults = {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    return DynamicLossScaler(**{**defaults, **options})


def make_wrapped(scaler, *, order=None):
    """Three parameters, in the optimizer in another order than in the model."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    names = {param: f"p{number}" for number, param in enumerate(params)}
    held = [params[number] for number in order or (2, 1, 0)]
    return params, OptimizerWrapper(
        torch.optim.SGD(held, lr=1.0), group=OptimizerGroup(scaler), param_names=names
    )


def step(params, optimizer, bad=()):
    optimizer.zero_grad()
    optimizer.backward(sum(param.sum() for param in params))
    for number, value in bad:
        params[number].grad[1] = value
    optimizer.step()


@pytest.mark.unit
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_first_in_the_models_order_is_named(order, capfd):
    params, optimizer = make_wrapped(make_scaler(), order=order)
    step(params, optimizer, [(2, INF), (1, float("nan"))])
    errors = capfd.readouterr().err
    assert errors.count("WARNING") == 1
    assert "step 1: skipped for inf or nan in the gradient of 'p1' on rank 0; loss scale 8, now 4" in errors


@pytest.mark.unit
def test_skips_in_a_row_are_two_lines(capfd):
    """The first at once, the rest in a summary; each by itself in the history, and with `verbose`."""
    params, optimizer = make_wrapped(make_scaler(init_scale=2.0**20))
    for bad in [(), *(13 * [[(0, INF)]]), ()]:
        step(params, optimizer, bad)
    lines = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(lines) == 2
    assert "step 2: skipped for inf or nan in the gradient of 'p0' on rank 0; loss scale" in lines[0]
    assert "steps 2 to 14 were skipped for inf or nan in gradients; loss scale 1.04858e+06 before" in lines[1]
    assert lines[1].endswith("now 128")
    assert len(optimizer.scaler.history) == 13
    step(params, optimizer, [(0, INF)])
    step(params, optimizer)
    assert capfd.readouterr().err.count("WARNING") == 1, "a single one needs no summary"
    for options, expected in [({"verbose": True}, 3), ({"quiet": True}, 0)]:
        params, optimizer = make_wrapped(make_scaler(**options))
        for bad in [[(0, INF)], [(0, INF)], [(0, INF)], ()]:
            step(params, optimizer, bad)
        assert capfd.readouterr().err.count("WARNING") == expected
    params, optimizer = make_wrapped(make_scaler(max_consecutive_skips=0))
    for _ in range(250):
        step(params, optimizer, [(0, INF)])
    assert capfd.readouterr().err.count("were skipped") == 2, "without a bound they may never end"


@pytest.mark.unit
def test_what_has_no_name_or_no_elements(capfd):
    param, empty = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0))
    optimizer = OptimizerWrapper(torch.optim.SGD([empty, param], lr=1.0), group=OptimizerGroup(make_scaler()))
    step([param, empty], optimizer)
    assert optimizer.stepped
    optimizer.zero_grad()
    optimizer.backward((param * INF).sum())
    optimizer.step()
    assert "the gradient of '<not a parameter of the model>' on rank 0" in capfd.readouterr().err


@pytest.mark.unit
def test_the_history():
    params, optimizer = make_wrapped(make_scaler())
    for bad in [(), (), (), [(0, INF)], ()]:
        step(params, optimizer, bad)
    history = optimizer.scaler.history
    assert history == (
        ScaleRecord(2, 16.0, "2 steps without overflow"),
        ScaleRecord(4, 8.0, "skipped for inf or nan in the gradient of 'p0' on rank 0"),
    )
    twin = make_scaler()
    twin.load_state_dict(optimizer.scaler.state_dict())
    assert (twin.history, twin.num_steps, twin.scale) == (history, 5, 8.0)
    twin.load_state_dict({"scale": 4.0, "good_steps": 1, "overflows": 0})  # as it was saved before
    assert (twin.history, twin.num_steps, twin.scale, twin.good_steps) == ((), 0, 4.0, 1)
    for _ in range(300):
        twin.update(stepped=True)
    assert len(twin.history) == 100
    assert [record.step for record in twin.history[-2:]] == [297, 299]


@pytest.mark.unit
@pytest.mark.parametrize(
    "scaler", [make_scaler(max_consecutive_skips=3), StaticLossScaler(4.0, max_consecutive_skips=3)]
)
def test_too_many_skips_in_a_row_stop(scaler):
    params, optimizer = make_wrapped(scaler)
    for bad in [[(0, INF)], [(0, INF)], (), [(1, INF)], [(1, INF)]]:
        step(params, optimizer, bad)
    with pytest.raises(RepeatedOverflowError, match=r"3 steps in a row .* step 6: skipped .* 'p1' on rank 0"):
        step(params, optimizer, [(1, INF)])
    step(params, optimizer)
    assert optimizer.stepped
    assert scaler.num_skips_in_a_row == 0


@pytest.mark.unit
def test_the_count_goes_on_from_a_checkpoint():
    scaler, twin = (make_scaler(max_consecutive_skips=2) for _ in range(2))
    scaler.update(stepped=False)
    twin.load_state_dict(scaler.state_dict())
    with pytest.raises(RepeatedOverflowError):
        twin.update(stepped=False)


@pytest.mark.unit
@pytest.mark.parametrize("bound", [0, 7])
def test_the_bound_is_an_option_of_every_precision(bound):
    precisions = [
        *(precision_of(mode, {"max_consecutive_skips": bound}) for mode in (AMP_TYPE.TORCH, "naive", "apex")),
        FP16NaiveMixedPrecision(max_consecutive_skips=bound).precision(),
        FP16TorchMixedPrecision(max_consecutive_skips=bound).precision(),
        precision_of("apex", {"opt_level": "O3", "max_consecutive_skips": bound}),
    ]
    for precision in precisions:
        scaler = precision.make_scaler()
        scaler.quiet = True
        for _ in range(bound - 1 if bound else 60):
            scaler.update(stepped=False)
        if bound:
            with pytest.raises(RepeatedOverflowError, match="7 steps in a row"):
                scaler.update(stepped=False)
    with pytest.raises(ValueError, match="max_consecutive_skips is -1"):
        make_scaler(max_consecutive_skips=-1)


def on_ranks():
    """Rank 1 has an inf in the last parameter first, then rank 0 in the last and rank 1 in the first."""
    colossalai.launch_from_torch(config={}, verbose=False)
    precision = FP16TorchMixedPrecision(init_scale=16.0, max_consecutive_skips=3)
    booster = Booster(mixed_precision=precision, plugin=TorchDDPPlugin())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    grads = dict(model.named_parameters())
    rank = gpc.get_global_rank()
    reasons, num_messages, error = [], [], ""
    for bad in [None, {1: "1.bias"}, {0: "1.bias", 1: "0.weight"}, {0: "0.bias", 1: "0.bias"}]:
        optimizer.zero_grad()
        booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
        if bad and rank in bad:
            grads[bad[rank]].grad.view(-1)[-1] = INF
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
            mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
        ):
            try:
                optimizer.step()
            except RepeatedOverflowError as caught:
                error = str(caught)
        num_messages.append((reduce.call_count, broadcast.call_count))
        reasons.append(optimizer.scaler.history[-1].reason if optimizer.scaler.history else "")
    gpc.destroy()
    return reasons, num_messages, error


def in_a_pipeline():
    """An inf on the second stage, then also in the last parameter of the first, which comes before."""
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    config["fp16"] = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**4}
    colossalai.launch_from_torch(config=config, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    stage = model[:2] if gpc.mesh.axis("pp").rank == 0 else model[2:]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(stage, optimizer, nn.CrossEntropyLoss(), verbose=False)
    for bad_ranks in [{1}, {0, 1}]:
        engine.zero_grad()
        engine.execute_schedule(iter([(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))]))
        params = list(engine.model.unwrap().parameters())
        if gpc.get_global_rank() in bad_ranks:
            params[1 - gpc.get_global_rank()].grad.view(-1)[0] = INF
        engine.step()
    reasons = [record.reason for record in engine.optimizer.scaler.history]
    gpc.destroy()
    return reasons


def under_zero(stage):
    """An inf in one element: after the reduction, one rank alone has it in its slice."""
    colossalai.launch_from_torch(config={}, verbose=False)
    precision = FP16NaiveMixedPrecision(initial_scale=16.0)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision=precision))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = [param for param in model.parameters() if param.dim() == 2]
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for first in (0, 1):
        optimizer.zero_grad()
        loss = boosted(torch.ones(2, 4)).sum()
        for weight in weights[first:]:
            loss = loss + weight.flatten()[-1].float() * INF
        booster.backward(loss, optimizer)
        optimizer.step()
    reasons = [record.reason for record in optimizer.scaler.history]
    gpc.destroy()
    return reasons


def words(name, rank):
    return f"skipped for inf or nan in the gradient of {name!r} on rank {rank}"


@pytest.mark.dist
def test_ranks_name_the_same_parameter_and_stop_together():
    expected = ["", words("1.bias", 1), words("0.weight", 1), words("0.bias", 0)]
    (reasons, num_messages, error), other = run_ranks(on_ranks, 2)
    assert other == (reasons, num_messages, error)
    assert reasons == expected
    assert num_messages == [(1, 0)] * 4  # the name costs nothing
    assert "3 steps in a row were skipped" in error
    assert words("0.bias", 0) in error


@pytest.mark.dist
def test_stages_tell_each_other_the_name():
    reasons, other_reasons = run_ranks(in_a_pipeline, 2)
    assert reasons == other_reasons == [words("2.weight", 1), words("0.bias", 0)]


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 2])
def test_slices_have_the_names_of_their_parameters(stage):
    reasons, other_reasons = run_ranks(under_zero, 2, stage)
    assert reasons == other_reasons
    for reason, name in zip(reasons, ("0.weight", "1.weight"), strict=True):
        assert reason in (words(name, 0), words(name, 1))
