"""Checks of output paths of pictures, units of axes, and sizes in bytes with units."""

import importlib.util
import re
from pathlib import Path

_PICTURES = (".png", ".svg", ".pdf")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_GIVEN_UNITS = {
    **{"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def check_picture(option: str, path: str) -> None:
    """Check that a picture can be written to a path.

    Args:
        option: Name of the option, for messages.
        path: Path of the picture.

    Raises:
        ValueError: `path` has another suffix or no folder, or matplotlib is not installed.
    """
    if Path(path).suffix not in _PICTURES:
        raise ValueError(f"{option} {path}: the name must end in {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} draws with matplotlib, which is not installed: pip install matplotlib")
    check_folder(path)


def check_folder(path: str) -> None:
    """Check that the folder of a path exists.

    Raises:
        ValueError: `path` is in a folder that does not exist.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(Path(path).parent)!r} to write {Path(path).name!r} into")


def size_text(num_bytes: int) -> str:
    """Format a number of bytes with the largest fitting unit."""
    unit, name = unit_of(num_bytes)
    return f"{num_bytes / unit:.2f} {name}" if unit > 1 else f"{num_bytes} B"


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Return the size and the name of the largest unit that is not larger than a number of bytes."""
    place = 0
    while num_bytes >= 1024 ** (place + 1) and place < len(_UNITS) - 1:
        place += 1
    return 1024**place, _UNITS[place]


def bytes_of(option: str, text: str) -> int:
    """Parse a number of bytes with an optional unit.

    Args:
        option: Name of the option, for messages.
        text: A size such as 268435456 or 256MiB.

    Raises:
        ValueError: `text` is not a number of bytes, or is 0.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _GIVEN_UNITS or float(found[1]) == 0:
        raise ValueError(f"{option} {text}: give bytes, such as 268435456, or with a unit, such as 256MiB")
    return int(float(found[1]) * _GIVEN_UNITS[found[2].lower()])
