"""A model sharded without a plugin, saved on two ranks and loaded in one process; errors of ranks."""

import resource
from pathlib import Path

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
    load_training_state,
    parameter_names,
    save_checkpoint,
    save_model,
    save_optimizer,
    save_training_state,
)
from tests.checkpoint_io.models import Tied, assert_same_state, group, tied, train
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

TOLERANCE = 1e-12  # float64; both ranks have the same batch, so the mean of their gradients is the gradient
# The axes of the mesh: all ranks cut, or all ranks replicate.
MESHES = {"fsdp": (2,), "hsdp": (2, 1)}


def sharded(seed: int, layout: str = "fsdp") -> Tied:
    model = tied(seed=seed)
    names = ("replicate", "shard") if layout == "hsdp" else ("shard",)
    mesh = init_device_mesh("cpu", MESHES[layout], mesh_dim_names=names)
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


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


def goes_on(model: nn.Module, optimizer: Adam, path: Path) -> list[float]:
    """Load a training state, or a file, and train."""
    if path.is_dir():
        load_training_state(path, TrainingState(model=model, optimizer=optimizer))
    else:
        assert load_checkpoint(path, model, optimizer) == 2
    return train(model, optimizer, steps=range(2, 4))


def save_and_resume(folder: Path, layout: str) -> tuple[float, list[float]]:
    with group():
        torch.manual_seed(dist.get_rank())
        state, other = (TrainingState(model=sharded(seed, layout), extra={"told": seed}) for seed in (1, 2))
        state.optimizer, other.optimizer = (Adam(one.model.parameters()) for one in (state, other))
        train(state.model, state.optimizer, steps=range(2))
        with torch.no_grad():
            state.model.eval()(torch.arange(11))  # leaves the root's parameters gathered
        state.model.train()
        torch.manual_seed(40 + dist.get_rank())
        path = save_training_state(folder / "states", state, step=2)
        save_checkpoint(folder / "all.pt", 2, state.model, state.optimizer)
        expected = torch.rand(()).item()
        assert latest_training_state(folder / "states") == path
        assert load_training_state(path, other) == {"told": 1, "step": 2}
        assert torch.rand(()).item() == expected
        losses = train(state.model, state.optimizer, steps=range(2, 4))
        assert train(other.model, other.optimizer, steps=range(2, 4)) == losses
        for file in ("all.pt", "plain.pt"):
            found = goes_on(other.model, other.optimizer, folder / file)
            assert found == pytest.approx(losses, abs=TOLERANCE), file
        return expected, losses


@pytest.mark.parametrize("layout", ["fsdp", further("hsdp")])
def test_a_training_state_of_two_ranks(
    layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a model that is sharded without a plugin; so is a file, from ranks and from one process."""
    plain = tied(seed=1)
    optimizer = Adam(plain.parameters())
    train(plain, optimizer, steps=range(2))
    save_checkpoint(tmp_path / "plain.pt", 2, plain, optimizer)
    (draw_0, losses), (draw_1, _) = run_ranks(save_and_resume, 2, tmp_path, layout)
    assert draw_0 != draw_1
    for path in (latest_training_state(tmp_path / "states"), tmp_path / "all.pt"):
        assert path is not None
        model = tied(seed=2)
        found = goes_on(model, Adam(model.parameters()), path)
        assert found == pytest.approx(losses, abs=TOLERANCE)
    assert "saved on 2 ranks" in capfd.readouterr().err
