"""Verification of every file of a checkpoint by its checksums: all that is wrong is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from colossalai.checkpoint_io._retention import is_like_a_state
from colossalai.checkpoint_io.formats import DCP_INDEX, has_checksums, read_sharded_index, verify
from colossalai.checkpoint_io.storage import INDEX, MANIFEST, read_manifest, refuse_links_out, verify_files
from colossalai.checkpoint_io.tools._open import KINDS, open_checkpoint


@dataclass(frozen=True)
class FileCheck:
    """Result of the check of a file.

    Attributes:
        file: The file or folder.
        size: Its bytes; None if it is not there, or a folder.
        problem: Its problem, None without one.
        is_checked: Whether there were checksums to compare it with.
    """

    file: Path
    size: int | None
    problem: str | None
    is_checked: bool


def verify_checkpoint(path: str | Path, *, variant: str | None = None) -> Iterator[FileCheck]:
    """Compare every file of a checkpoint with its checksums, then open it; yield the results.

    Raises:
        ValueError: `path` is not a checkpoint, or one that cannot be verified.
        OSError: `path` is not there.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "there is no such file or folder", str(path))
    if (path / DCP_INDEX).is_file():
        raise ValueError(f"{path} is a distributed checkpoint of torch, which has no checksums: convert it")
    checks: dict[Path, Callable[[], object]] = {}
    if path.is_dir() and is_like_a_state(path):
        problem = _problem(partial(read_manifest, path))
        if problem is not None:
            yield from _without_manifest(path, problem)
            return
        manifest = read_manifest(path)
        refuse_links_out(manifest.files, path)
        checks = {
            path / name: partial(verify_files, path, {name: entry}, listed_in=MANIFEST)
            for name, entry in manifest.files.items()
        }
    elif (path / INDEX).is_file():
        checks = {
            path / name: partial(verify_files, path, {name: entry}, listed_in=INDEX)
            for name, entry in read_sharded_index(path).files.items()
        }
    elif path.is_dir() or path.name.endswith(".json"):
        checks = {file: partial(verify, file) for file in open_checkpoint(path, variant=variant).files}
    else:
        checks = {path: partial(verify, path)}
    is_whole = True
    for file, check in checks.items():
        verdict = _verdict(file, check, has_own=check.func is verify)  # type: ignore[attr-defined]
        is_whole = is_whole and verdict.problem is None
        yield verdict
    if is_whole:
        problem = _problem(partial(open_checkpoint, path, variant=variant))
        if problem is not None:
            yield FileCheck(path, None, problem, is_checked=True)


def _without_manifest(path: Path, problem: str) -> Iterator[FileCheck]:
    """Yield the problem of a manifest, and the checks of the tensors, which have their own index."""
    yield FileCheck(path / MANIFEST, None, problem, is_checked=True)
    for part in KINDS:
        if (path / part / INDEX).is_file():
            try:
                yield from verify_checkpoint(path / part)
            except (ValueError, OSError) as error:
                yield FileCheck(path / part / INDEX, None, str(error), is_checked=True)


def _verdict(file: Path, check: Callable[[], object], *, has_own: bool) -> FileCheck:
    problem = _problem(check)
    size = file.stat().st_size if file.is_file() else None
    is_checked = problem is not None or not has_own or has_checksums(file)
    return FileCheck(file, size, problem, is_checked)


def _problem(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (ValueError, OSError) as error:
        return str(error)
    return None
