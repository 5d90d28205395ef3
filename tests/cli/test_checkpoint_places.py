"""`colossalai checkpoint inspect` of what several ranks have written."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

import colossalai
from colossalai.checkpoint_io import TrainingState, save_training_state
from colossalai.cli import _checkpoint, main
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks


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


@pytest.mark.dist
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


LONG = "encoder.layers.17.attention.self_attention.query_key_value_projection.weight"
CONFIG = {
    "plan": {"layout": {"data": 2}, "pipeline": None, "cuts": {}},
    "BETAS": [0.9, 0.95],
    "DATA": [f"/data/corpus/part-{number:05}.jsonl" for number in range(5)],
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console of 80 columns."""
    monkeypatch.setattr(_checkpoint, "_console", lambda: Console(width=80))


@pytest.mark.unit
@pytest.mark.usefixtures("narrow")
def test_names_and_files_are_unbroken_and_the_config_is_in_rows_at_80_columns(tmp_path: Path) -> None:
    model = torch.nn.Module()
    deepest: torch.nn.Module = model
    for name in LONG.split(".")[:-1]:
        deepest.add_module(name, torch.nn.Module())
        deepest = deepest.get_submodule(name)
    deepest.register_parameter("weight", torch.nn.Parameter(torch.ones(256, 64)))
    folder = save_training_state(tmp_path, TrainingState(model=model, config=CONFIG), step=1)
    lines = inspect(str(folder)).splitlines()[1:]  # the first has the path of the test
    assert max(map(len, lines)) <= 80
    where = lines.index(f"  {LONG}")
    assert lines[where + 1] == "    256x64  float32  65,536  model/00000-of-00001.safetensors"
    words = [line.split() for line in lines]
    for row in (
        ["plan.layout.data", "2"],
        ["plan.pipeline", "null"],
        ["plan.cuts", "{}"],
        ["BETAS", "[0.9,", "0.95]"],
        ["DATA"],
    ):
        assert row in words
    assert all(any(path in line for line in lines) for path in CONFIG["DATA"])


@pytest.mark.unit
@pytest.mark.usefixtures("narrow")
def test_verify_and_diff_keep_names_unbroken_at_80_columns(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("one", "two"))
    for folder, value in ((first, 1.0), (second, 2.0)):
        folder.mkdir()
        name = f"model-{'x' * 60}.safetensors"
        save_file({LONG: torch.full((4,), value)}, folder / name)
    runner = CliRunner()
    verified = runner.invoke(main, ["checkpoint", "verify", str(first / name)])
    assert f"\n  {name}\n" in verified.output
    found = runner.invoke(main, ["checkpoint", "diff", str(first / name), str(second / name)])
    assert f"\n  {LONG}\n    model  1\n" in found.output
