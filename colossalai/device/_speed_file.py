"""The JSON file of a mesh's speed: lines, and the machine that they were measured on."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from colossalai.device._fit import AlphaBeta
from colossalai.device._speed import OPERATIONS, Machine, MeshSpeed

_FORMAT = "colossalai mesh speed 1"


def to_json(speed: MeshSpeed, order: Sequence[int]) -> str:
    """Return a measured speed as the text of a file.

    Args:
        speed: The measured speed.
        order: The global ranks of the grid, row by row.
    """
    assert speed.machine is not None, "assumed costs are no property of a machine"
    groups = [
        {
            "extents_and_strides": [list(each) for each in extents],
            "operations": {op: asdict(line) for op, line in lines.items()},
        }
        for extents, lines in speed.lines.items()
    ]
    content = {
        "format": _FORMAT,
        "machine": asdict(speed.machine),
        "shape": list(speed.shape),
        "ranks": list(order),
        "groups": groups,
    }
    return json.dumps(content, indent=2) + "\n"


def from_json(text: str, *, name: str) -> tuple[MeshSpeed, tuple[int, ...]]:
    """Return the speed and the order of ranks of a text written by `to_json`.

    Args:
        text: The content.
        name: Name of the file, for messages.

    Raises:
        ValueError: `text` is not a text of `to_json`.
    """
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
        found = content["machine"]
        machine = Machine(
            hosts=tuple(map(str, found["hosts"])),
            cores=tuple(map(int, found["cores"])),
            device=str(found["device"]),
            backend=str(found["backend"]),
            torch=str(found["torch"]),
        )
        shape, order = tuple(map(int, content["shape"])), tuple(map(int, content["ranks"]))
        lines = {
            tuple((int(extent), int(stride)) for extent, stride in group["extents_and_strides"]): {
                op: _line(group["operations"][op]) for op in OPERATIONS
            }
            for group in content["groups"]
        }
        if sorted(order) != list(range(math.prod(shape))):
            raise ValueError(f"its ranks {order} are not those of a mesh of shape {shape}")
        if ((len(order), 1),) not in lines:
            raise ValueError("it has no group of all ranks")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{name} is not a file of DeviceMesh.save: {error}") from error
    return MeshSpeed(shape, lines, machine), order


def _line(content: dict[str, Any]) -> AlphaBeta:
    line = AlphaBeta(*(float(content[key]) for key in ("alpha", "beta", "error")))
    if not all(math.isfinite(each) and each >= 0 for each in (line.alpha, line.beta, line.error)):
        raise ValueError(f"{content} has a number that is negative or not finite")
    return line
