"""Every precision under ZeRO: as without it up to the rounding of gradients, and overflows skip all ranks."""

from unittest import mock

import pytest
import torch

import colossalai
from colossalai.amp import _precision
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import (
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    mixed_precision_factory,
)
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.logging import DistributedLogger
from colossalai.runtime import settings_of
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import SMALL, Net, batch_of, part_of

pytestmark = pytest.mark.dist

NUM_STEPS = 6
SCALE = 2.0**10

# What the plugin takes for the names that Booster takes.
PRECISIONS = {
    "fp32": "fp32",
    "bf16_master": "bf16",
    "fp16_naive": "fp16",
    "bf16": mixed_precision_factory("bf16"),
    "fp16": FP16TorchMixedPrecision(init_scale=SCALE),
}


def boosted(name: str, stage: int, **options):
    """Return what trains in a precision; stage 0 is DDP."""
    if stage:
        plugin = LowLevelZeroPlugin(
            stage,
            precision=PRECISIONS[name],
            reduce_bucket_size_in_m=SMALL,
            **({"initial_scale": SCALE} if name == "fp16_naive" else {}),
            **options,
        )
        booster = Booster(plugin=plugin)
    else:
        chosen = FP16NaiveMixedPrecision(initial_scale=SCALE) if name == "fp16_naive" else name
        booster = Booster(plugin=TorchDDPPlugin(), mixed_precision=chosen)
    torch.manual_seed(0)
    model = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return booster, model, optimizer


def losses_of(name: str, stage: int, *, forgets: bool = True, **options) -> list[float]:
    """Train; unless it forgets, backwards add to clipped gradients, and to those of the step before."""
    booster, model, optimizer = boosted(name, stage, **options)
    losses = []
    for step in range(NUM_STEPS):
        if forgets:
            optimizer.zero_grad()
        for number in range(1 if forgets else 2):
            loss = model(part_of(batch_of(step % 2).float())).square().mean()
            assert loss.dtype == torch.float32
            booster.backward(loss, optimizer)
            if number == 0 and not forgets:
                optimizer.clip_grad_by_norm(0.05)
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / torch.distributed.get_world_size())
    return losses


TOLERANCES = {"fp32": 1e-5, "bf16": 1e-5, "fp16": 1e-5, "bf16_master": 0.03, "fp16_naive": 0.01}


def compare(turn: int) -> None:
    """Precisions have the two stages by turns."""
    colossalai.launch_from_torch({}, verbose=False)
    for place, (name, tolerance) in enumerate(TOLERANCES.items()):
        stage = 1 + (place + turn) % 2
        for forgets in (True, False):
            expected, actual = (losses_of(name, each, forgets=forgets) for each in (0, stage))
            assert actual == pytest.approx(expected, rel=tolerance), (name, stage, forgets)
            assert not forgets or actual[-1] < 0.7 * actual[0], (name, stage)
    gpc.destroy()


# Without 16-bit weights only the order of sums differs. With them gradients are summed in float32 here and in
# 16 bits by DDP, which rounds them once more, by 2^-9 and 2^-11; AdamW turns that into as much of its update.
@pytest.mark.parametrize("turn", [0, further(1)])
def test_each_precision_is_that_of_ddp(turn: int) -> None:
    run_ranks(compare, 2, turn)


def low_communication() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    expected = {name: losses_of(name, 2) for name in ("fp32", "bf16_master")}
    for name, dtype, tolerance in (
        ("fp32", torch.bfloat16, 0.03),
        ("bf16_master", torch.float32, 0.03),
        ("fp32", torch.float16, 0.01),
    ):
        actual = losses_of(name, 2, communication_dtype=dtype)
        assert actual == pytest.approx(expected[name], rel=tolerance), (name, dtype)
    gpc.destroy()


def test_gradients_may_be_sent_in_another_dtype() -> None:
    run_ranks(low_communication, 2)


