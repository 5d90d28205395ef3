"""Optimizer states under ZeRO are saved whole, and loaded under another number of ranks or without ZeRO."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.zero._states import StateExchange
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each
from tests.zero.test_training import build_optimizer
from tests.zero.training import Net, Warm, WarmWholes, assert_same, batch_of, part_of, plugin

pytestmark = pytest.mark.dist


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    return model, build_optimizer(name, model.parameters())


def plain_run(name: str, num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train without any of this."""
    model, optimizer = build(name)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def boosted(name: str, stage: int) -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=plugin(stage) if stage else TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(*build(name))
    return booster, model, optimizer


def train(booster: Booster, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        booster.backward(model(part_of(batch_of(step))).square().mean(), optimizer)
        optimizer.step()


def save(name: str, stage: int, folder: Path) -> None:
    booster, model, optimizer = boosted(name, stage)
    train(booster, model, optimizer, range(2))
    booster.save_model(model, folder / "model.pt")
    booster.save_optimizer(optimizer, folder / "optimizer.pt")
    train(booster, model, optimizer, range(2, 3))  # saving has changed nothing
    assert_same(model, plain_run(name, 3)[0], 2)
    gpc.destroy()


def load(name: str, stage: int, folder: Path) -> None:
    booster, model, optimizer = boosted(name, stage)
    if stage:
        train(booster, model, optimizer, range(5, 6))  # what is loaded takes the place of what is there
    booster.load_model(model, folder / "model.pt")
    booster.load_optimizer(optimizer, folder / "optimizer.pt")
    train(booster, model, optimizer, range(2, 4))
    assert_same(model, plain_run(name, 4)[0], 3)
    gpc.destroy()


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("AdamW", (1, 4), (2, 2)),
        further("AdamW", (2, 2), (0, 1)),
        further("AdamW", (0, 1), (1, 4)),
        further("SGD", (2, 4), (1, 2)),
        further("Adafactor", (1, 2), (2, 4)),
        ("Adafactor", (2, 4), (0, 1)),
    ],
)
def test_a_run_goes_on(name: str, saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path) -> None:
    """`saved` and `loaded` are a stage (0: without ZeRO) and a number of ranks."""
    run_ranks(save, saved[1], name, saved[0], tmp_path)
    run_ranks(load, loaded[1], name, loaded[0], tmp_path)


def state_dicts(name: str, stage: int) -> None:
    booster, model, optimizer = boosted(name, stage)
    train(booster, model, optimizer, range(2))
    plain, plain_optimizer = plain_run(name, 2)
    expected, actual = plain_optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    assert actual["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert state.keys() == actual["state"][number].keys()
        for key, value in state.items():
            torch.testing.assert_close(actual["state"][number][key], value, rtol=0, atol=1e-10)
    assert [group["params"] for group in actual["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]
    whole = weakref.ref(optimizer.state_dict()["state"][0][next(iter(expected["state"][0]))])
    gc.collect()
    assert whole() is None, "nothing holds whole states behind the call"
    train(booster, model, optimizer, range(2, 3))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(actual)
    train(booster, model, optimizer, range(2, 4))
    assert_same(model, plain_run(name, 4)[0], 3)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, the optimizer of \[9\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    gpc.destroy()


@pytest.mark.parametrize(("name", "stage"), [("AdamW", 1), ("Adafactor", 1), ("ASGD", 2), further("SGD", 2)])
def test_the_state_dict_is_that_of_one_process(name: str, stage: int) -> None:
    run_ranks(state_dicts, 2, name, stage)


def fail_in_a_state_dict() -> None:
    booster, model, optimizer = boosted("AdamW", 2)
    train(booster, model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())

    def failing(*_: object) -> dict[str, Tensor]:
        raise MemoryError("no memory for a whole state")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateExchange, "_whole", failing)
        with pytest.raises(MemoryError):
            optimizer.state_dict()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    gpc.destroy()


def test_a_failed_state_dict_loses_no_state() -> None:
    run_ranks(fail_in_a_state_dict, 2)


def after_some_steps(stage: int) -> None:
    """Boost an optimizer that has made steps: its states are cut."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=plugin(stage))
    model, optimizer, *_ = booster.boost(*plain_run("AdamW", 2))
    train(booster, model, optimizer, range(2, 4))
    assert_same(model, plain_run("AdamW", 4)[0], 3)
    gpc.destroy()


def test_an_optimizer_that_has_made_steps() -> None:
    run_ranks(after_some_steps, 2, 1)


def first_states(kind: type[Warm], stage: int, precision: str) -> None:
    """Boost an optimizer that has states before its first step, and load others before that step."""
    colossalai.launch_from_torch({}, verbose=False)
    twin, model = (
        build("SGD")[0].to(torch.float32 if precision == "bf16" else torch.float64) for _ in range(2)
    )
    twin_optimizer, optimizer = kind(twin.parameters()), kind(model.parameters())
    given = copy.deepcopy(twin_optimizer.state_dict())
    booster = Booster(plugin=plugin(stage, precision=precision))
    model, optimizer, *_ = booster.boost(model, optimizer)
    assert_same_states(optimizer.state_dict()["state"], given["state"])
    for state in given["state"].values():
        state["momentum_buffer"].neg_()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(given["state"])})
    assert_same_states(optimizer.state_dict()["state"], given["state"])
    if precision == "fp32":
        twin_optimizer.load_state_dict(given)
        for step in range(2):
            twin_optimizer.zero_grad()
            twin(batch_of(step)).square().mean().backward()
            twin_optimizer.step()
        train(booster, model, optimizer, range(2))
        assert_same(model, twin, 1)


def assert_same_states(found: dict[int, dict[str, Tensor]], wanted: dict[int, dict[str, Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for number, state in wanted.items():
        assert found[number].keys() == state.keys(), "masters are not among the states"
        assert torch.equal(found[number]["momentum_buffer"], state["momentum_buffer"]), number


def test_first_states_are_those_of_one_process() -> None:
    run_each(2, first_states, [(Warm, 1, "fp32"), (WarmWholes, 2, "fp32"), (Warm, 2, "bf16")])


def low_run(folder: Path, steps: range, starts: bool) -> dict[str, Tensor]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=LowLevelZeroPlugin(2, precision="bf16"))
    torch.manual_seed(0)
    model = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if not starts:
        booster.load_model(model, folder / "model.pt")
        booster.load_optimizer(optimizer, folder / "optimizer.pt")
    for step in steps:
        optimizer.zero_grad()
        booster.backward(model(batch_of(step).float()).square().mean(), optimizer)
        optimizer.step()
        if step == 1:
            booster.save_model(model, folder / "model.pt")
            booster.save_optimizer(optimizer, folder / "optimizer.pt")
    content = optimizer.state_dict()
    gpc.destroy()
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
    return {f"{number}": master.clone() for number, master in content["masters"].items()}


def test_float32_masters_go_on_bit_for_bit(tmp_path: Path) -> None:
    """On the same batch on all ranks, so that the number of ranks changes nothing."""
    (whole, _) = run_ranks(low_run, 2, tmp_path, range(4), True)
    for masters in run_ranks(low_run, 4, tmp_path, range(2, 4), False):
        assert masters.keys() == whole.keys()
        assert len(masters) == 9
        for name, master in masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(master, whole[name]), name
