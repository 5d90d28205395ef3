"""A file that needs code to be restored is refused with the flag that would allow it."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.checkpoint_io import load_checkpoint, load_model, save_checkpoint
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

pytestmark = pytest.mark.unit


class Touches:
    """Makes a folder when it is restored."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_nothing_is_executed_unless_it_is_allowed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    torch.save({**model.state_dict(), "note": Touches(tmp_path / "made")}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"refused: .*mkdir.*allow_pickle=True"):
        load_model(nn.Linear(2, 2), tmp_path / "model.pt", strict=False)
    assert not (tmp_path / "made").exists()
    other = nn.Linear(2, 2)
    load_model(other, tmp_path / "model.pt", strict=False, allow_pickle=True)
    assert (tmp_path / "made").exists()
    assert torch.equal(other.weight, model.weight)
    assert "allow_pickle=True" in capfd.readouterr().err


def test_a_pickled_module(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="allow_pickle=True"):
        load_model(other, tmp_path / "model.pt")
    load_model(other, tmp_path / "model.pt", allow_pickle=True)
    assert torch.equal(other.weight, model.weight)


def test_a_checkpoint_with_more_in_it(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path / "last.pt", 3, model)
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    torch.save({**content, "args": argparse.Namespace(lr=0.1)}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"argparse\.Namespace.*allow_pickle=True"):
        load_checkpoint(tmp_path / "last.pt", other)
    assert load_checkpoint(tmp_path / "last.pt", other, allow_pickle=True) == 3
    assert torch.equal(other.weight, model.weight)


def test_damage_is_damage_with_the_flag_too(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[:2] + b"\xff" * 20 + content[22:])
    with pytest.raises(ValueError, match="is damaged"):
        load_model(nn.Linear(2, 2), tmp_path / "model.pt", allow_pickle=True)


def by_booster(file: str) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster()
    model, *_ = booster.boost(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Booster\.load_model.*allow_pickle=True"):
        booster.load_model(model, file)
    booster.load_model(model, file, allow_pickle=True)
    gpc.destroy()


@pytest.mark.dist
def test_the_flag_of_the_door(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    run_ranks(by_booster, 1, str(tmp_path / "model.pt"))
