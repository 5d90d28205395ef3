"""Retention removes what a save of ours has made, and nothing else; one job at a time saves into a folder."""

import errno
import fcntl
import json
import os
import platform
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_training_state,
    resume_training_state,
    save_model,
    save_training_state,
)
from colossalai.checkpoint_io._retention import _remove_files
from colossalai.checkpoint_io.storage._async_save import _pending
from colossalai.checkpoint_io.storage._folder_lock import LOCK
from colossalai.checkpoint_io.storage._manifest import MANIFEST
from colossalai.core import global_context as gpc
from tests.checkpoint_io.models import flip_a_bit
from tests.ranks import run_ranks

pytestmark = pytest.mark.unit

WAIT_S = 300.0  # for the other job, on a busy machine


def model() -> nn.Module:
    return nn.Linear(1, 1)


def save(folder: Path, step: int, **options: int) -> Path:
    return save_training_state(folder, TrainingState(model=model()), step=step, **options)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def test_what_is_not_ours_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A link, what it leads to, a file, a folder of somebody else: of the name of a training state."""
    precious, folder = tmp_path / "precious", tmp_path / "states"
    (precious / "model").mkdir(parents=True)
    (precious / "model" / "data").write_text("years of work")
    shutil.copy(save(tmp_path / "other", 7) / MANIFEST, precious)
    foreign = folder / "step-00000001"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    (folder / "step-00000000").symlink_to(precious)
    (folder / ".step-00000000.new-0a1b").symlink_to(precious)
    (folder / ".step-00000001.old-0a1b").mkdir()
    (folder / ".step-00000001.old-0a1b" / "notes.txt").write_text("mine")
    (folder / "step-00000002").write_text("a file")
    (folder / "step-00000003").mkdir()
    linked = save(tmp_path / "elsewhere", 4)
    (folder / "step-00000004").symlink_to(linked)
    for step in (10, 11, 12, 13):
        save(folder, step, keep_last=2)
    assert steps(folder) == [f"step-{step:08d}" for step in (0, 1, 2, 3, 4, 12, 13)]
    assert (precious / "model" / "data").read_text() == "years of work"
    assert (foreign / "notes.txt").exists()
    assert (folder / ".step-00000001.old-0a1b" / "notes.txt").exists()
    assert (folder / ".step-00000000.new-0a1b").is_symlink()
    assert load_training_state(linked, TrainingState(model=model()))["step"] == 4
    told = capfd.readouterr().err
    for step in range(5):
        path = folder / f"step-{step:08d}"
        assert told.count(f"{path} stays and does not count in keep_last") == 1
        assert f"`colossalai checkpoint verify {path}`" in told


@pytest.mark.parametrize("harm", ["manifest", "size", "no manifest"])
def test_a_damaged_state_stays_and_does_not_count(harm: str, tmp_path: Path) -> None:
    damaged = save(tmp_path, 1)
    if harm == "manifest":
        flip_a_bit(damaged / MANIFEST)
    elif harm == "size":
        with (damaged / "parts.pt").open("ab") as file:
            file.write(b"x")
    else:
        (damaged / MANIFEST).unlink()
    for step in (2, 3, 4):
        save(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]
    assert (damaged / "model" / "00000-of-00001.safetensors").exists()
    save(tmp_path, 1)  # the run has gone back and comes to it again: what is damaged is moved, not lost
    (aside,) = (path for path in tmp_path.iterdir() if ".damaged-" in path.name)
    assert (aside / "model" / "00000-of-00001.safetensors").exists()
    assert latest_training_state(tmp_path) == damaged


@pytest.mark.parametrize(
    ("keep_last", "flipped", "stay"),
    [
        (1, [], [3]),
        (1, [3], [2, 3]),  # of the right size, so only its checksums tell that it is not the last good one
        (1, [2, 3], [1, 2, 3]),
        (1, [1, 2, 3], [1, 2, 3]),
        (2, [], [2, 3]),
        (3, [], [1, 2, 3]),
    ],
)
def test_what_stays_on_a_full_disk(
    keep_last: int, flipped: list[int], stay: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a save only what is surplus already is removed, and never the last good state."""
    states = {step: save(tmp_path, step, keep_last=3) for step in (1, 2, 3)}
    for step in flipped:
        flip_a_bit(states[step] / "model" / "00000-of-00001.safetensors")
    good = max({1, 2, 3} - set(flipped), default=None)
    (tmp_path / ".step-00000009.new-0a1b" / "model").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 4, keep_last=keep_last)
    assert steps(tmp_path) == [f"step-{step:08d}" for step in stay]
    assert (tmp_path / ".step-00000009.new-0a1b").exists() == (good is None)
    assert latest_training_state(tmp_path) == (None if good is None else states[good])