def overflow(name: str, stage: int) -> None:
    """An inf on one rank, in a slice that another one may own, skips the step on all."""
    colossalai.launch_from_torch({}, verbose=False)
    replicas = gpc.mesh.axis("dp")
    booster, model, optimizer = boosted(name, stage)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for step, factor in enumerate([float("inf"), float("nan"), 1.0]):
        optimizer.zero_grad()
        loss = model(batch_of(step).float()).square().mean()
        booster.backward(loss * (factor if replicas.rank == 1 else 1.0), optimizer)
        optimizer.step()
        assert optimizer.stepped == (factor == 1.0)
        same = [torch.equal(value, before[key]) for key, value in model.state_dict().items()]
        assert not any(same) if optimizer.stepped else all(same)
    assert optimizer.scaler.scale < SCALE
    mine = torch.cat([param.detach().float().flatten() for param in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    assert torch.equal(*both)
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["fp16", "fp16_naive"])
def test_an_overflow_skips_the_step_everywhere(name: str, stage: int) -> None:
    run_ranks(overflow, 2, name, stage)


def written_weights() -> None:
    """What is written into 16-bit parameters between steps is heard, wherever its slice is."""
    colossalai.launch_from_torch({}, verbose=False)
    booster, model, optimizer = boosted("bf16_master", 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    assert all((master == 0.5).all() for master in optimizer.state_dict()["masters"].values())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    booster.backward(model(batch_of(0).float()).square().mean(), optimizer)
    optimizer.step()
    assert all((param == 0.5).all() for param in model.parameters())
    model.unwrap().first.weight.data = torch.full((7, 5), 0.25, dtype=torch.bfloat16)  # other memory
    optimizer.zero_grad()
    booster.backward(model(batch_of(0).float()).square().mean(), optimizer)
    optimizer.step()
    assert (model.unwrap().first.weight == 0.25).all()
    gpc.destroy()


def weights_loaded_in_the_block(stage: int) -> None:
    """A checkpoint of a run without masters: its weights are loaded, and no master comes with the states."""
    colossalai.launch_from_torch({}, verbose=False)
    _, model, optimizer = boosted("bf16_master", stage)
    with optimizer.for_checkpoint() as raw, torch.no_grad():
        raw.state.clear()
        for param in model.parameters():
            param.fill_(0.5)
    assert all((param == 0.5).all() for param in model.parameters())
    assert all((master == 0.5).all() for master in optimizer.state_dict()["masters"].values())
    gpc.destroy()


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_that_are_loaded_without_masters(stage: int) -> None:
    run_ranks(weights_loaded_in_the_block, 2, stage)


def test_weights_that_are_written_between_steps() -> None:
    run_ranks(written_weights, 2)


def decide_on_each_rank(is_fast_on_first: bool) -> tuple[str, set[torch.dtype], list[str]]:
    """Boost with the default precision where processors differ, and return what was decided and logged."""
    colossalai.launch_from_torch({}, verbose=False)
    is_fast = is_fast_on_first == (gpc.get_global_rank() == 0)
    features = {"cpu_name": "Intel Xeon", "avx512_bf16": is_fast, "amx_bf16": is_fast}
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2))
    with (
        mock.patch.object(_precision, "cpu_features", return_value=features),
        mock.patch.object(torch.backends.mkldnn, "is_available", return_value=True),
        mock.patch.object(DistributedLogger, "_log") as log,
    ):
        torch.manual_seed(0)
        model = Net()
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        booster.boost(Net())  # the same, and not logged again
    loss = model(batch_of(0).float()).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    dtypes = {param.dtype for param in model.parameters()}
    saved = settings_of(booster.plan, booster.mesh, {})["plan"]["precision"]["type"]
    gpc.destroy()
    return saved, dtypes, [call.args[1] for call in log.call_args_list if "'auto'" in call.args[1]]


@pytest.mark.parametrize(
    ("is_fast", "dtype", "saved", "line"),
    [
        (True, torch.bfloat16, "PureBF16", "'bf16' here: the processor has amx_bf16. precision='fp32'"),
        (
            False,
            torch.float32,
            "FullPrecision",
            "'fp32' here: the processor has neither amx_bf16 nor avx512_bf16. precision='bf16'",
        ),
    ],
    ids=["fast", "slow"],
)
def test_rank_0_decides_the_default_for_all(is_fast: bool, dtype: torch.dtype, saved: str, line: str) -> None:
    first, second = run_ranks(decide_on_each_rank, 2, is_fast)
    assert first == (saved, {dtype}, [f"precision='auto' is {line} would be the other one"])
    assert second[:2] == first[:2]


def boost_low_model() -> tuple[str, set[torch.dtype]]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=LowLevelZeroPlugin())
    with mock.patch.object(_precision, "cpu_features", return_value={}):
        booster.boost(Net())  # another model's choice is its own
        model = Net().to(torch.bfloat16)
        _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    held = {param.dtype for group in optimizer.optim.param_groups for param in group["params"]}
    chosen = booster.plan.precision.label
    gpc.destroy()
    return chosen, held


def test_models_of_16_bits_keep_their_masters_on_slow_devices() -> None:
    assert run_ranks(boost_low_model, 2) == [("bf16 with fp32 masters", {torch.float32})] * 2


def load_other_precision(folder: str) -> str:
    colossalai.launch_from_torch({}, verbose=False)
    for precision in ("bf16", "fp32"):
        booster = Booster(plugin=LowLevelZeroPlugin(precision=precision))
        model = Net()
        model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        if precision == "bf16":
            booster.save_model(model, f"{folder}/weights")
            saved = [param.detach().float() for param in model.parameters()]
    with pytest.raises(ValueError, match="saved in another precision") as caught:
        booster.load_model(model, f"{folder}/weights")
    booster.load_model(model, f"{folder}/weights", strict=False)
    assert all(map(torch.equal, model.parameters(), saved))
    gpc.destroy()
    return str(caught.value)


def test_a_checkpoint_of_another_precision_says_so(tmp_path) -> None:
    text, _ = run_ranks(load_other_precision, 2, str(tmp_path))
    assert "precision= of a plugin" in text
