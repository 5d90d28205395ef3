"""Metadata that is newer, hostile or nonsense, with checksums that match: one ValueError with the path."""

import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_checkpoint,
    load_lr_scheduler,
    load_model,
    load_optimizer,
    load_training_state,
    parameter_names,
    resume_training_state,
    save_model,
    save_optimizer,
    save_training_state,
)
from colossalai.checkpoint_io.storage._manifest import INDEX, MANIFEST, read_manifest
from colossalai.checkpoint_io.storage._untrusted import json_checksum
from colossalai.checkpoint_io.tools._open import open_checkpoint
from colossalai.checkpoint_io.tools._verify import verify_checkpoint

pytestmark = pytest.mark.unit

NUM_CHANGES = 60  # of each kind of metadata
STRANGE = [None, True, -1, 1 << 70, 0.5, "", "../x", "/etc/hosts", [], [[]], {}, {"a": []}, "\ud800", "a\0b"]
DEEP = "[" * 100_000


class Run:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
        self.optimizer = AdamW(self.model.parameters())
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> TrainingState:
        return TrainingState(model=self.model, optimizer=self.optimizer)

    @property
    def names(self) -> Any:
        return parameter_names(self.model)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(folder / MANIFEST, "manifest", change)


def rewrite(path: Path, key: str, change: Callable[[Any], object]) -> None:
    """Change the body of a file of ours, and make its checksum right again."""
    content = json.loads(path.read_text())
    change(content[key])
    content["crc32"] = json_checksum(content[key])
    path.write_text(json.dumps(content))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a nested value, as a container and a key or an index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(items):
        yield value, key
        yield from places(part)


def change_somewhere(value: Any, source: random.Random) -> None:
    container, key = source.choice(list(places(value)))
    match source.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container["of a newer version"] = container[key]
        case 2 if isinstance(container, dict):
            container[source.choice(["../../x", "/x", "", "a\0", "x" * 300])] = container.pop(key)
        case _:
            container[key] = source.choice(STRANGE)