def test_a_save_does_not_replace_what_is_not_ours(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("years of work")
    (tmp_path / "step-00000001").symlink_to(precious)
    shutil.copytree(precious, tmp_path / "step-00000002")
    (tmp_path / "step-00000003").write_text("a file")
    os.mkfifo(tmp_path / "step-00000004")
    (tmp_path / "step-00000005").symlink_to(tmp_path / "nowhere")
    for step, told in enumerate(("is a link", *["is no training state"] * 3, "is a link"), start=1):
        with pytest.raises(ValueError, match=rf"step-0000000{step} .*{told}"):
            save(tmp_path, step)
    assert (precious / "data").read_text() == (tmp_path / "step-00000002" / "data").read_text()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo is no regular file"):
        save_model(model(), tmp_path / "fifo")


def test_a_folder_of_slices_keeps_files_of_others(tmp_path: Path) -> None:
    save_model(model(), tmp_path / "weights", gather_dtensor=False)
    (tmp_path / "weights" / "model" / "notes.txt").write_text("mine")
    save_model(model(), tmp_path / "weights", gather_dtensor=False)
    assert (tmp_path / "weights" / "model" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_ranks_remove_all_files_however_their_turns_fall(num_ranks: int, tmp_path: Path) -> None:
    """A rank that is late lists only what the others have left."""
    (tmp_path / "inner").mkdir()
    for number in range(20):
        (tmp_path / ("inner" * (number % 2)) / f"model-{number}.safetensors").touch()
    for rank in range(num_ranks):
        _remove_files([tmp_path], part=rank, num_parts=num_ranks)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_of_a_similar_name_stay(tmp_path: Path) -> None:
    """Beside a file that is written, only what its writers name so is a leftover."""
    for name in (".model.pt.new-notes", ".model.pt.old-notes", ".model.pt.new-0a1b"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".model.pt.new-77").symlink_to(tmp_path / ".model.pt.new-notes")
    save_model(model(), tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".model.pt.new-77",
        ".model.pt.new-notes",
        ".model.pt.old-notes",
        "model.pt",
    ]


def test_a_state_that_is_meant_and_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without its manifest, gone, or a file: an error, not a run that begins anew."""
    state = TrainingState(model=model())
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / MANIFEST).unlink()
    with pytest.raises(ValueError, match=f"{second / MANIFEST} is missing"):
        resume_training_state(second, state)
    assert resume_training_state(tmp_path, state) == {"step": 1}
    told = capfd.readouterr().err
    assert f"passing over {second}: {second / MANIFEST} is missing" in told
    assert f"`colossalai checkpoint verify {second}`" in told
    renamed = second.rename(tmp_path / "best")
    with pytest.raises(ValueError, match=f"{renamed / MANIFEST} is missing"):
        resume_training_state(renamed, state)
    with pytest.raises(FileNotFoundError, match="step-00000009"):
        resume_training_state(tmp_path / "step-00000009", state)
    with pytest.raises(ValueError, match="is a file"):
        resume_training_state(first / "parts.pt", state)
    assert resume_training_state(tmp_path / "nothing", state) is None


def save_as_a_job(folder: Path) -> str:
    """Two processes, each a job by itself: the second one saves while the first one lives."""
    rank = int(os.environ["RANK"])
    colossalai.launch({}, 0, 1, "127.0.0.1", int(os.environ["MASTER_PORT"]) + rank, verbose=False)
    booster = Booster()
    if rank == 0:
        booster.save(folder, model(), step=1)
        child = os.fork()
        if child == 0:  # a process of the script's own that ends: it takes no lock along
            _pending.locks.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert (folder / LOCK).exists()
        (folder / "pid").write_text(str(os.getpid()))
        wait_for(folder / "refused")
        gpc.destroy()
        assert not (folder / LOCK).exists()
        (folder / "ended").touch()
        return ""
    wait_for(folder / "pid")
    before = steps(folder)
    with pytest.raises(ValueError, match="another job saves its training states into") as caught:
        booster.save(folder, model(), step=2, save_async=True)
    assert steps(folder) == before
    assert f"process {(folder / 'pid').read_text()} on {os.uname().nodename}, since 2" in str(caught.value)
    (folder / "refused").touch()
    wait_for(folder / "ended")
    booster.save(folder, model(), step=2)
    booster.save(folder, model(), step=3)
    gpc.destroy()
    return str(caught.value)


def wait_for(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.01)


@pytest.mark.dist
def test_a_second_job_is_refused_before_it_writes(tmp_path: Path) -> None:
    run_ranks(save_as_a_job, 2, tmp_path)
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_lock_that_a_killed_job_has_left(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"host": "elsewhere", "pid": 1, "since": "2020-01-01 00:00:00"}')
    save(tmp_path, 1)
    assert not (tmp_path / LOCK).exists()
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{LOCK} is no regular file"):
        save(tmp_path, 2)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("host", "is_refused"), [(platform.node(), True), ("elsewhere", False)])
def test_a_file_system_without_locks(
    host: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a living process of this machine counts."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    (tmp_path / LOCK).write_text(
        json.dumps({"host": host, "pid": os.getppid(), "since": "2026-01-01 00:00:00"})
    )
    with pytest.raises(ValueError, match=f"process {os.getppid()} on") if is_refused else nullcontext():
        save(tmp_path, 1)
