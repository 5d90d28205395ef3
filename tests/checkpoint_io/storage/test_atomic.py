"""Files and folders are replaced as a whole or not at all."""

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colossalai.checkpoint_io import atomic_file, atomic_folder
from colossalai.checkpoint_io.storage import _atomic

pytestmark = pytest.mark.unit


@contextmanager
def small_files() -> Iterator[None]:
    """Let no file grow above 4 KB, as a full disk would; for a block, so that pytest's own log may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def fail_after(done: object) -> None:
    raise KeyError


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert entries(path.parent) == ["file.txt"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_file(path) as temporary:
        fail_after(temporary.write_text("half"))
    assert path.read_text() == "old"
    assert entries(tmp_path) == ["file.txt"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with atomic_file(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_folder_is_swapped(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for text in ("first", "second"):
        with atomic_folder(path) as temporary:
            assert entries(temporary) == []
            (temporary / text).write_text(text)
    assert entries(path) == ["second"]
    assert entries(tmp_path) == ["folder"]


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(KeyError), atomic_folder(path) as temporary:
        fail_after((temporary / "half").touch())
    assert entries(path) == ["old"]
    assert entries(tmp_path) == ["folder"]


def test_a_folder_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    (path / "logs").mkdir(parents=True)
    (path / "logs" / "today").write_text("log")
    (path / "link").symlink_to("logs/today")
    (path / "gone").touch()
    (path / "both").write_text("old")
    with atomic_folder(path, keep=lambda name: name != "gone") as temporary:
        (temporary / "both").write_text("new")
    assert entries(path) == ["both", "link", "logs"]
    assert (path / "link").read_text() == "log"
    assert (path / "both").read_text() == "new"


def names_of_calls(patch: pytest.MonkeyPatch, calls: list[tuple[str, str]]) -> None:
    """Note what is put on disk, and when something is put in place."""
    fsync, replace, put = os.fsync, os.replace, _atomic._put_in_place

    def note_sync(descriptor: int) -> None:
        calls.append(
            ("sync", re.sub(r"\.new-.*?(?=/|$)", ".new", os.readlink(f"/proc/self/fd/{descriptor}")))
        )
        fsync(descriptor)

    def note_file(source: Path, target: Path) -> None:
        calls.append(("in place", str(target)))
        replace(source, target)

    def note_folder(source: Path, target: Path) -> None:
        calls.append(("in place", str(target)))
        put(source, target)

    patch.setattr(os, "fsync", note_sync)
    patch.setattr(os, "replace", note_file)
    patch.setattr(_atomic, "_put_in_place", note_folder)


def test_all_is_on_disk_before_it_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power at any moment has no name without its content."""
    calls: list[tuple[str, str]] = []
    names_of_calls(monkeypatch, calls)
    with atomic_file(tmp_path / "file") as temporary:
        temporary.touch()
    new = f"{tmp_path}/.file.new"
    assert calls == [("sync", new), ("in place", f"{tmp_path}/file"), ("sync", str(tmp_path))]
    calls.clear()
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").touch()
    new = f"{tmp_path}/.folder.new"
    below = [("sync", new), ("sync", f"{new}/inner"), ("sync", f"{new}/inner/file")]
    assert sorted(calls[:3]) == below
    assert calls[3:] == [("in place", f"{tmp_path}/folder"), ("sync", str(tmp_path))]


@pytest.mark.parametrize("ability", ["exchange", "link"])
def test_a_file_system_without(ability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    if ability == "exchange":
        monkeypatch.setattr(_atomic, "_exchange", lambda first, second: False)
    else:
        monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "folder"
    path.mkdir()
    (path / "kept").write_text("kept")
    with atomic_folder(path, keep=lambda name: True) as temporary:
        (temporary / "new").touch()
    assert entries(path) == ["kept", "new"]
    assert (path / "kept").read_text() == "kept"
    assert entries(tmp_path) == ["folder"]


def test_a_folder_moved_aside_by_a_killed_writer_is_put_back(tmp_path: Path) -> None:
    aside = tmp_path / ".folder.old-0a1b"
    aside.mkdir()
    (aside / "old").touch()
    with pytest.raises(KeyError), atomic_folder(tmp_path / "folder"):
        raise KeyError
    assert entries(tmp_path / "folder") == ["old"]


def test_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    (tmp_path / ".a[1].new-0a1b").mkdir()
    (tmp_path / ".a1.new-0a1b").touch()
    (tmp_path / ".other.new-0a1b").touch()
    with atomic_file(tmp_path / "a[1]") as temporary:
        temporary.touch()
    assert entries(tmp_path) == [".a1.new-0a1b", ".other.new-0a1b", "a[1]"]


def test_a_place_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for manager in (atomic_file, atomic_folder):
        message = r"cannot write .*/file/below: Not a directory .* 12 bytes needed, \d+ bytes free"
        with pytest.raises(OSError, match=message), manager(tmp_path / "file" / "below", num_bytes=12):
            pass


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    message = r"cannot write .*/file: File too large; 9000 bytes needed"
    with pytest.raises(OSError, match=message), atomic_file(path, num_bytes=9000) as temporary, small_files():
        temporary.write_bytes(bytes(9000))
    assert path.read_text() == "old"
    assert entries(tmp_path) == ["file"]


def test_too_small_a_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 3, 7))
    message = f"Errno {errno.ENOSPC}.*8 bytes needed, 7 bytes free"
    with pytest.raises(OSError, match=message), atomic_file(tmp_path / "file", num_bytes=8):
        pytest.fail("the block ran")


def test_kinds_are_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is a folder.*shard=True"), atomic_file(tmp_path):
        pass
    with pytest.raises(ValueError, match=r"is a file.*shard=False"), atomic_folder(tmp_path / "file"):
        pass
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="current folder"), atomic_folder("."):
        pass