def test_a_newer_manifest_is_read(tmp_path: Path) -> None:
    path = save_training_state(tmp_path, Run().state, step=1)

    def change(body: dict[str, Any]) -> None:
        body["of a newer version"] = {"x": 1}
        for entry in body["files"].values():
            entry["sha256"] = "00"

    rewrite_manifest(path, change)
    assert read_manifest(path).others == {"of a newer version": {"x": 1}}
    assert resume_training_state(tmp_path, Run().state) == {"step": 1}
    rewrite(path / "model" / INDEX, "index", lambda body: body.update(newer=[1]))
    assert load_model(Run().model, path / "model").is_clean


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda body: body.pop("serial"), "it has no 'serial'"),
        (lambda body: body.update(step="7"), "'step' is '7', where a int is expected"),
        (lambda body: body.update(files=[]), "'files' is a list"),
        (lambda body: body.update(files={}), r"does not list parts\.pt, model/tensors\.json"),
        (lambda body: body["files"].pop("model/00000-of-00001.safetensors"), "does not list model/00000-of"),
        (lambda body: body["files"].pop("random/00000-of-00001.pt"), "does not list random/00000-of"),
        (
            lambda body: body["files"].update({"../../x": {"size": 1, "checksum": 2}}),
            "files outside its folder",
        ),
        (
            lambda body: body["files"].update({"/etc/hosts": {"size": 1, "checksum": 2}}),
            "files outside its fol",
        ),
        (lambda body: body["files"].update({"parts.pt": {"size": 1}}), "it has no 'checksum'"),
        (lambda body: body.update(num_ranks=1 << 40), "does not list random/"),
    ],
)
def test_a_state_with_a_strange_manifest_does_not_touch_its_siblings(
    change: Any, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    first = save_training_state(tmp_path, run.state, step=1)
    second = save_training_state(tmp_path, run.state, step=2)
    rewrite_manifest(second, change)
    with pytest.raises(ValueError, match=told) as caught:
        load_training_state(second, run.state)
    assert str(second / MANIFEST) in str(caught.value)
    capfd.readouterr()
    assert latest_training_state(tmp_path) == first
    assert str(second) in capfd.readouterr().err
    save_training_state(tmp_path, run.state, step=3)
    assert resume_training_state(tmp_path, run.state) == {"step": 3}


@pytest.mark.parametrize(
    "text", [DEEP, '{"format": ' * 600, "7", "[]", "null", '{"a": 1e', "\udcff", "1" * 9999]
)
@pytest.mark.parametrize("name", [MANIFEST, f"model/{INDEX}", "index.json", "header"])
def test_json_without_end_or_sense(text: str, name: str, tmp_path: Path) -> None:
    run = Run()
    state = save_training_state(tmp_path / "states", run.state, step=1)
    if name == "header":
        path = tmp_path / "model.safetensors"
        text = text.encode(errors="ignore").decode()
        save_file({"0.weight": torch.ones(3, 2)}, path, {"colossalai": text, "crc32": text})
    else:
        path = tmp_path / name if name == "index.json" else state / name
        path.write_bytes(text.encode(errors="surrogateescape"))
    read = partial(load_model, run.model, path.parent if name.endswith(INDEX) else path)
    if name == MANIFEST:
        read = partial(load_training_state, state, run.state)
    with pytest.raises(ValueError, match=str(path)):
        read()


@pytest.mark.parametrize("part", ["manifest", "index", "shards"])
def test_whatever_stands_in_metadata(part: str, tmp_path: Path) -> None:
    """It is read, refused with its path, or does not fit; nothing else comes out."""
    run, source = Run(), random.Random(5)
    state = save_training_state(tmp_path / "states", run.state, step=1)
    shards = tmp_path / "shards"
    save_optimizer(run.optimizer, shards, param_names=run.names, shard=True, size_per_shard=1e-5)
    path, key = {
        "manifest": (state / MANIFEST, "manifest"),
        "index": (state / "optimizer" / INDEX, "index"),
        "shards": (shards / "pytorch_optim.bin.index.json", "metadata"),
    }[part]
    kept = path.read_text()
    outcomes = []
    for _ in range(NUM_CHANGES):
        content = json.loads(kept)
        if part == "shards":
            content["metadata"].pop("crc32")
            change_somewhere(content, source)
        else:
            change_somewhere(content[key], source)
            content["crc32"] = json_checksum(content[key])
        path.write_text(json.dumps(content))
        try:
            if part == "manifest":
                load_training_state(state, run.state)
            else:
                load_optimizer(run.optimizer, path.parent, param_names=run.names)
        except ValueError as error:
            outcomes.append("refused" if str(path.parent) in str(error) else str(error))
        else:
            outcomes.append("read")
    assert set(outcomes) == {"refused", "read"}
    assert outcomes.count("refused") > NUM_CHANGES // 4


@pytest.mark.parametrize("text", ['{"a": {"weight_map": 7}}', '{"weight_map": {"w": ["a.bin"]}}', "[[]]"])
def test_an_index_of_lists(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        load_model(nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize("name", ["../x.bin", "/tmp/x.bin", "a/x.bin", "..", "", "x\0.bin", "x" * 400])
def test_an_index_that_leads_outside(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / "pytorch_model.bin.index.json"
    path.parent.mkdir()
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "x.bin")
    path.write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
    with pytest.raises(ValueError, match=f"{path} names files outside its folder"):
        load_model(nn.Linear(1, 1), path.parent)


def test_a_link_out_of_a_state(tmp_path: Path) -> None:
    """Links between folders of Hugging Face's cache are as usual; in ours nobody makes one."""
    state = save_training_state(tmp_path / "states", Run().state, step=1)
    file = state / "model" / "00000-of-00001.safetensors"
    file.rename(tmp_path / "elsewhere").parent.exists()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{file} is a link out of its folder"):
        load_training_state(state, Run().state)
    with pytest.raises(ValueError, match="is a link out of its folder"):
        load_model(Run().model, state)
    save_model(Run().model, tmp_path / "blobs" / "0123", use_safetensors=True)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").symlink_to("../blobs/0123")
    assert load_model(Run().model, tmp_path / "hub").is_clean
    (tmp_path / "link").symlink_to(save_training_state(tmp_path / "others", Run().state, step=1))
    load_training_state(tmp_path / "link", Run().state)


@pytest.mark.parametrize(
    "name", ["model/00000-of-00001.safetensors", "model", "random", "parts.pt", MANIFEST]
)
def test_a_loop_of_links_in_a_state_does_not_touch_its_siblings(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    first = save_training_state(tmp_path, run.state, step=1)
    second = save_training_state(tmp_path, run.state, step=2)
    (second / name).rename(tmp_path / "moved")
    (second / name).symlink_to(second / name)
    with pytest.raises((ValueError, OSError), match=str(second / name)):
        load_training_state(second, run.state)
    capfd.readouterr()
    assert latest_training_state(tmp_path) == first
    assert f"passing over {second}: {second / name}" in capfd.readouterr().err
    with pytest.raises(ValueError, match=str(second / name)):
        verify(second)
    assert resume_training_state(tmp_path, run.state) == {"step": 1}
    save_training_state(tmp_path, run.state, step=3)
    assert resume_training_state(tmp_path, run.state) == {"step": 3}


@pytest.mark.parametrize("name", ["tensors.json", "00000-of-00001.safetensors"])
def test_a_loop_of_links_in_a_sharded_folder(name: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save_model(model, tmp_path, gather_dtensor=False)
    file = tmp_path / "model" / name
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(ValueError, match=str(tmp_path / "model")):
        load_model(model, tmp_path)


def test_a_path_that_is_a_loop_of_links(tmp_path: Path) -> None:
    run, loop = Run(), tmp_path / "loop"
    loop.symlink_to(loop)
    for write in (
        lambda: save_training_state(loop, run.state, step=1),
        lambda: save_model(run.model, loop),
        lambda: save_model(run.model, loop / "model.pt"),
        lambda: save_model(run.model, loop, shard=True),
        lambda: save_model(run.model, loop, gather_dtensor=False),
    ):
        with pytest.raises(ValueError, match=f"{loop}.* leads back to itself"):
            write()
    for read in (
        lambda: load_model(run.model, loop),
        lambda: load_training_state(loop, run.state),
        lambda: verify(loop),
    ):
        with pytest.raises((ValueError, OSError), match=str(loop)):
            read()


def test_links_and_fifos_beside_shards_are_carried_over(tmp_path: Path) -> None:
    """To write a folder anew is no reason to open what others have put there."""
    model = nn.Linear(2, 3)
    save_model(model, tmp_path, gather_dtensor=False)
    folder = tmp_path / "model"
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "fifo")
    save_model(model, tmp_path, gather_dtensor=False)
    assert {"loop", "dangling", "fifo"} < {path.name for path in folder.iterdir()}
    assert load_model(model, tmp_path).is_clean


def special_files(folder: Path) -> Iterator[tuple[Path, str]]:
    os.mkfifo(folder / "fifo")
    yield folder / "fifo", "a FIFO"
    (folder / "link").symlink_to(folder / "fifo")
    yield folder / "link", "a FIFO"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        yield folder / "socket", "a socket"
    yield Path("/dev/zero"), "a device"


def test_nobody_waits_for_a_fifo(tmp_path: Path) -> None:
    run = Run()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    readers: list[Callable[[Path], object]] = [
        lambda path: load_model(run.model, path),
        lambda path: load_optimizer(run.optimizer, path, param_names=run.names),
        lambda path: load_lr_scheduler(scheduler, path),
        lambda path: load_checkpoint(path, run.model),
        open_checkpoint,
        verify,
    ]
    for path, kind in special_files(tmp_path):
        for read in readers:
            told: list[str] = []
            thread = threading.Thread(target=note_error, args=(read, path, told), daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), f"waits for {path}"
            assert f"{path} is {kind}, where a file is expected" in told[0]


def verify(path: Path) -> None:
    for verdict in verify_checkpoint(path):
        raise ValueError(verdict.problem)


def note_error(read: Callable[[Path], object], path: Path, told: list[str]) -> None:
    try:
        read(path)
    except Exception as error:
        told.append(str(error))


def test_special_files_in_folders(tmp_path: Path) -> None:
    """The tools look into whole folders."""
    save_model(Run().model, tmp_path / "hf", shard=True, use_safetensors=True)
    os.mkfifo(tmp_path / "hf" / "config.json")
    (tmp_path / "hf" / "latin.txt").write_bytes(b"\xff")
    assert open_checkpoint(tmp_path / "hf").texts == {}
    state = save_training_state(tmp_path / "states", Run().state, step=1)
    (state / "parts.pt").unlink()
    os.mkfifo(state / "parts.pt")
    for check in (lambda: load_training_state(state, Run().state), lambda: open_checkpoint(state)):
        with pytest.raises(ValueError, match=r"parts\.pt"):
            check()
    assert any(verdict.problem for verdict in verify_checkpoint(state))


def test_the_tools_on_a_hostile_state(tmp_path: Path) -> None:
    run = Run()
    state = save_training_state(tmp_path, run.state, step=1)
    rewrite_manifest(state, lambda body: body["files"].pop("model/00000-of-00001.safetensors"))
    *_, last = verify_checkpoint(state)
    assert "does not list model/00000" in str(last.problem)
    with pytest.raises(ValueError, match="does not list"):
        open_checkpoint(state)
    rewrite_manifest(state, lambda body: body["files"].update({"../../x": {"size": 1, "checksum": 2}}))
    for read in (open_checkpoint, verify):
        with pytest.raises(ValueError, match="names files outside its folder"):
            read(state)
    (state / MANIFEST).unlink()
    for read in (open_checkpoint, verify):
        with pytest.raises(ValueError, match=f"{state / MANIFEST} is missing|No such file.*{MANIFEST}"):
            read(state)
    _, *others = verify_checkpoint(state)
    assert others
    assert not any(verdict.problem for verdict in others)


def test_every_bit_of_our_torch_files_counts(tmp_path: Path) -> None:
    model, source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), random.Random(6)
    save_model(model, tmp_path, shard=True, size_per_shard=5e-5)
    shards = sorted(tmp_path.glob("*.bin"))
    assert len(shards) > 1
    for path in shards:
        content = path.read_bytes()
        assert torch.load(path, weights_only=True, mmap=True)
        for place in {0, len(content) - 1, *source.sample(range(len(content)), 100)}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << source.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=str(path)):
                load_model(model, tmp_path)
        path.write_bytes(content)
    assert load_model(model, tmp_path).is_clean


def test_the_headers_of_torchs_own_files_are_compared(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 4), tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    content = path.read_bytes()
    for place in (8, 26, len(content) - 2, len(content) - 22):  # method, length of the name, comment, end
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=str(path)):
            load_model(model, path)
    path.write_bytes(content)
    assert load_model(model, path).is_clean
