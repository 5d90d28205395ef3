"""One file for model, optimizer, scheduler and epoch."""

from pathlib import Path

import pytest
import torch
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from colossalai.checkpoint_io import load_checkpoint, save_checkpoint, save_model
from tests.checkpoint_io.models import assert_same_state, tied, train

pytestmark = pytest.mark.unit


def test_everything_round_trips_and_goes_on(tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    optimizer, twin = Adam(model.parameters()), Adam(other.parameters())
    scheduler, other_scheduler = StepLR(optimizer, 2), StepLR(twin, 2)
    train(model, optimizer, steps=range(2))
    scheduler.step()
    save_checkpoint(tmp_path / "x.pt", 3, model, optimizer, scheduler)
    assert load_checkpoint(tmp_path / "x.pt", other, twin, other_scheduler) == 3
    assert other_scheduler.last_epoch == 1
    assert train(model, optimizer, steps=range(2, 4)) == train(other, twin, steps=range(2, 4))
    assert_same_state(model, other)


def test_the_model_alone(tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    save_checkpoint(tmp_path / "x.pt", 0, model)
    assert load_checkpoint(tmp_path / "x.pt", other) == 0
    assert_same_state(model, other)
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == {"epoch", "model"}


def test_what_the_file_lacks_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.pt", 0, tied(seed=1))
    other = tied(seed=2)
    twin = Adam(other.parameters())
    with pytest.raises(ValueError, match=r"holds no optimizer, lr_scheduler; there is epoch, model"):
        load_checkpoint(tmp_path / "x.pt", other, twin, StepLR(twin, 2))
    save_model(tied(), tmp_path / "y.pt")
    with pytest.raises(ValueError, match=r"holds no epoch, model; there is .*embed.weight"):
        load_checkpoint(tmp_path / "y.pt", other)
    assert_same_state(other, tied(seed=2))


def test_a_model_that_does_not_fit_leaves_everything(tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    optimizer = Adam(model.parameters(), lr=0.5)
    save_checkpoint(tmp_path / "x.pt", 0, model, optimizer)
    twin = Adam([other.embed.weight])
    with pytest.raises(ValueError, match="does not fit the optimizer"):
        load_checkpoint(tmp_path / "x.pt", other, twin)
    assert_same_state(other, tied(seed=2))
    assert twin.param_groups[0]["lr"] != 0.5
