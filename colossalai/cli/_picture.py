"""Pictures that commands draw: what is asked of a path before anything is done, and units of its axes.

Beside it numbers of bytes as people write and read them.
"""

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
    """Refuse a path to which no picture can be drawn.

    Args:
        option: The option that has it.
        path: The path.

    Raises:
        ValueError: `path` has another suffix or no folder, or matplotlib is not installed.
    """
    if Path(path).suffix not in _PICTURES:
        raise ValueError(f"{option} {path}: the name must end in {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} draws with matplotlib, which is not installed: pip install matplotlib")
    check_folder(path)


def check_folder(path: str) -> None:
    """Refuse a path whose folder is not there.

    Raises:
        ValueError: `path` has no folder.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(Path(path).parent)!r} to write {Path(path).name!r} into")


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in a unit that fits it."""
    unit, name = unit_of(num_bytes)
    return f"{num_bytes / unit:.2f} {name}" if unit > 1 else f"{num_bytes} B"


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Return the largest unit that goes into a number of bytes, in bytes and by name."""
    place = 0
    while num_bytes >= 1024 ** (place + 1) and place < len(_UNITS) - 1:
        place += 1
    return 1024**place, _UNITS[place]


def bytes_of(option: str, text: str) -> int:
    """Return a number of bytes that is given with a unit.

    Args:
        option: The option that has it.
        text: Such as 268435456 or 256MiB.

    Raises:
        ValueError: `text` is no number of bytes, or 0.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _GIVEN_UNITS or float(found[1]) == 0:
        raise ValueError(f"{option} {text}: give bytes, such as 268435456, or with a unit, such as 256MiB")
    return int(float(found[1]) * _GIVEN_UNITS[found[2].lower()])
