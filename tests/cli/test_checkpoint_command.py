"""`colossalai checkpoint`: any form becomes any other, damage is found, differences are shown."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

from colossalai.checkpoint_io import (
    ChunkStorageReader,
    TrainingState,
    load_model,
    load_training_state,
    save_checkpoint,
    save_model,
    save_training_state,
)
from colossalai.checkpoint_io.tools import _convert, _merge
from colossalai.cli import main
from colossalai.tensor import Box
from tests.checkpoint_io.models import Tied, assert_same_state, tied, train

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, args)])


def run(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.output


def tensors_of(model: Tied) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.fixture
def trained() -> tuple[Tied, torch.optim.Optimizer]:
    model = tied(seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, steps=range(2))
    return model, optimizer


@pytest.fixture
def sources(trained: tuple[Tied, torch.optim.Optimizer], tmp_path: Path) -> dict[str, Path]:
    model, optimizer = trained
    state = save_training_state(tmp_path / "run", TrainingState(model=model, optimizer=optimizer), step=2)
    save_checkpoint(tmp_path / "all.pt", 1, model, optimizer)
    save_model(model, tmp_path / "shards", shard=True, size_per_shard=0.0005, use_safetensors=True)
    save_model(model, tmp_path / "one.pt")
    dcp.save({"model": tensors_of(model), "epoch": 1}, checkpoint_id=tmp_path / "dcp")
    return {
        "state": state,
        "chunks": state / "model",
        "save_checkpoint": tmp_path / "all.pt",
        "shards": tmp_path / "shards",
        "index": tmp_path / "shards/model.safetensors.index.json",
        "pt": tmp_path / "one.pt",
        "dcp": tmp_path / "dcp",
    }


def test_every_form_becomes_every_other(
    sources: dict[str, Path], trained: tuple[Tied, torch.optim.Optimizer], tmp_path: Path
) -> None:
    for name, source in sources.items():
        for to in ("hf", "safetensors", "pt", "state"):
            target = tmp_path / "new" / name / to / "step-00000002"
            told = run("convert", source, target, "--to", to, "--allow-pickle")
            has_optimizer = name in ("state", "save_checkpoint")
            assert ("left out, as" in told and "the optimizer" in told) == (
                has_optimizer and to in ("pt", "safetensors")
            )
            model = tied(seed=5)
            if to != "state":
                load_model(model, target)
            else:
                optimizer = torch.optim.Adam(model.parameters()) if has_optimizer else None
                back = load_training_state(target, TrainingState(model=model, optimizer=optimizer))
                assert back["step"] == (2 if name == "state" else 0)
                if optimizer is not None:
                    assert optimizer.param_groups[0]["lr"] == 0.01
                    states = [opt.state[p]["exp_avg"] for opt, p in ((optimizer, model.back.weight),)]
                    assert torch.equal(states[0], trained[1].state[trained[0].back.weight]["exp_avg"])
            assert_same_state(model, trained[0])
    run("diff", sources["state"], tmp_path / "new/state/hf/step-00000002")


def test_the_dtype_of_weights_changes_and_states_stay(sources: dict[str, Path], tmp_path: Path) -> None:
    run("convert", sources["state"], tmp_path / "hf", "--to", "hf", "--dtype", "bf16")
    found = json.loads(run("inspect", tmp_path / "hf", "--json"))["tensors"]
    assert {row["dtype"] for row in found["model"]} == {"bfloat16", "int64"}
    assert {row["dtype"] for row in found["optimizer"]} == {"float64", "float32"}


def test_inspect_tells_what_lies_where(sources: dict[str, Path]) -> None:
    report = json.loads(run("inspect", sources["state"], "--json"))
    assert (report["step"], report["num_ranks"]) == (2, 1)
    assert report["versions"]["torch"] == torch.__version__
    (embed,) = (row for row in report["tensors"]["model"] if row["name"] == "embed.weight")
    assert embed["also"] == ["head.weight"]
    assert (embed["shape"], embed["dtype"], embed["bytes"]) == ([11, 7], "float64", 11 * 7 * 8)
    assert embed["where"] == [
        {"file": "model/00000-of-00001.safetensors", "offsets": [0, 0], "sizes": [11, 7]}
    ]
    text = run("inspect", sources["state"])
    assert "step 2, saved on 1 ranks by colossalai" in text
    assert "model: 10 tensors" in text
    shards = run("inspect", sources["shards"])
    assert "model-00002-of-00003.safetensors" in shards


def test_verify_names_every_damaged_file(sources: dict[str, Path]) -> None:
    for name in ("state", "chunks", "shards", "pt", "save_checkpoint"):
        assert "is intact" in run("verify", sources[name])
    for name, victims in {
        "state": ["model/00000-of-00001.safetensors", "parts.pt"],
        "shards": ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"],
    }.items():
        for victim in victims:
            file = sources[name] / victim
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        result = invoke("verify", sources[name], "--json")
        assert result.exit_code == 1
        wrong = [Path(row["file"]) for row in json.loads(result.stdout)["files"] if row["problem"]]
        assert sorted(wrong) == [sources[name] / victim for victim in victims]
        damaged = invoke("convert", sources[name], sources[name].parent / "new", "--to", "hf")
        assert damaged.exit_code == 1
        assert "damaged" in damaged.output


def test_diff(tmp_path: Path) -> None:
    first, second = tied(seed=1), tied(seed=1)
    with torch.no_grad():
        second.back.bias[3] += 0.25
    save_model(first, tmp_path / "a")
    save_model(second, tmp_path / "b.safetensors")
    assert "the same: 10 tensors" in run(
        "diff", tmp_path / "a", tmp_path / "b.safetensors", "--tolerance", 0.3
    )
    result = invoke("diff", tmp_path / "a", tmp_path / "b.safetensors")
    assert result.exit_code == 1
    assert "1 of 10 tensors differ" in result.output
    assert "back.bias" in result.output
    assert "0.25" in result.output
    torch.save({"back.bias": torch.zeros(8), "new": torch.zeros(1)}, tmp_path / "c")
    rows = json.loads(invoke("diff", tmp_path / "a", tmp_path / "c", "--json").stdout)["tensors"]
    notes = {row["name"]: row["note"] for row in rows}
    assert notes["back.bias"] == "shape (7,) and (8,)"
    assert notes["new"] == "only in the second"
    assert notes["norm.bias"] == "only in the first"


@pytest.mark.parametrize(("value", "same"), [(float("nan"), False), (2.0**60, False), (1.0, True)])
def test_diff_of_values_that_hide(value: float, same: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, float("nan")]), "n": torch.tensor([2**60])}, tmp_path / "a")
    other = 2**60 + 1 if value == 2.0**60 else 2**60
    real = torch.tensor([1.0 if value == 2.0**60 else value, float("nan")])
    torch.save({"w": real, "n": torch.tensor([other])}, tmp_path / "b")
    assert invoke("diff", tmp_path / "a", tmp_path / "b").exit_code == (0 if same else 1)


def test_diff_sees_states_and_dtypes(
    sources: dict[str, Path], trained: tuple[Tied, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, optimizer = trained
    optimizer.state[model.back.bias]["exp_avg_sq"][6] += 0.5
    other = save_training_state(tmp_path / "other", TrainingState(model=model, optimizer=optimizer), step=2)
    rows = json.loads(invoke("diff", sources["state"], other, "--json").stdout)["tensors"]
    (row,) = (row for row in rows if row["largest"] != 0)
    assert (row["part"], row["largest"]) == ("optimizer", 0.5)
    assert "back.bias" in row["name"]
    assert "exp_avg_sq" in row["name"]

    run("convert", sources["pt"], tmp_path / "double.pt", "--to", "pt", "--dtype", "fp64")
    run("convert", sources["pt"], tmp_path / "half.pt", "--to", "pt", "--dtype", "bf16")
    result = invoke("diff", tmp_path / "double.pt", tmp_path / "half.pt", "--tolerance", 1)
    assert result.exit_code == 1
    assert "float64 and bfloat16" in result.output


def test_diff_looks_at_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_merge, "_BLOCK", 3)
    first, second = torch.zeros(5, 4), torch.zeros(5, 4)
    torch.save({"w": first}, tmp_path / "a")
    for place in (0, 7, 19):
        second.view(-1)[place] = 1.0 + place
        torch.save({"w": second}, tmp_path / "b")
        (row,) = json.loads(invoke("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)["tensors"]
        assert row["largest"] == 1.0 + place


@pytest.mark.parametrize("to", ["hf", "safetensors", "pt", "state"])
def test_conversion_reads_no_more_at_once_than_the_buffer(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    read = _convert._Passing.read

    def note(self: _convert._Passing, box: Box, out: torch.Tensor) -> None:
        most.append(box.numel * self.source.dtype.itemsize)
        read(self, box, out)

    monkeypatch.setattr(_convert._Passing, "read", note)
    weight = torch.arange(600 * 100, dtype=torch.float32).view(600, 100)  # 240 KB
    torch.save({"w": weight}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", to, "--buffer-size", 0.1)
    assert sum(most) == weight.nbytes
    assert max(most) < 0.1 * 1024 * 1024 / 4, "some of them are needed at once"
    run("diff", tmp_path / "a.pt", tmp_path / "b")


def test_merge(sources: dict[str, Path], trained: tuple[Tied, torch.optim.Optimizer], tmp_path: Path) -> None:
    whole = tensors_of(trained[0])
    torch.save({name: value for name, value in whole.items() if name < "h"}, tmp_path / "0.pt")
    torch.save({name: value for name, value in whole.items() if name > "b"}, tmp_path / "1.pt")
    run("merge", tmp_path / "0.pt", tmp_path / "1.pt", tmp_path / "merged.safetensors")
    run("merge", sources["state"], tmp_path / "merged.pt")
    for name in ("merged.safetensors", "merged.pt"):
        model = tied(seed=5)
        load_model(model, tmp_path / name)
        assert_same_state(model, trained[0])
    torch.save({"w[0:1, 0:3]": torch.ones(1, 3)}, tmp_path / "2.pt")
    torch.save({"w[1:2, 0:3]": torch.zeros(1, 3)}, tmp_path / "3.pt")
    run("merge", tmp_path / "2.pt", tmp_path / "3.pt", tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt")["w"].tolist() == [[1] * 3, [0] * 3]
    result = invoke("merge", tmp_path / "3.pt", tmp_path / "w.pt")
    assert "w is not all of it" in result.output or "not all of it, once: give all files" in result.output
    torch.save({"back.bias": torch.zeros(7)}, tmp_path / "4.pt")
    clash = invoke("merge", tmp_path / "0.pt", tmp_path / "4.pt", tmp_path / "m.pt")
    assert "back.bias is in" in clash.output
    content = bytearray((tmp_path / "merged.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(content)
    damaged = invoke("merge", tmp_path / "damaged.safetensors", tmp_path / "m.pt")
    assert damaged.exit_code == 1
    assert "is damaged" in damaged.output
    assert not (tmp_path / "m.pt").exists()


def test_mistakes_in_plain_words(sources: dict[str, Path], tmp_path: Path) -> None:
    for args, words in {
        ("inspect", tmp_path / "nowhere"): "there is no such file or folder",
        ("inspect", tmp_path / "run"): "is a folder of training states: give one of step-00000002",
        ("inspect", sources["dcp"]): "give --allow-pickle if you trust its origin",
        ("verify", sources["dcp"]): "which has no checksums",
        ("convert", sources["pt"], sources["pt"], "--to", "pt"): "is the source itself",
        (
            "convert",
            sources["pt"],
            tmp_path / "x",
            "--to",
            "pt",
            "--step",
            5,
        ): "only a training state has a step",
        ("convert", sources["state"], tmp_path / "x", "--to", "state", "--step", 5): "is of step 2",
    }.items():
        result = invoke(*args)
        assert result.exit_code == 1
        assert words in result.output


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "merge", "diff"])
def test_help_has_an_example(command: str) -> None:
    assert f"\n    colossalai checkpoint {command} " in run(command, "--help")


def test_torch_reads_our_chunks(
    sources: dict[str, Path], trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    wanted = tensors_of(trained[0])
    for folder in (sources["state"], sources["chunks"]):
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(found, storage_reader=ChunkStorageReader(folder))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
