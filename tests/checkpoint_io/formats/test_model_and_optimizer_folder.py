"""A model and an optimizer in slices: a folder for both, which never replaces what is not theirs."""

from pathlib import Path

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io import load_model, load_optimizer, parameter_names, save_model, save_optimizer
from tests.checkpoint_io.models import assert_same_state, tied, train

pytestmark = pytest.mark.unit


def test_one_folder_for_model_and_optimizer(tmp_path: Path) -> None:
    model = tied(seed=1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=range(2))
    save_model(model, tmp_path, gather_dtensor=False)
    save_optimizer(optimizer, tmp_path, param_names=parameter_names(model), gather_dtensor=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "optimizer"]
    other = tied(seed=2)
    other_optimizer = torch.optim.Adam(other.parameters())
    load_model(other, tmp_path)
    load_optimizer(other_optimizer, tmp_path, param_names=parameter_names(other))
    assert train(model, optimizer, steps=range(2, 4)) == train(other, other_optimizer, steps=range(2, 4))


def test_whole_tensors_take_the_place_of_slices(tmp_path: Path) -> None:
    save_model(tied(seed=1), tmp_path, gather_dtensor=False)
    (tmp_path / "notes").mkdir()
    save_model(tied(seed=2), tmp_path, shard=True)
    other = tied(seed=3)
    load_model(other, tmp_path)
    assert_same_state(other, tied(seed=2))
    assert (tmp_path / "notes").is_dir()


def test_a_folder_of_the_users_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a checkpoint in slices"):
        save_model(nn.Linear(1, 1), tmp_path, gather_dtensor=False)
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


def test_a_damaged_slice_is_named(tmp_path: Path) -> None:
    save_model(tied(seed=1), tmp_path, gather_dtensor=False)
    file = tmp_path / "model" / "00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        load_model(tied(seed=2), tmp_path)
