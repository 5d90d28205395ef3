"""`colossalai checkpoint inspect` of what several ranks have written."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.fsdp import fully_shard

import colossalai
from colossalai.checkpoint_io import TrainingState, save_training_state
from colossalai.cli import main
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def inspect(*args: str) -> str:
    result = CliRunner().invoke(main, ["checkpoint", "inspect", *args])
    assert result.exit_code == 0, result.output
    return result.output


def save_in_halves(folder: Path) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = torch.nn.Linear(3, 4)
    fully_shard(model)
    save_training_state(folder, TrainingState(model=model), step=1)
    gpc.destroy()


def test_every_place_of_a_tensor_is_told(tmp_path: Path) -> None:
    run_ranks(save_in_halves, 2, tmp_path)
    path = str(tmp_path / "step-00000001")
    report = json.loads(inspect(path, "--json"))
    (weight,) = (row for row in report["tensors"]["model"] if row["name"] == "weight")
    assert weight["where"] == [
        {"file": f"model/0000{rank}-of-00002.safetensors", "offsets": [2 * rank, 0], "sizes": [2, 3]}
        for rank in range(2)
    ]
    assert "model/00001-of-00002.safetensors [2:4, 0:3]" in inspect(path)
