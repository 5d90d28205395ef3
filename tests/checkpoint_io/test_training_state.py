"""A run goes on from its training state bit for bit; the newest complete one is found by content."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_training_state,
    save_training_state,
)
from colossalai.checkpoint_io.storage._manifest import MANIFEST
from colossalai.context import random_state, set_random_state
from tests.checkpoint_io.models import assert_same_state, flip_a_bit, tied, train

pytestmark = pytest.mark.unit


class Position:
    """A data loader, as far as a checkpoint is concerned."""

    def __init__(self) -> None:
        self.index = 0

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.index = state_dict["index"]


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    kept = random_state()
    yield
    set_random_state(kept)


def run(seed: int) -> TrainingState:
    model = tied(seed=seed)
    optimizer = Adam(model.parameters())
    scheduler = StepLR(optimizer, 2)
    return TrainingState(model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=Position())


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_goes_on(tmp_path: Path) -> None:
    state = run(1)
    train(state.model, state.optimizer, steps=range(2))
    state.lr_scheduler.step()
    state.dataloader.index = 17
    state.extra = {"epoch": 3, "best": 0.25}
    path = save_training_state(tmp_path / "runs", state, step=2)
    expected_draw = draw()
    assert path == tmp_path / "runs" / "step-00000002"

    other = run(2)
    other.scaler = None
    assert latest_training_state(tmp_path / "runs") == path
    assert load_training_state(path, other) == {"epoch": 3, "best": 0.25, "step": 2}
    assert draw() == expected_draw
    assert other.dataloader.index == 17
    assert other.lr_scheduler.last_epoch == 1
    assert train(state.model, state.optimizer, steps=range(2, 5)) == train(
        other.model, other.optimizer, steps=range(2, 5)
    )
    assert_same_state(state.model, other.model)


def test_only_the_last_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step-00000009.new-0a1b").mkdir()
    for step in (7, 8, 9):
        save_training_state(tmp_path, TrainingState(model=nn.Linear(1, 1)), step=step)
    assert names(tmp_path) == ["notes", "step-00000008", "step-00000009"]
    save_training_state(tmp_path, TrainingState(model=nn.Linear(1, 1)), step=3, keep_last=1)
    assert names(tmp_path) == ["notes", "step-00000003"]


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    state = TrainingState(model=nn.Linear(1, 1))
    save_training_state(tmp_path, state, step=100)
    save_training_state(tmp_path, state, step=50)
    assert latest_training_state(tmp_path) == tmp_path / "step-00000050"
    save_training_state(tmp_path, state, step=100)
    assert latest_training_state(tmp_path) == tmp_path / "step-00000100"


def test_the_name_does_not_count(tmp_path: Path) -> None:
    state = TrainingState(model=nn.Linear(1, 1))
    save_training_state(tmp_path, state, step=1)
    save_training_state(tmp_path, state, step=2).rename(tmp_path / "best")
    (tmp_path / "step-00000009").mkdir()
    assert latest_training_state(tmp_path) == tmp_path / "best"
    assert load_training_state(tmp_path / "best", state) == {"step": 2}


def test_there_may_be_none(tmp_path: Path) -> None:
    assert latest_training_state(tmp_path) is None
    assert latest_training_state(tmp_path / "gone") is None


@pytest.mark.parametrize("victim", ["parts.pt", "model/tensors.json", MANIFEST])
@pytest.mark.parametrize(
    "harm", [Path.unlink, flip_a_bit, lambda path: path.write_bytes(path.read_bytes()[:-3])]
)
def test_a_damaged_one_is_passed_over(
    victim: str, harm: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = TrainingState(model=nn.Linear(1, 1))
    first = save_training_state(tmp_path, state, step=1)
    second = save_training_state(tmp_path, state, step=2)
    harm(second / victim)
    assert latest_training_state(tmp_path) == first
    if (second / MANIFEST).exists():
        assert str(second / victim) in capfd.readouterr().err
    with pytest.raises((ValueError, OSError), match=str(second / victim)):
        load_training_state(second, state)


def test_one_whose_writer_was_killed_before_the_rename_serves_if_there_is_no_other(tmp_path: Path) -> None:
    state = TrainingState(model=nn.Linear(1, 1))
    hidden = save_training_state(tmp_path, state, step=2).rename(tmp_path / ".step-00000002.new-0a1b")
    assert latest_training_state(tmp_path) == hidden
    path = save_training_state(tmp_path / "other", state, step=1)
    shutil.copytree(path, tmp_path / "step-00000001")
    assert latest_training_state(tmp_path) == tmp_path / "step-00000001"


def test_a_lacking_part_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = save_training_state(tmp_path, TrainingState(model=tied(seed=1)), step=1)
    other = run(2)
    with pytest.raises(ValueError, match="holds no lr_scheduler, dataloader, optimizer"):
        load_training_state(path, other)
    assert_same_state(other.model, tied(seed=2))
    load_training_state(path, TrainingState(model=other.model))
    assert_same_state(other.model, tied(seed=1))


def test_a_misfit_of_the_optimizer_leaves_the_model(tmp_path: Path) -> None:
    path = save_training_state(tmp_path, run(1), step=1)
    other = run(2)
    other.optimizer = Adam([other.model.embed.weight])
    with pytest.raises(ValueError, match="does not fit the optimizer"):
        load_training_state(path, other)
    assert_same_state(other.model, tied(seed=2))
    assert other.dataloader.index == 0


def test_the_manifest_tells_where_it_comes_from(tmp_path: Path) -> None:
    path = save_training_state(tmp_path, TrainingState(model=nn.Linear(1, 1)), step=1)
    manifest = json.loads((path / MANIFEST).read_text())["manifest"]
    assert (manifest["step"], manifest["num_ranks"]) == (1, 1)
    assert manifest["versions"].keys() == {"colossalai", "torch", "python"}
    assert "random/00000-of-00001.pt" in manifest["files"]


def test_arguments_are_checked(tmp_path: Path) -> None:
    state = TrainingState(model=nn.Linear(1, 1), extra={"hook": print})
    with pytest.raises(ValueError, match="keep_last=0"):
        save_training_state(tmp_path, state, step=1, keep_last=0)
    with pytest.raises(ValueError, match="training state/extra/hook is a"):
        save_training_state(tmp_path, state, step=1)
    assert names(tmp_path) == []
