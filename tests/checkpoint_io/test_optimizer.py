"""Optimizers round trip bit for bit, by name, whatever the order of groups."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from colossalai.checkpoint_io import load_model, load_optimizer, parameter_names, save_model, save_optimizer
from tests.checkpoint_io.models import Tied, assert_same_state, every_format, overwrite, tied, train

pytestmark = pytest.mark.unit


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(AdamW, lr=1e-2, amsgrad=True),
    "fused": partial(Adam, lr=1e-2, fused=True),
    "tensor lr": partial(Adam, lr=torch.tensor(1e-2), foreach=False),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
}


def assert_same(one: Any, other: Any) -> None:
    """Compare nested state bit for bit, types and dtypes included."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other or math.isnan(one)


def split_groups(model: Tied, *, reverse: bool = False) -> list[dict[str, Any]]:
    """Two groups with a part of the parameters each, some in neither."""
    matrices = [model.embed.weight, model.hidden.weight, model.back.weight]
    vectors = [model.hidden.bias, model.back.bias]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.5}]
    if reverse:
        for group in groups:
            group["params"] = group["params"][::-1]
    return groups[::-1] if reverse else groups


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@every_format
def test_round_trip_and_go_on(
    make: Callable[[Any], Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    model, other = tied(seed=1), tied(seed=2)
    optimizer = make(model.parameters())
    train(model, optimizer, steps=range(2))
    save_model(model, tmp_path / "model")
    save_optimizer(optimizer, tmp_path / "x", param_names=parameter_names(model), **options)

    twin = make(other.parameters())
    twin.param_groups[0]["lr"] = 77.0
    train(other, twin, steps=range(1))
    load_model(other, tmp_path / "model")
    load_optimizer(twin, tmp_path / "x", param_names=parameter_names(other))
    assert_same(optimizer.state_dict(), twin.state_dict())
    assert train(model, optimizer, steps=range(2, 4)) == train(other, twin, steps=range(2, 4))
    assert_same_state(model, other)


def test_names_decide_not_the_order(tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=1)
    optimizer = Adam(split_groups(model), lr=1e-2)
    train(model, optimizer, steps=range(2))
    save_optimizer(optimizer, tmp_path / "x", param_names=parameter_names(model), prefix="net.")
    load_model(other, _saved(model, tmp_path / "model"))
    twin = Adam(split_groups(other, reverse=True), lr=3.0)
    load_optimizer(twin, tmp_path / "x", param_names=parameter_names(other))
    assert [group["lr"] for group in twin.param_groups] == [0.5, 1e-2]
    assert [group["weight_decay"] for group in twin.param_groups] == [0, 0.1]
    assert train(model, optimizer, steps=range(2, 4)) == train(other, twin, steps=range(2, 4))
    assert_same_state(model, other)


def test_lbfgs_whose_state_is_nested(tmp_path: Path) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.step(closure)
    names = parameter_names(model)
    save_optimizer(optimizer, tmp_path / "x", param_names=names)
    twin = torch.optim.LBFGS(model.parameters())
    load_optimizer(twin, tmp_path / "x", param_names=names)
    assert_same(optimizer.state_dict(), twin.state_dict())


def test_state_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1)
    master = torch.randn(2, 3)
    optimizer.state[model.weight] = {"master": master, "name": "w", "half": (1, 2.5, None)}
    optimizer.state["calls"] = {"count": 3}
    names = parameter_names(model)
    save_optimizer(optimizer, tmp_path / "x", param_names=names)
    twin = SGD(model.parameters(), lr=0.1)
    load_optimizer(twin, tmp_path / "x", param_names=names)
    assert torch.equal(twin.state[model.weight]["master"], master)
    assert twin.state[model.weight]["half"] == (1, 2.5, None)
    assert twin.state["calls"] == {"count": 3}
    assert model.bias not in twin.state


@every_format
def test_loaded_state_does_not_live_in_the_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = tied()
    optimizer = Adam(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    train(model, optimizer, steps=range(1))
    names = parameter_names(model)
    save_optimizer(optimizer, tmp_path / "x", param_names=names, **options)
    twin = Adam(model.parameters())
    load_optimizer(twin, tmp_path / "x", param_names=names)
    overwrite(tmp_path / "x")
    assert_same(optimizer.state_dict(), twin.state_dict())


def test_the_file_is_readable_by_itself(tmp_path: Path) -> None:
    model = tied()
    optimizer = Adam(model.parameters(), betas=(0.8, 0.9))
    train(model, optimizer, steps=range(1))
    save_optimizer(optimizer, tmp_path / "x", param_names=parameter_names(model))
    content = torch.load(tmp_path / "x", weights_only=True)
    exp_avg = optimizer.state[model.back.bias]["exp_avg"]
    assert torch.equal(content["state"]["back.bias"]["exp_avg"], exp_avg)
    assert content["param_groups"][0]["betas"] == (0.8, 0.9)
    assert content["param_groups"][0]["params"][0] == "embed.weight"


@pytest.mark.parametrize("options", [{"shard": True}, {"gather_dtensor": False}], ids=["shards", "slices"])
def test_model_and_optimizer_share_a_folder(options: dict[str, Any], tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    optimizer = Adam(model.parameters())
    train(model, optimizer, steps=range(1))
    for _ in range(2):
        save_model(model, tmp_path, **options)
        save_optimizer(optimizer, tmp_path, param_names=parameter_names(model), **options)
    if "gather_dtensor" in options:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "optimizer"]
    load_model(other, tmp_path)
    twin = Adam(other.parameters())
    load_optimizer(twin, tmp_path, param_names=parameter_names(other))
    assert_same_state(model, other)
    assert_same(optimizer.state_dict(), twin.state_dict())


def test_misfits_are_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    model = tied()
    optimizer = Adam([model.hidden.weight, model.hidden.bias, model.back.bias])
    save_optimizer(optimizer, tmp_path / "x", param_names=parameter_names(model))
    wider = Tied(width=9)
    twin = Adam([wider.hidden.weight, wider.hidden.bias, wider.head.weight], lr=9.0)
    twin.state[wider.head.weight]["step"] = 5
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_optimizer(twin, tmp_path / "x", param_names=parameter_names(wider))
    text = str(caught.value)
    assert "1 missing in the checkpoint: embed.weight" in text
    assert "1 unexpected in the checkpoint: back.bias" in text
    assert "hidden.weight: (5, 7) in the checkpoint, (5, 9) in the optimizer" in text
    assert twin.param_groups[0]["lr"] == 9.0
    assert twin.state[wider.head.weight] == {"step": 5}


def test_other_groups_are_named(tmp_path: Path) -> None:
    model = tied()
    names = parameter_names(model)
    save_optimizer(Adam(split_groups(model)), tmp_path / "x", param_names=names)
    one_group = Adam([parameter for group in split_groups(model) for parameter in group["params"]])
    with pytest.raises(ValueError, match=r"a group in the checkpoint .*: back.bias, hidden.bias\n") as caught:
        load_optimizer(one_group, tmp_path / "x", param_names=names)
    assert "a group of the optimizer is none of the checkpoint's: back.bias, back.weight" in str(caught.value)


def test_a_parameter_without_a_name_is_refused(tmp_path: Path) -> None:
    model = tied()
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 \(of shape \(5, 7\)\) has no name"):
        save_optimizer(
            SGD([model.embed.weight, model.hidden.weight]),
            tmp_path / "x",
            param_names={model.embed.weight: "e"},
        )
    twice = dict.fromkeys(model.parameters(), "same")
    with pytest.raises(ValueError, match="two parameters of the optimizer are called 'same'"):
        save_optimizer(SGD(model.parameters()), tmp_path / "x", param_names=twice)
    assert not (tmp_path / "x").exists()


def test_torch_s_own_file_and_a_model_are_named(tmp_path: Path) -> None:
    model = tied()
    optimizer = SGD(model.parameters())
    names = parameter_names(model)
    torch.save(optimizer.state_dict(), tmp_path / "own.pt")
    with pytest.raises(ValueError, match=r"own.pt: it is torch's own optimizer.state_dict\(\)"):
        load_optimizer(optimizer, tmp_path / "own.pt", param_names=names)
    for name in ("model.pt", "model.safetensors"):
        save_model(model, tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}: there is no optimizer in it"):
            load_optimizer(optimizer, tmp_path / name, param_names=names)


def test_state_outside_parameters_and_groups_is_refused(tmp_path: Path) -> None:
    class Counting(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "counter": 3}

    model = tied()
    with pytest.raises(ValueError, match=r"Counting.state_dict\(\) holds 'counter'"):
        save_optimizer(Counting(model.parameters()), tmp_path / "x", param_names=parameter_names(model))


def test_another_class_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tied()
    names = parameter_names(model)
    save_optimizer(Adam(model.parameters()), tmp_path / "x", param_names=names)
    load_optimizer(AdamW(model.parameters()), tmp_path / "x", param_names=names)
    assert "a state of Adam is loaded into AdamW" in capfd.readouterr().err


def _saved(model: nn.Module, path: Path) -> Path:
    save_model(model, path)
    return path
