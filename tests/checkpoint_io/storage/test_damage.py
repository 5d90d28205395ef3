"""A flipped bit, a truncated or a missing file is named before anything in memory is overwritten."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file as write_safetensors
from torch import nn
from torch.optim import AdamW

from colossalai.checkpoint_io import (
    TrainingState,
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
from tests.tiers import further

pytestmark = pytest.mark.unit

NUM_FLIPS = 40  # of each file
NUM_MODEL_VALUES = 8  # parameters and buffers
UNTOUCHED = -7.0


class Subject:
    """A model and its optimizer, which tell whether they were loaded, and what."""

    def __init__(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
        self.optimizer = AdamW(self.model.parameters(), lr=0.125, weight_decay=0.25)
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()
        if seed is None:
            for value in self.values():
                value.fill_(UNTOUCHED)

    def values(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(param.data for param in self.model.parameters()), *self.model.buffers(), *states]

    def is_same_as(self, other: "Subject") -> bool:
        groups = zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True)
        return all(map(torch.equal, self.values(), other.values())) and all(
            mine[key] == theirs[key] for mine, theirs in groups for key in mine if key != "params"
        )

    @property
    def state(self) -> TrainingState:
        return TrainingState(model=self.model, optimizer=self.optimizer, extra={"epoch": 3})


def save_state(folder: Path, subject: Subject) -> None:
    save_training_state(folder.parent / "states", subject.state, step=1).rename(folder)


def load_state(folder: Path, subject: Subject) -> None:
    assert load_training_state(folder, subject.state) == {"epoch": 3, "step": 1}


def save_in(**options: object) -> Callable[[Path, Subject], None]:
    def save(folder: Path, subject: Subject) -> None:
        folder.mkdir()
        names = parameter_names(subject.model)
        save_model(subject.model, folder / "model", **options)
        save_optimizer(subject.optimizer, folder / "optimizer", param_names=names, **options)

    return save


def load_both(folder: Path, subject: Subject) -> None:
    """Load the optimizer first: what it tells comes before the model is touched."""
    load_optimizer(subject.optimizer, folder / "optimizer", param_names=parameter_names(subject.model))
    load_model(subject.model, folder / "model")


def save_file(folder: Path, subject: Subject) -> None:
    folder.mkdir()
    save_checkpoint(folder / "all.pt", 3, subject.model, subject.optimizer)


def load_file(folder: Path, subject: Subject) -> None:
    assert load_checkpoint(folder / "all.pt", subject.model, subject.optimizer) == 3


FORMATS = {
    "training state": (save_state, load_state),
    "chunks": (save_state, load_both),  # the model and the optimizer of a training state alone
    "torch": (save_in(), load_both),
    "safetensors": (save_in(use_safetensors=True), load_both),
    "torch shards": (save_in(shard=True, size_per_shard=1e-4), load_both),
    "safetensors shards": (save_in(shard=True, size_per_shard=1e-4, use_safetensors=True), load_both),
    "one file": (save_file, load_file),
}


def files_of(folder: Path, name: str) -> list[Path]:
    parts = ("model", "optimizer") if name == "chunks" else ("",)
    return sorted(path for part in parts for path in (folder / part).rglob("*") if path.is_file())


def outcome_of(load: Callable[[Path, Subject], None], folder: Path, path: Path, saved: Subject) -> str:
    """Load, and return "named" or "harmless"; anything else is an error."""
    subject = Subject(None)
    try:
        load(folder, subject)
    except (ValueError, OSError) as error:
        told = str(error)
    else:
        assert subject.is_same_as(saved), f"{path} is damaged, and was loaded"
        return "harmless"
    assert path.name in told, f"{path} is not named: {told}"
    is_second = load is load_both and "model" in path.relative_to(folder).parts
    overwritten = subject.values()[: NUM_MODEL_VALUES if is_second else None]
    assert all(value.eq(UNTOUCHED).all() for value in overwritten), f"overwritten, and then: {told}"
    return "named"


FIRSTS = ("training state", "chunks", "torch", "safetensors")
FEW_FLIPS = 12


@pytest.mark.parametrize(
    ("name", "num_flips"),
    [*((name, FEW_FLIPS) for name in FIRSTS), *(further(name, NUM_FLIPS) for name in FORMATS)],
)
def test_a_flipped_bit(name: str, num_flips: int, tmp_path: Path) -> None:
    save, load = FORMATS[name]
    folder, saved, source = tmp_path / "saved", Subject(1), random.Random(4)
    save(folder, saved)
    assert outcome_of(load, folder, folder, saved) == "harmless"
    for path in files_of(folder, name):
        content = path.read_bytes()
        places = [source.randrange(len(content)) for _ in range(num_flips)]
        outcomes = []
        for place in {0, len(content) - 1, *places}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << source.randrange(8)
            path.write_bytes(damaged)
            outcomes.append(outcome_of(load, folder, path, saved))
        path.write_bytes(content)
        # In torch's zip files there are names, dates and padding that nobody reads.
        if name == "training state":
            assert set(outcomes) == {"named"}, path
        assert outcomes.count("named") > len(outcomes) // 3, path
    assert outcome_of(load, folder, folder, saved) == "harmless"


@pytest.mark.parametrize(
    ("options", "file", "checksum"),
    [
        ({"use_safetensors": True}, "model", b"crc32_of_header"),
        ({"use_safetensors": True}, "model", b"crc32"),
        ({"shard": True}, "pytorch_model.bin.index.json", b"crc32"),
        ({"shard": True}, "pytorch_model.bin.index.json", b"metadata"),
    ],
)
def test_a_flipped_bit_in_the_name_of_a_checksum(
    options: dict[str, Any], file: str, checksum: bytes, tmp_path: Path
) -> None:
    """A checksum under another name is not the same as no checksum."""
    model = Subject(1).model
    save_model(model, tmp_path / "model", **options)
    path = tmp_path / "model" if file == "model" else tmp_path / "model" / file
    content = path.read_bytes()
    begin = content.index(b'"' + checksum + b'"') + 1
    for bit in range(8 * len(checksum)):
        damaged = bytearray(content)
        damaged[begin + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(path)):
            load_model(model, tmp_path / "model")
    path.write_bytes(content)
    assert load_model(model, tmp_path / "model").is_clean


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """Other programs write none, whatever else they put into the metadata."""
    model = Subject(1).model
    write_safetensors(model.state_dict(), tmp_path / "model.safetensors", {"crc32_of_body": "0123456789"})
    assert load_model(model, tmp_path / "model.safetensors").is_clean
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    weight_map = dict.fromkeys(model.state_dict(), "pytorch_model.bin")
    index = {"metadata": {"total_size": 7}, "others": {"crc": 3}, "weight_map": weight_map}
    for content in (index, {"others": {"crc": 3}, "weight_map": weight_map}):
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(content))
        assert load_model(model, tmp_path / "pytorch_model.bin.index.json").is_clean


@pytest.mark.parametrize(
    "name",
    FORMATS,
)
def test_a_truncated_or_missing_file(name: str, tmp_path: Path) -> None:
    save, load = FORMATS[name]
    folder, saved = tmp_path / "saved", Subject(1)
    save(folder, saved)
    for path in files_of(folder, name):
        content = path.read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            assert outcome_of(load, folder, path, saved) == "named", (path, length)
        path.unlink()
        assert outcome_of(load, folder, path, saved) == "named", path
        path.write_bytes(content)
    assert outcome_of(load, folder, folder, saved) == "harmless"


def test_files_of_two_training_states(tmp_path: Path) -> None:
    """Each is intact; together they are nothing."""
    first, second = (save_training_state(tmp_path, Subject(seed).state, step=seed) for seed in (1, 2))
    for path in [path for path in first.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        if content == (second / path.relative_to(first)).read_bytes():
            continue
        shutil.copy(second / path.relative_to(first), path)
        if path.name != "manifest.json":
            with pytest.raises(ValueError, match=path.name):
                load_state(first, Subject(None))
        path.write_bytes(content)
    load_state(first, Subject(None))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "one file"])
def test_every_parameter_is_accounted_for(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save, _ = FORMATS[name]
    save(tmp_path / "saved", Subject(1))
    source = tmp_path / "saved" / ("" if name in ("training state", "chunks") else "model")
    others = {
        "1 missing in the checkpoint: 2.bias": nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        ),
        "1 unexpected in the checkpoint: 0.bias": nn.Sequential(
            nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)
        ),
        "0.weight: (4, 3) torch.float32 in the checkpoint, (5, 3) torch.float32 in the model": wider(),
        "0.weight: (4, 3) torch.float32 in the checkpoint, (4, 3) torch.float64 in the model": (
            Subject(2).model.double()
        ),
    }
    for told, model in others.items():
        for param in model.parameters():
            nn.init.constant_(param, UNTOUCHED)
        with pytest.raises(ValueError, match="nothing was loaded") as caught:
            load_model(model, source)
        assert told in str(caught.value)
        assert all(param.eq(UNTOUCHED).all() for param in model.parameters())
        report = load_model(model, source, strict=False)
        assert told in report.describe()
        assert told in capfd.readouterr().err
