"""Validation of metadata from a disk, which may be damaged, newer than this version, or hostile.

A reader here returns valid data, or raises one ValueError with the path. Files are regular ones (opening a
FIFO would wait for ever), JSON has a bounded depth and the expected form, down to every number; names stay
inside the folder that they are relative to.
"""

import errno
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""Values of JSON."""
Form: TypeAlias = "type | Count | list[Form] | tuple[Form, ...] | dict[str | type, Form]"
"""The form of a value that JSON held; see `refuse_other_form`."""

MOST = 1 << 62  # more than any size of a file or a tensor, and arithmetic with it stays in 64 bits
_SHOWN = 60
_NAMES_SHOWN = 8
_LONGEST_NAME, _LONGEST_PATH = 255, 1024
_KINDS = (
    *((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder")),
    *((stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device")),
)
# Errors of parsers and readers of damaged content.
OF_DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError),
    *(struct.error, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError),
)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Convert errors of a reader of damaged content into one ValueError with the path."""
    try:
        yield
    except OF_DAMAGE as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        reason = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"{path} is damaged: {reason}") from error


def refuse_special(path: Path) -> None:
    """Refuse other files than regular ones before they are opened; a link counts as its target.

    Raises:
        ValueError: `path` is a FIFO, a socket, a device or a folder.
        OSError: `path` is not there, or cannot be inspected.
    """
    mode = os.stat(path).st_mode
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise ValueError(f"{path} is {name}, where a file is expected")


def read_json(path: Path) -> object:
    """Return the content of a JSON file.

    Raises:
        ValueError: The file is damaged, nested too deeply, or no regular file.
        OSError: The file cannot be read.
    """
    refuse_special(path)
    with damage_named(path):
        return json.loads(path.read_bytes().decode("utf-8"))


def read_checked_json(path: Path, key: str, *, version: int, form: Form) -> dict[str, object]:
    """Return the value of a key in a file of ours, which also has a format version and a checksum.

    Raises:
        ValueError: The file is damaged, of another version, or its content is not of the form.
        OSError: The file cannot be read.
    """
    content: Any = read_json(path)
    with damage_named(path):
        refuse_other_form(content, {"format": int, "crc32": int, key: dict}, path.name)
        if content["format"] != version:
            raise ValueError(f"{path} is of format {content['format']}; this version reads format {version}")
        body: dict[str, object] = content[key]
        if json_checksum(body) != content["crc32"]:
            raise ValueError("its checksum does not match its content")
        refuse_other_form(body, form, key)
        return body


def json_checksum(content: object) -> int:
    """Return a checksum of a JSON value, independent of the order of keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def differs_by_one(name: str, wanted: str) -> bool:
    """Return whether a name has at most one other character than the wanted one, as after a flipped bit."""
    if len(name) != len(wanted):
        return False
    return sum(one != other for one, other in zip(name, wanted, strict=True)) <= 1


@dataclass(frozen=True)
class Count:
    """The form of a size, an offset or a number of things.

    Attributes:
        least: The smallest that is allowed.
    """

    least: int = 0


@dataclass(frozen=True)
class FileEntry:
    """Expected size and checksum of a file."""

    size: int
    checksum: int


FORM_OF_FILES: Form = {str: {"size": Count(), "checksum": Count()}}


def file_entries(content: Mapping[str, Mapping[str, int]]) -> dict[str, FileEntry]:
    """Return the file entries of an index or a manifest, of `FORM_OF_FILES`."""
    return {name: FileEntry(entry["size"], entry["checksum"]) for name, entry in content.items()}


def refuse_other_form(value: object, form: Form, what: str) -> None:
    """Refuse a JSON value that is not of the form that its reader relies on.

    A form is a type; a `Count`; a list of one form, that of all items; a tuple of the forms of its items, as
    many; a dictionary of the fields that there must be (others may come from newer versions); or a dictionary
    of the type `str`, which has the form of all fields of any name.

    Args:
        value: The value.
        form: The expected form.
        what: Name of the value in messages.

    Raises:
        ValueError: `value` has another type somewhere, is out of range, or lacks a field.
    """
    if type(value) is form:  # most values; a truth value is not an int here
        return
    match form:
        case Count(least):
            if not least <= of_kind(value, int, what) <= MOST:
                raise ValueError(f"{what!r} is {_shown(value)}, where a number from {least} on is expected")
        case [*_] as forms:
            items = of_kind(value, list, what)
            each = forms * len(items) if isinstance(forms, list) else forms
            for item, its_form in zip(items, each, strict=True):
                refuse_other_form(item, its_form, what)
        case dict() as fields:
            present = of_kind(value, dict, what)
            for name in present if str in fields else fields:
                if name not in present:
                    raise ValueError(f"it has no {name!r}")
                refuse_other_form(present[name], fields[str if str in fields else name], str(name))
        case type() as kind:
            of_kind(value, kind, what)


def of_kind(value: object, kind: type[T], what: str) -> T:
    """Return a value of a kind; a bool does not count as a number.

    Raises:
        ValueError: `value` is of another kind.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what!r} is {_shown(value)}, where a {kind.__name__} is expected")
    return value


def listed(names: Iterable[str], *, shown: int = _NAMES_SHOWN) -> str:
    """Return names as a text that stays readable when there are thousands."""
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "nothing") + rest


def refuse_strays(names: Iterable[str], path: Path, *, is_flat: bool = True) -> None:
    """Refuse names of files that do not stay inside the folder of the file that lists them.

    Args:
        names: The names.
        path: The file that lists them.
        is_flat: Whether they are names in that very folder, not in folders below it.

    Raises:
        ValueError: A name is absolute, contains "..", is empty, or is in another folder.
    """
    strays = [name for name in names if not _stays_inside(name, is_flat=is_flat)]
    if strays:
        raise ValueError(f"{path} names files outside its folder: {listed(map(_shown, strays))}")


def refuse_links_out(names: Iterable[str], folder: Path) -> None:
    """Refuse files of a folder that are outside of it through a link in their path.

    Raises:
        ValueError: A file of `names` resolves to a path outside of `folder`, or to none.
    """
    home = resolved(folder)
    for name in names:
        place = resolved(folder / name)
        if not place.is_relative_to(home):
            raise ValueError(f"{folder / name} is a link out of its folder, to {place}: put the file there")


def resolved(path: Path) -> Path:
    """Return the absolute path of a file or folder, with all links resolved.

    Raises:
        ValueError: A link of `path` leads back to itself.
    """
    try:
        os.stat(path)
    except OSError as error:  # of any other kind: the reader or the writer of the path will report it
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a link that leads back to itself, or lies behind one: remove the link"
            ) from error
    return Path(os.path.realpath(path))


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
