"""Mismatches in debug mode: descriptions of operations that ranks can compare, and what differs."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from colossalai.monitor._sections import place_of

Said = dict[str, Any]
"""What a rank says of an operation: `op`, `where` ("#3 of axis tp"), `place` in the script, properties."""

_NOT_COMPARED = ("place", "where")


class DisagreementError(RuntimeError):
    """Ranks were about to communicate what does not fit; the message has the values of each."""


def say(op: str, tensors: Any, *, has_shapes: bool = True) -> Said:
    """Describe an operation of the caller.

    Args:
        op: What `torch.distributed` calls it.
        tensors: Tensors in lists in lists.
        has_shapes: Whether their shapes are to be compared, not only the dtypes.
    """
    listed = list(_tensors(tensors))
    said: Said = {"op": op}
    if has_shapes:
        said["shape"] = [list(tensor.shape) for tensor in listed]
    said["dtype"] = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in listed})
    said["place"] = place_of(sys._getframe(1))
    return said


def difference(where: str, told: dict[int, Said]) -> str:
    """Return what differs between ranks, empty if nothing does."""
    keys = dict.fromkeys(key for said in told.values() for key in said if key not in _NOT_COMPARED)
    if len({said["op"] for said in told.values()}) > 1:
        keys = {"op": None}  # the rest cannot be compared
    parts = list(_parts(keys, told))
    if not parts:
        return ""
    first = next(iter(told.values()))
    op = "the collective" if "op" in keys and len(keys) == 1 else first["op"]
    lines = [f"ranks do not agree on {op} {where}: {'; '.join(parts)}"]
    return "\n".join([*lines, *(f"  rank {rank} at {said['place']}" for rank, said in told.items())])


def shown(said: Said) -> str:
    """Name an operation with its shapes."""
    shapes = f" of {_value(said['shape'])}" if said.get("shape") else ""
    return f"{said['op']}{shapes}"


def told(said: Said) -> str:
    """Name an operation, and where it is."""
    return f"{shown(said)} {said['where']}, at {said['place']}"


def _parts(keys: Iterable[str], told: dict[int, Said]) -> Iterator[str]:
    for key in keys:
        by_value: dict[str, list[int]] = {}
        for rank, said in told.items():
            by_value.setdefault(_value(said.get(key)), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on rank{'s' * (len(r) > 1)} {r}" for value, r in by_value.items())
            yield f"{key} is {values}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return (
            " and ".join(str(tuple(part) if isinstance(part, list) else part) for part in value) or "nothing"
        )
    return str(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for part in value:
            yield from _tensors(part)
