"""Record of a call, and the comparison of the calls of several ranks.

A `CallRecord` is an operation that a rank has issued, from any source: torch's flight recorder, a process
group in Python, the wrappers of sends and receives, a meeting, or the file of signatures. Ranks compare the
`Properties` of a call before or after they issue it; `difference` names those that differ.

[Note: channels]
A wait ends when other ranks have reached a number in a channel. For a collective the channel is its group and
the number its sequence number; for a receive they count the messages that its source has sent to this rank,
for a send those that its destination has received from this rank. All counts start at 1. The other ranks wait
for a rank that has not reached the number.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from colossalai.monitor._sections import place_of

AxisOf = Callable[[tuple[int, ...]], str | None]
"""Name of the mesh axis along some global ranks, None if there is none."""

Properties = dict[str, Any]
"""Compared properties of a call: `op`, shape, dtype, root, ...; and `where` and `place`, which can differ."""

T = TypeVar("T", bound=Hashable)

_NOT_COMPARED = ("place", "where")
MOST_NAMED = 8
"""Ranks that a line of a report names."""


class DisagreementError(RuntimeError):
    """Ranks were about to issue calls that do not match; the message has the values of each."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """An operation that a rank has issued: a collective, a message or a meeting.

    Attributes:
        op: Its name in `torch.distributed`.
        channel: The channel that its partners have to reach; see [Note: channels].
        number: The number that they have to reach.
        partners: Their global ranks.
        group: The name of its process group.
        where: "of axis tp", "of group '7'", or the activity that a meeting belongs to.
        shapes: Shapes of its inputs.
        dtypes: Their dtypes.
        num_tensors: Number of its tensors, if only the first is on record.
        is_pending: Whether it is incomplete.
        seconds: Seconds since it was issued.
        thread: The thread that issued it.
        module: The name of the innermost module at work, if there is one.
        patience: See `meeting`.
        advice: See `meeting`.
        after_backwards: See `meeting`.
    """

    op: str
    channel: str
    number: int
    partners: tuple[int, ...]
    group: str = ""
    where: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    num_tensors: int = 1
    is_pending: bool = True
    seconds: float = 0.0
    thread: int = 0
    module: str | None = None
    patience: float | None = None
    advice: str = ""
    after_backwards: bool = False

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Self:
        """Return a record from its fields as JSON restores them."""
        tuples = {name: tuple(fields[name]) for name in ("partners", "dtypes")}
        return cls(**{**fields, **tuples, "shapes": tuple(map(tuple, fields["shapes"]))})

    @property
    def end(self) -> tuple[str, int]:
        """The channel and the number that end a wait for it; the same on all ranks that wait in one call."""
        return self.channel, self.number

    def is_reached(self, numbers: Mapping[str, int]) -> bool:
        """Return whether a rank that has reached these numbers, by channel, has come to it."""
        return numbers.get(self.channel, 0) >= self.number

    def properties(self) -> Properties:
        """Return the properties that `difference` compares."""
        found: Properties = {"op": self.op, "place": ""}
        if self.num_tensors > 1:
            found["number of tensors"] = self.num_tensors
        if self.dtypes:
            found["dtype"] = self.dtypes[0]
        if self.shapes:
            found["shape"] = [list(shape) for shape in self.shapes]
        return found

    def describe(self) -> str:
        """Name it: "all_reduce #118 of axis tp in blocks.2.attn"."""
        peer = {"send": f"to rank {self.partners[0]} ", "recv": f"from rank {self.partners[0]} "}.get(
            self.op, ""
        )
        return f"{self.op} #{self.number} {peer}{self.where}{f' in {self.module}' if self.module else ''}"

    def tensors(self) -> str:
        """Name its tensors: "(8, 128) float"."""
        pairs = zip(self.shapes, self.dtypes, strict=False)
        return ", ".join(f"{shape} {dtype}" for shape, dtype in pairs)


def shapes_and_dtypes(tensors: Iterable[tuple[torch.Size, torch.dtype]]) -> dict[str, Any]:
    """Return the fields `shapes` and `dtypes` of a `CallRecord`."""
    pairs = [(tuple(shape), dtype_name(dtype)) for shape, dtype in tensors]
    return {"shapes": tuple(shape for shape, _ in pairs), "dtypes": tuple(dtype for _, dtype in pairs)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def describe_group(axis: str | None, group: str) -> str:
    """Name a process group by the mesh axis along its ranks, or by its own name where there is none."""
    return f"of axis {axis}" if axis is not None else f"of group {group!r}"


def describe_ranks(ranks: Collection[int], *, most: int = MOST_NAMED) -> str:
    """Return "rank 3", or "ranks 0, 1"; of many the first `most`."""
    shown = ", ".join(map(str, sorted(ranks)[:most])) + (", ..." if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def late_ranks(ranks: Collection[int], call: str, seconds: float) -> str:
    """Return the error of a call that has waited for ranks until its time limit; all of them are named."""
    return f"{_ranks_with_verb(ranks)} not come to {call} within {seconds:g} s"


def lost_ranks(ranks: Collection[int], call: str, *, have_ended: bool) -> str:
    """Return the error of a call that waits for ranks in vain; all of them are named.

    Args:
        ranks: Their global ranks.
        call: "all_reduce #118 of axis tp".
        have_ended: Whether their processes have ended without leaving the group first.
    """
    how = "ended" if have_ended else "left the group"
    return f"{_ranks_with_verb(ranks)} {how} before the others were through with {call}"


def _ranks_with_verb(ranks: Collection[int]) -> str:
    return f"{describe_ranks(ranks, most=len(ranks))} {'has' if len(ranks) == 1 else 'have'}"


def properties_of(op: str, tensors: Any, *, has_shapes: bool = True) -> Properties:
    """Return the properties of an operation that the caller is about to issue.

    Args:
        op: Its name in `torch.distributed`.
        tensors: Tensors in lists in lists.
        has_shapes: Whether their shapes are compared, not only the dtypes.
    """
    listed = list(_tensors(tensors))
    properties: Properties = {"op": op}
    if has_shapes:
        properties["shape"] = [list(tensor.shape) for tensor in listed]
    properties["dtype"] = sorted({dtype_name(tensor.dtype) for tensor in listed})
    properties["place"] = place_of(sys._getframe(1))
    return properties


def difference(where: str, calls: Mapping[int, Properties]) -> str:
    """Return the properties that differ between ranks, an empty text if none does."""
    keys = dict.fromkeys(key for properties in calls.values() for key in properties)
    if len({properties["op"] for properties in calls.values()}) > 1:
        keys = {"op": None}  # the rest cannot be compared
    parts = []
    for key in keys:
        groups = ranks_by_value({rank: _text(properties.get(key)) for rank, properties in calls.items()})
        if len(groups) > 1 and key not in _NOT_COMPARED:
            values = ", ".join(f"{value} on rank{'s' * (len(r) > 1)} {r}" for value, r in groups.items())
            parts.append(f"{key} is {values}")
    if not parts:
        return ""
    first = next(iter(calls.values()))
    op = "the collective" if "op" in keys and len(keys) == 1 else first["op"]
    lines = [f"ranks do not agree on {op} {where}: {'; '.join(parts)}"]
    places = [f"  rank {rank} at {properties['place']}" for rank, properties in calls.items()]
    return "\n".join([*lines, *places])


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return the ranks of each value, in the order of `values`."""
    groups: dict[T, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks without the most frequent value, or all ranks if they are not fewer than the rest."""
    usual = max(ranks_by_value(values).values(), key=len)
    others = tuple(rank for rank in values if rank not in usual)
    return others if len(others) < len(usual) else tuple(values)


def op_and_shapes(properties: Properties) -> str:
    """Name an operation with its shapes."""
    shapes = f" of {_text(properties['shape'])}" if properties.get("shape") else ""
    return f"{properties['op']}{shapes}"


def op_and_place(properties: Properties) -> str:
    """Name an operation, its number in its group and the line that issues it."""
    return f"{op_and_shapes(properties)} {properties['where']}, at {properties['place']}"


def _text(value: Any) -> str:
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
