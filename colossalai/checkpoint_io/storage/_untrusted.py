"""What comes from a disk and may be damaged, newer than this version, or hostile: read with suspicion.

A reader here gives what it was asked for, or one ValueError with the path. Files are regular ones (to open a
FIFO would wait for ever), JSON is of a depth that can be walked, numbers are numbers, and names stay inside
the folder that they are relative to.
"""

import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from colossalai.checkpoint_io._load_report import listed

T = TypeVar("T")

MOST = 1 << 62  # more than any size of a file or a tensor, and arithmetic with it stays in 64 bits
_SHOWN = 60
_LONGEST_NAME, _LONGEST_PATH = 255, 1024
_KINDS = (
    *((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder")),
    *((stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device")),
)
# What parsers and readers of damaged content raise.
OF_DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError),
    *(struct.error, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError),
)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Let whatever a reader makes of damaged content be one ValueError with the path."""
    try:
        yield
    except OF_DAMAGE as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        reason = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"{path} is damaged: {reason}") from error


def refuse_special(path: Path) -> None:
    """Refuse what is no regular file, before anybody waits for it; a link counts as what it leads to.

    Raises:
        ValueError: `path` is a FIFO, a socket, a device or a folder.
        OSError: It is not there, or cannot be looked at.
    """
    mode = os.stat(path).st_mode
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise ValueError(f"{path} is {name}, where a file is expected")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: It is damaged, nested too deeply, or no regular file.
        OSError: It cannot be read.
    """
    refuse_special(path)
    with damage_named(path):
        return json.loads(path.read_bytes().decode("utf-8"))


def field_of(content: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field of an object that JSON held.

    Raises:
        ValueError: It is missing, or of another kind.
    """
    if not isinstance(content, Mapping) or name not in content:
        raise ValueError(f"it has no {name!r}")
    return of_kind(content[name], kind, name)


def of_kind(value: Any, kind: type[T], what: str) -> T:
    """Return a value of a kind; a truth value is no number.

    Raises:
        ValueError: The value is of another kind.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what!r} is {_shown(value)}, where a {kind.__name__} is expected")
    return value


def count_of(value: Any, what: str, *, least: int = 0) -> int:
    """Return a size, an offset or a number of things.

    Raises:
        ValueError: The value is no whole number, or out of range.
    """
    number = of_kind(value, int, what)
    if not least <= number <= MOST:
        raise ValueError(f"{what!r} is {_shown(number)}, where a number from {least} on is expected")
    return number


def counts_of(values: Any, what: str) -> tuple[int, ...]:
    """Return sizes or offsets, one for each dimension.

    Raises:
        ValueError: `values` is no list of such numbers.
    """
    return tuple(count_of(value, what) for value in of_kind(values, list, what))


def texts_of(values: Any, what: str) -> dict[str, str]:
    """Return an object whose values are texts.

    Raises:
        ValueError: `values` is something else.
    """
    return {name: of_kind(text, str, name) for name, text in of_kind(values, dict, what).items()}


def refuse_strays(names: Iterable[str], path: Path, *, is_flat: bool = True) -> None:
    """Refuse names of files that do not stay inside the folder of the file that lists them.

    Args:
        names: The names.
        path: What lists them.
        is_flat: Whether they are names in that very folder, not in folders below it.

    Raises:
        ValueError: A name is absolute, goes up, is empty, or lies in another folder.
    """
    strays = [name for name in names if not _stays_inside(name, is_flat=is_flat)]
    if strays:
        raise ValueError(f"{path} names files outside its folder: {listed(map(_shown, strays))}")


def refuse_links_out(names: Iterable[str], folder: Path) -> None:
    """Refuse files of a folder that are, through a link somewhere on their way, outside of it.

    Raises:
        ValueError: There is such a file.
    """
    home = folder.resolve()
    for name in names:
        place = (folder / name).resolve()
        if not place.is_relative_to(home):
            raise ValueError(f"{folder / name} is a link out of its folder, to {place}: put the file there")


def _stays_inside(name: str, *, is_flat: bool) -> bool:
    parts = PurePosixPath(name).parts
    if not parts or "/".join(parts) != name or {"..", "/", "."} & set(parts) or (is_flat and len(parts) > 1):
        return False
    try:
        lengths = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        return False
    return max(lengths) <= _LONGEST_NAME and sum(lengths) <= _LONGEST_PATH and "\0" not in name


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
