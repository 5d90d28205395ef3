"""Debug mode: before a collective begins, its ranks tell one another what it is, and compare.

[Note: where ranks compare]
A comparison must not hang where the collective would. So it does not use the group, but the store: each rank
leaves there what it is about to do, under the group and a number that counts the collectives of the group,
and waits for what the others leave. All read the same and come to the same conclusion. Whoever is missing
after a while is named, with the collective that it was in last. Five requests to the store for each
collective make this a mode for finding an error, not for training.

The collectives pass by here because all of `torch.distributed` goes through the methods of one class, which
are replaced for as long as the mode lasts. What compiled code issues by itself does not pass: the reducer of
`DistributedDataParallel`, which compares its parameters once when it is built, and compiled graphs.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossalai.cluster._watchdog_answer import place_of

AxisOf = Callable[[tuple[int, ...]], str | None]


class DisagreementError(RuntimeError):
    """Ranks were about to enter collectives that do not fit; the message has the values of each."""


@dataclass(frozen=True)
class _Method:
    """A collective, as a method of a process group.

    Attributes:
        op: What `torch.distributed` calls it.
        argument: The argument that must be alike on all ranks.
        same_shapes: Whether the shapes must be, not only the dtypes.
    """

    op: str
    argument: int | None = 0
    same_shapes: bool = True


_METHODS = {
    "allreduce": _Method("all_reduce"),
    "allreduce_coalesced": _Method("all_reduce_coalesced"),
    "broadcast": _Method("broadcast"),
    "reduce": _Method("reduce"),
    "allgather": _Method("all_gather", 1),
    "allgather_coalesced": _Method("all_gather_coalesced", 1),
    "_allgather_base": _Method("all_gather_into_tensor", 1),
    "all_gather_single": _Method("all_gather_single", 1),
    "all_gather_single_coalesced": _Method("all_gather_single_coalesced", 1),
    "reduce_scatter": _Method("reduce_scatter"),
    "_reduce_scatter_base": _Method("reduce_scatter_tensor"),
    "reduce_scatter_single": _Method("reduce_scatter_single"),
    "reduce_scatter_single_coalesced": _Method("reduce_scatter_single_coalesced"),
    "alltoall": _Method("all_to_all", 1, same_shapes=False),
    "alltoall_base": _Method("all_to_all_single", 1, same_shapes=False),
    "all_to_all_single": _Method("all_to_all_single", 1, same_shapes=False),
    "gather": _Method("gather", 1),
    "scatter": _Method("scatter"),
    "barrier": _Method("barrier", None),
}
_OPTIONS = (("reduceOp", "reduction"), ("rootRank", "root"))


class AgreementCheck:
    """Compares every collective of this rank with those of the others.

    Args:
        store: Where the ranks meet; a connection of its own to it is opened.
        rank: Global rank of this process.
        timeout: Seconds to wait for the other ranks of a collective.
        axis_of: What is the mesh axis along some ranks?
    """

    def __init__(self, store: dist.Store, *, rank: int, timeout: float, axis_of: AxisOf) -> None:
        self._store = dist.PrefixStore("debug", store.clone())  # type: ignore[attr-defined]
        self._rank = rank
        self._timeout = timeout
        self._axis_of = axis_of
        self._numbers: Counter[str] = Counter()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Within the block, check every collective that Python code issues."""
        kind = dist.ProcessGroup
        originals = {name: getattr(kind, name) for name in _METHODS if hasattr(kind, name)}
        for name, original in originals.items():
            setattr(kind, name, self._checked(_METHODS[name], original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(kind, name, original)

    def _checked(self, method: _Method, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._compare(group, _description(method, args, kwargs))
            return original(group, *args, **kwargs)

        return check_and_issue

    def _compare(self, group: dist.ProcessGroup, own: dict[str, Any]) -> None:
        """Raise on all ranks of a group if they are not about to do the same.

        Raises:
            DisagreementError: They are not, or some of them do not come.
        """
        ranks = sorted(distributed_c10d._world.pg_group_ranks[group])
        name = group.group_name
        self._numbers[name] += 1
        number = self._numbers[name]
        axis = self._axis_of(tuple(ranks))
        where = f"#{number} of {f'axis {axis}' if axis is not None else f'group {name!r}'}"
        own["where"] = where
        keys = [f"{name}/{number}/{rank}" for rank in ranks]
        text = json.dumps(own)
        self._store.set(f"{name}/{number}/{self._rank}", text)
        self._store.set(f"now/{self._rank}", text)
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except dist.DistError:
            raise DisagreementError(self._missing(own, dict(zip(ranks, keys, strict=True)))) from None
        told = {rank: json.loads(text) for rank, text in zip(ranks, self._store.multi_get(keys), strict=True)}
        if number > 1:  # everybody is here, so everybody has read what stood under the number before
            self._store.delete_key(f"{name}/{number - 1}/{self._rank}")
        message = _difference(where, told)
        if message:
            raise DisagreementError(message)

    def _missing(self, own: dict[str, Any], keys: dict[int, str]) -> str:
        absent = [rank for rank, key in keys.items() if not self._store.check([key])]
        lines = [
            f"{_shown(own)} {own['where']}: after {self._timeout:g} s ranks {absent} have not come to it"
        ]
        for rank in absent:
            last = self._store.get(f"now/{rank}") if self._store.check([f"now/{rank}"]) else None
            said = f"was last in {_told(json.loads(last))}" if last else "has entered no collective yet"
            lines.append(f"  rank {rank} {said}")
        lines.append(f"  rank {self._rank} waits at {own['place']}")
        return "\n".join(lines)


def _description(method: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    values = [*args, *kwargs.values()]
    tensors = [] if method.argument is None else list(_tensors(values[method.argument]))
    found: dict[str, Any] = {"op": method.op}
    if method.same_shapes:
        found["shape"] = [list(tensor.shape) for tensor in tensors]
    found["dtype"] = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    for option, name in _OPTIONS:
        value = next((getattr(v, option) for v in values if hasattr(v, option)), None)
        if value is not None:
            found[name] = str(getattr(value, "op", value)).rpartition(".")[2]
    found["place"] = place_of(sys._getframe(1))
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for part in value:
            yield from _tensors(part)


def _difference(where: str, told: dict[int, dict[str, Any]]) -> str:
    """Return what differs between ranks, empty if nothing does."""
    keys = dict.fromkeys(key for said in told.values() for key in said if key not in ("place", "where"))
    if len({said["op"] for said in told.values()}) > 1:
        keys = {"op": None}  # the rest cannot be compared
    parts = []
    for key in keys:
        by_value: dict[str, list[int]] = {}
        for rank, said in told.items():
            by_value.setdefault(_value(said.get(key)), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on rank{'s' * (len(r) > 1)} {r}" for value, r in by_value.items())
            parts.append(f"{key} is {values}")
    if not parts:
        return ""
    first = next(iter(told.values()))
    op = "the collective" if "op" in keys and len(keys) == 1 else first["op"]
    lines = [f"ranks do not agree on {op} {where}: {'; '.join(parts)}"]
    return "\n".join([*lines, *(f"  rank {rank} at {said['place']}" for rank, said in told.items())])


def _value(value: Any) -> str:
    if isinstance(value, list):
        return (
            " and ".join(str(tuple(part) if isinstance(part, list) else part) for part in value) or "nothing"
        )
    return str(value)


def _shown(said: dict[str, Any]) -> str:
    shapes = f" of {_value(said['shape'])}" if said.get("shape") else ""
    return f"{said['op']}{shapes}"


def _told(said: dict[str, Any]) -> str:
    return f"{_shown(said)} {said['where']}, at {said['place']}"
