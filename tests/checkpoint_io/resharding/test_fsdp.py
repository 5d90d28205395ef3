"""Two ranks, plain and under FSDP: saved under one, loaded under the other; errors reach every rank."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam

from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_checkpoint,
    load_model,
    load_optimizer,
    load_training_state,
    parameter_names,
    save_checkpoint,
    save_model,
    save_optimizer,
    save_training_state,
)
from tests.checkpoint_io.models import Tied, assert_same_state, tied, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

TOLERANCE = 1e-12  # float64; both ranks have the same batch, so the mean of their gradients is the gradient
FORMATS: dict[str, dict[str, Any]] = {
    "file": {},
    "safetensors": {"use_safetensors": True},
    "shards": {"shard": True, "size_per_shard": 0.0005},
    "safetensors-shards": {"shard": True, "size_per_shard": 0.0005, "use_safetensors": True},
}
# The axes of the mesh: all ranks cut, or all ranks replicate.
MESHES = {"fsdp": (2,), "hsdp": (2, 1)}


@contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def sharded(seed: int, layout: str = "fsdp") -> Tied:
    model = tied(seed=seed)
    names = ("replicate", "shard") if layout == "hsdp" else ("shard",)
    mesh = init_device_mesh("cpu", MESHES[layout], mesh_dim_names=names)
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def assert_close(state: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE)


def save_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    names = parameter_names(model)
    for name, options in FORMATS.items():
        save_model(model, folder / f"{name}-model", **options)
        save_optimizer(optimizer, folder / f"{name}-optimizer", param_names=names, **options)
    save_checkpoint(folder / "all.pt", 2, model, optimizer)


def save_sharded(folder: Path, layout: str) -> list[float]:
    with group():
        model = sharded(1, layout)
        optimizer = Adam(model.parameters(), lr=1e-2)
        train(model, optimizer, steps=range(2))
        with torch.no_grad():
            model(torch.arange(11))  # leaves the root's parameters gathered, which must not be what is saved
        save_everywhere(model, optimizer, folder)
        return train(model, optimizer, steps=range(2, 4))


LAYOUTS = [pytest.param(name, marks=[pytest.mark.long] * (name == "hsdp")) for name in MESHES]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_under_fsdp_loaded_in_one_process(layout: str, tmp_path: Path) -> None:
    losses = run_ranks(save_sharded, 2, tmp_path, layout)
    twin = tied(seed=1)
    twin_optimizer = Adam(twin.parameters(), lr=1e-2)
    train(twin, twin_optimizer, steps=range(2))
    twin.eval()(torch.arange(11))
    for name in FORMATS:
        model = tied(seed=2)
        optimizer = Adam(model.parameters())
        load_model(model, tmp_path / f"{name}-model")
        load_optimizer(optimizer, tmp_path / f"{name}-optimizer", param_names=parameter_names(model))
        ours = train(model, optimizer, steps=range(2, 4))
        assert ours == pytest.approx(losses[0], abs=TOLERANCE)
    model = tied(seed=2)
    optimizer = Adam(model.parameters())
    assert load_checkpoint(tmp_path / "all.pt", model, optimizer) == 2
    assert train(model, optimizer, steps=range(2, 4)) == pytest.approx(losses[1], abs=TOLERANCE)


def load_sharded(folder: Path, layout: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    results = []
    with group():
        for name in FORMATS:
            model = sharded(2, layout)
            optimizer = Adam(model.parameters())
            load_model(model, folder / f"{name}-model")
            load_optimizer(optimizer, folder / f"{name}-optimizer", param_names=parameter_names(model))
            results.append((train(model, optimizer, steps=range(2, 4)), full_state(model)))
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_in_one_process_loaded_under_fsdp(layout: str, tmp_path: Path) -> None:
    model = tied(seed=1)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=range(2))
    save_everywhere(model, optimizer, tmp_path)
    losses = train(model, optimizer, steps=range(2, 4))
    for results in run_ranks(load_sharded, 2, tmp_path, layout):
        for their_losses, state in results:
            assert their_losses == pytest.approx(losses, abs=TOLERANCE)
            assert_close(state, model)


def round_trip_bit_for_bit(folder: Path) -> None:
    """Save, load into another, save again, on two ranks: the same values, plain and sharded."""
    with group():
        for number, make in enumerate([tied, sharded]):
            model, other = make(1), make(2)
            optimizer, twin = Adam(model.parameters()), Adam(other.parameters(), lr=7.0)
            train(model, optimizer, steps=range(2))
            names, other_names = parameter_names(model), parameter_names(other)
            save_model(model, folder / f"{number}")
            save_optimizer(optimizer, folder / f"{number}-optimizer", param_names=names)
            load_model(other, folder / f"{number}")
            load_optimizer(twin, folder / f"{number}-optimizer", param_names=other_names)
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert type(mine) is type(theirs)
                for key, value in {**optimizer.state[mine], "parameter": mine}.items():
                    copy = {**twin.state[theirs], "parameter": theirs}[key]
                    assert type(value) is type(copy), key
                    assert torch.equal(local(value), local(copy)), key
            assert train(model, optimizer, steps=range(2, 4)) == train(other, twin, steps=range(2, 4))


def local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.long  # both ways in every format are above, and the same bits in the training state below
def test_round_trip_is_exact(tmp_path: Path) -> None:
    run_ranks(round_trip_bit_for_bit, 2, tmp_path)


def errors_reach_every_rank(folder: Path) -> list[tuple[str, str]]:
    with group():
        rank = dist.get_rank()
        model = sharded(1)
        optimizer = Adam(model.parameters())
        names = parameter_names(model)
        below_a_file = folder / "file" / "x"
        only_here = folder / "model" if rank == 0 else folder / "gone"
        state = TrainingState(model=model)
        actions = [
            lambda: save_model(model, below_a_file),
            lambda: save_model(model, below_a_file, shard=True),
            lambda: save_optimizer(optimizer, below_a_file, param_names=names),
            lambda: save_checkpoint(below_a_file, 1, model),
            lambda: save_training_state(below_a_file, state, step=1),
            lambda: save_model(model, folder),
            lambda: load_model(model, only_here),
            lambda: load_model(model, folder / "other"),
        ]
        told = []
        for action in actions:
            with pytest.raises((OSError, ValueError)) as caught:
                action()
            told.append((type(caught.value).__name__, str(caught.value)))
        return told


def test_errors_reach_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save_model(tied(seed=1), tmp_path / "model")
    save_model(nn.Linear(2, 2), tmp_path / "other")
    told = run_ranks(errors_reach_every_rank, 2, tmp_path)
    for mine, theirs in zip(told[0][:5], told[1][:5], strict=True):
        assert mine[0] == "NotADirectoryError"
        assert theirs == ("OSError", f"rank 0: {mine[1]}")
        assert f"cannot write {tmp_path}/file/x" in mine[1]
    assert "is a folder, a file is to be written" in told[0][5][1]
    assert told[1][5] == ("ValueError", f"rank 0: {told[0][5][1]}")
    assert told[0][6][1].startswith("rank 1: [Errno 2]")
    assert told[1][6][0] == "FileNotFoundError"
    assert [rank[7][0] for rank in told] == ["ValueError", "ValueError"]
    assert "missing in the checkpoint: embed.weight" in told[1][7][1]


def fail_in_the_second_shard(folder: Path) -> str:
    with group():
        model = sharded(3)
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="bytes needed") as caught:
            save_model(model, folder, shard=True, size_per_shard=0.0005)
        return str(caught.value)


def test_a_disk_that_fills_up_in_mid_save(tmp_path: Path) -> None:
    save_model(tied(seed=1), tmp_path / "x", shard=True)
    told = run_ranks(fail_in_the_second_shard, 2, tmp_path / "x")
    assert told[1] == f"rank 0: {told[0]}"
    model = tied(seed=2)
    load_model(model, tmp_path / "x")
    assert_same_state(model, tied(seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def save_and_resume(folder: Path) -> tuple[float, list[float]]:
    with group():
        torch.manual_seed(dist.get_rank())
        state, other = (TrainingState(model=sharded(seed), extra={"told": seed}) for seed in (1, 2))
        state.optimizer, other.optimizer = (Adam(one.model.parameters()) for one in (state, other))
        train(state.model, state.optimizer, steps=range(2))
        torch.manual_seed(40 + dist.get_rank())
        path = save_training_state(folder, state, step=2)
        expected = torch.rand(()).item()
        assert latest_training_state(folder) == path
        assert load_training_state(path, other) == {"told": 1, "step": 2}
        assert torch.rand(()).item() == expected
        losses = train(state.model, state.optimizer, steps=range(2, 4))
        assert train(other.model, other.optimizer, steps=range(2, 4)) == losses
        return expected, losses


def test_a_training_state_of_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (draw_0, losses), (draw_1, _) = run_ranks(save_and_resume, 2, tmp_path)
    assert draw_0 != draw_1
    state = TrainingState(model=tied(seed=2))
    state.optimizer = Adam(state.model.parameters())
    torch.manual_seed(9)
    path = latest_training_state(tmp_path)
    assert path is not None
    load_training_state(path, state)
    assert "saved on 2 ranks" in capfd.readouterr().err
    assert train(state.model, state.optimizer, steps=range(2, 4)) == pytest.approx(losses, abs=TOLERANCE)
