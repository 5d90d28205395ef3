"""Bytes per rank and bytes sent are those of the formulas (1910.02054), at 1, 2 and 4 ranks."""

import gc
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.zero import _bucket_grads
from colossalai.zero._layout import FlatBucket
from colossalai.zero._placeholder import GradPlaceholder
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.settling import settled

pytestmark = pytest.mark.dist

WIDTH = 64
TOLERANCE = 0.05


class Bytes(NamedTuple):
    """Bytes per parameter of the model."""

    params: float
    grads: float
    states: float


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*itertools.chain(*((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))))


def storage_bytes(tensors) -> int:
    """Return the bytes of the memory behind tensors, each piece once."""
    return sum(
        {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )


def measure(stage: int, precision: str, num_microbatches: int, wanted_grads: float) -> Bytes:
    """Train two steps, and count before the last gradients are forgotten; they alone are to be left."""
    colossalai.launch_from_torch({}, verbose=False)
    if stage:
        booster = Booster(plugin=LowLevelZeroPlugin(stage, precision=precision, reduce_bucket_size_in_m=0.02))
    else:
        named = {"bf16": "bf16_master"}.get(precision, precision)
        booster = Booster(plugin=TorchDDPPlugin(gradient_as_bucket_view=True), mixed_precision=named)
    model = build()
    num_params = sum(param.numel() for param in model.parameters())
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(num_microbatches):
            if number < num_microbatches - 1:
                with booster.no_sync(model):
                    booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
            else:
                booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        optimizer.step()
    params = list(model.parameters())
    held = [param for group in optimizer.param_groups for param in group["params"]]
    in_model = {param.untyped_storage().data_ptr() for param in params}
    masters = [param for param in held if param.untyped_storage().data_ptr() not in in_model]
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    known = {tensor.untyped_storage().data_ptr() for tensor in (*params, *masters, *states)}

    def rest() -> float:  # whatever there is beside
        found = [
            tensor
            for tensor in gc.get_objects()
            if isinstance(tensor, torch.Tensor)
            and not isinstance(tensor, GradPlaceholder)
            and tensor.is_floating_point()
            and tensor.numel() > 1
            and tensor.untyped_storage().data_ptr() not in known
        ]
        return storage_bytes(found) / num_params

    grads = settled(rest, lambda num_bytes: num_bytes <= (1 + TOLERANCE) * wanted_grads)
    gpc.destroy()
    held_bytes = storage_bytes([*masters, *states])
    return Bytes(storage_bytes(params) / num_params, grads, held_bytes / num_params)


@pytest.mark.parametrize("num_ranks", [further(1), 2, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("precision", "num_microbatches"), [("bf16", 1), ("bf16", 3), ("fp32", 1)])
def test_bytes_per_rank(num_ranks: int, stage: int, precision: str, num_microbatches: int) -> None:
    element, state = (2, 12) if precision == "bf16" else (4, 8)
    grads = element if stage == 1 else element / num_ranks
    for found in run_ranks(measure, num_ranks, stage, precision, num_microbatches, grads):
        assert tuple(found) == pytest.approx((element, grads, state / num_ranks), rel=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [further(1), further(2), 4])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_per_rank_without_zero(num_ranks: int, precision: str) -> None:
    """Stage 0 is data parallelism; with masters it has float32 gradients beside those that are sent."""
    element, state = (2, 12) if precision == "bf16" else (4, 8)
    grads = 4 if precision == "fp32" or num_ranks == 1 else 4 + 2
    for found in run_ranks(measure, num_ranks, 0, precision, 1, grads):
        assert tuple(found) == pytest.approx((element, grads, state), rel=TOLERANCE)


@pytest.mark.unit
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_command_says_the_same(num_ranks: int, stage: int, precision: str) -> None:
    """`colossalai memory`, for what the tests above have measured."""
    from colossalai.cli._memory._report import TrainingSetup, report_of  # 0.2 s that no rank needs
    from colossalai.cli._memory._shape import shape_of

    report = report_of(
        shape_of("gpt2-small"),
        TrainingSetup(
            **{"dp": num_ranks, "tp": 1, "pp": 1, "zero": stage, "batch": 1, "seq": 8},
            precision="bf16_master" if precision == "bf16" else precision,
            recompute=False,
            has_scores=False,
        ),
    )
    named = {row.name: row.num_bytes / report.shape.num_params for row in report.states}
    grads = named.pop("gradients") + named.pop("gradients in float32", 0)
    element, state = (2, 12) if precision == "bf16" else (4, 8)
    measured = {0: 4 if precision == "fp32" or num_ranks == 1 else 6, 1: element, 2: element / num_ranks}
    assert grads == pytest.approx(measured[stage])
    assert named.pop("parameters") == element
    assert sum(named.values()) == pytest.approx(state / (num_ranks if stage else 1))


def sent(stage: int, num_microbatches: int) -> tuple[float, float, float, int]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=LowLevelZeroPlugin(stage, precision="fp32", reduce_bucket_size_in_m=0.02))
    model = build()
    num_params = sum(param.numel() for param in model.parameters())
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with ledger() as book:
        for _ in range(num_microbatches - 1):
            with booster.no_sync(model):
                booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        quiet = book.num_bytes()
        booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        optimizer.step()
    unit = 4 * num_params
    gpc.destroy()
    return (
        quiet / unit,
        book.num_bytes("reduce_scatter") / unit,
        book.num_bytes("all_gather") / unit,
        int(book.num_bytes("all_reduce")),
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("stage", "num_microbatches"), [further(1, 1), (1, 3), further(2, 1), (2, 3)])
def test_bytes_sent(num_ranks: int, stage: int, num_microbatches: int) -> None:
    """2 Psi in all, on a ring of n ranks (n-1)/n of that; with stage 2 gradients once per microbatch."""
    share = (num_ranks - 1) / num_ranks
    rounds = num_microbatches if stage == 2 else 1
    for quiet, scattered, gathered, marks in run_ranks(sent, num_ranks, stage, num_microbatches):
        assert scattered == pytest.approx(rounds * share)
        assert gathered == pytest.approx(share)
        assert marks == 2 * share * 8  # one byte for each of 8 parameters
        assert quiet <= (rounds - 1) * share
        assert (quiet == 0) == (rounds == 1)


def buckets_in_sendable_memory() -> tuple[int, int]:
    """Return the number of flat gradients, and of those from `empty_to_send`, in a backward under ZeRO 2."""
    colossalai.launch_from_torch({}, verbose=False)
    model = build()
    flats, allocated, allocate, views_of = set(), set(), _bucket_grads.empty_to_send, FlatBucket.views

    def recorded(*args, **kwargs):
        flat = allocate(*args, **kwargs)
        allocated.add(flat.data_ptr())
        return flat

    def views(bucket, flat):
        flats.add(flat.data_ptr())
        return views_of(bucket, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bucket_grads, "empty_to_send", recorded)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        patch.setattr(FlatBucket, "views", views)  # of gradients from here on, not of parameters
        booster.backward(model(torch.ones(2, WIDTH)).sum(), optimizer)
        optimizer.step()  # waits for the sums, of which the other rank may have some to start
    gpc.destroy()
    return len(flats), len(flats & allocated)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_are_in_memory_that_others_can_read(num_ranks: int) -> None:
    for num_flats, num_allocated in run_ranks(buckets_in_sendable_memory, num_ranks):
        assert num_flats > 0
        assert num_allocated == (0 if num_ranks == 1 else num_flats)  # one rank sends nothing
