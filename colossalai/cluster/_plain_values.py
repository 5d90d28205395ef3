"""Plain values exchanged by ranks: as bytes that are never executed, and collectives that carry them.

torch's object collectives pickle, so any process that can write to a socket of the job could run code in its
processes. These bytes are JSON of a few forms; a reader creates only numbers, text, containers, tensors, and
records of classes that it has named itself.

    None, bool, int, float, str        themselves
    list                               a list
    anything else                      an object with one key, the form: {"tuple": [...]}, {"dtype": "int64"}
    record                             {"record": 3}, the fourth of a table, so that a record sent twice
                                       is one object at the other end as well

[Note: one message if it is short]
Most values are short (an outcome, a name, a few numbers), and the latency of a message is their cost. So the
first all-gather sends the size and the first 1016 bytes of every value; it is the only one if no value is
longer. Otherwise a second one sends the values, as long as the longest: all ranks have received the same
sizes, so all of them send it or none does.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_SCALARS: dict[type, Callable[[Any], Any]] = {bool: bool, int: int, float: float, str: str.__str__}
_JSON = {type(None), bool, int, float, str}  # types that are their own form
_SHOWN = 100
DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""Torch's dtypes by name ("bfloat16")."""
# See [Note: one message if it is short].
_MESSAGE = 1024  # bytes of the first message
_SIZE = 8  # of them those of the size
_SHORT = _MESSAGE - _SIZE


class PlainCodec:
    """Turns plain values into bytes and back.

    Numbers and text, bytes, lists, tuples, sets, dicts, counters, dtypes and tensors (on "meta" without
    values, otherwise they are returned in host memory) can be encoded. Subclasses are decoded as their base.

    Args:
        *records: Frozen, hashable dataclasses that can be encoded, too; both ends name the same ones.
            Frequent ones have faster methods `to_json` and, of the class, `from_json`.
    """

    def __init__(self, *records: Any) -> None:
        self._records = {kind.__name__: kind for kind in records}
        self._fields = {kind: [each.name for each in fields(kind)] for kind in records}

    def encode(self, value: Any) -> bytes:
        """Return a value as bytes; the same for equal values, if dicts have one order.

        Raises:
            ValueError: `value` holds an object that is not plain.
        """
        table: list[Any] = []
        tree = self._tree(value, table, {})
        return json.dumps([tree, table], separators=(",", ":")).encode()

    def decode(self, data: bytes) -> Any:
        """Return the value that `encode` made bytes of.

        Raises:
            ValueError: `data` is not an output of `encode`.
        """
        try:
            tree, table = json.loads(data)
            records: list[Any] = []
            for name, row in table:
                kind = self._records[name]
                is_fast = hasattr(kind, "from_json")
                records.append(kind.from_json(row) if is_fast else kind(*self._values(row, records)))
            return self._value(tree, records)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError) as error:
            raise ValueError(f"received bytes are not an encoded plain value: {error!r}") from error

    def _tree(self, value: Any, table: list[Any], known: dict[Any, int]) -> Any:
        kind = type(value)
        if kind in _JSON:
            return value
        if kind in self._fields:
            if value not in known:
                if hasattr(kind, "to_json"):
                    row = value.to_json()
                else:
                    row = self._items((getattr(value, name) for name in self._fields[kind]), table, known)
                known[value] = len(table)
                table.append([kind.__name__, row])
            return {"record": known[value]}
        if isinstance(value, list):
            return self._items(value, table, known)
        if isinstance(value, tuple | set | frozenset):
            return {"tuple" if isinstance(value, tuple) else "set": self._items(value, table, known)}
        if isinstance(value, Mapping):
            form = "counter" if isinstance(value, Counter) else "dict"
            return {form: [self._items(pair, table, known) for pair in value.items()]}
        return _leaf(value)

    def _items(self, values: Iterable[Any], table: list[Any], known: dict[Any, int]) -> list[Any]:
        return [value if type(value) in _JSON else self._tree(value, table, known) for value in values]

    def _value(self, tree: Any, records: list[Any]) -> Any:
        if type(tree) in _JSON:
            return tree
        if isinstance(tree, list):
            return self._values(tree, records)
        ((form, content),) = tree.items()
        match form:
            case "record":
                return records[content]
            case "tuple":
                return tuple(self._values(content, records))
            case "set":
                return set(self._values(content, records))
            case "dict":
                return dict(self._values(pair, records) for pair in content)
            case "counter":
                return Counter(dict(self._values(pair, records) for pair in content))
        return _value_of_leaf(form, content)

    def _values(self, trees: list[Any], records: list[Any]) -> list[Any]:
        return [tree if type(tree) in _JSON else self._value(tree, records) for tree in trees]


PLAIN = PlainCodec()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of all ranks of a group, in its order; collective.

    See [Note: one message if it is short].
    """
    first = _gather_tensors(_as_tensor(len(data).to_bytes(_SIZE, "little") + data[:_SHORT], _MESSAGE), group)
    messages = [_as_bytes(message, _MESSAGE) for message in first]
    sizes = [int.from_bytes(message[:_SIZE], "little") for message in messages]
    if max(sizes) <= _SHORT:
        return [message[_SIZE : _SIZE + size] for message, size in zip(messages, sizes, strict=True)]
    contents = _gather_tensors(_as_tensor(data, max(sizes)), group)
    return [_as_bytes(content, size) for content, size in zip(contents, sizes, strict=True)]


def _gather_tensors(own: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the tensors of all ranks of a group, which have one shape; an all-gather."""
    own = own.to(distributed_c10d._get_object_coll_device(group))
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    return received


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the plain values of all ranks of a group, in its order; collective.

    In a process without process groups, the value itself is the only one.

    Raises:
        ValueError: The value of some rank is not plain; on all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    try:
        told = PLAIN.encode({"value": value})
    except ValueError as error:  # the others wait for it
        told = PLAIN.encode({"error": str(error)})
    found = [PLAIN.decode(data) for data in gather_bytes(told, group)]
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        raise ValueError(errors[0])
    return [each["value"] for each in found]


def broadcast_value(value: Any, *, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return the plain value of one rank on all ranks of a group; collective. Two broadcasts: size, content.

    Args:
        value: The value of that rank; ignored on the others.
        source: Its global rank.
        group: The group.

    Raises:
        ValueError: The value is not plain; on that rank, before the others are sent anything.
    """
    device = distributed_c10d._get_object_coll_device(group)
    is_source = dist.get_rank() == source
    data = PLAIN.encode(value) if is_source else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    # The size first: the other ranks allocate the content by it.
    dist.broadcast(size, src=source, group=group)
    content = _as_tensor(data, int(size)).to(device)
    dist.broadcast(content, src=source, group=group)
    return value if is_source else PLAIN.decode(_as_bytes(content, int(size)))


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        if value.is_meta:
            return {"tensor": [dtype, shape, None]}
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [dtype, shape, base64.b64encode(content.data).decode()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        value = value.item()
    for kind, as_base in _SCALARS.items():
        if isinstance(value, kind):
            return as_base(value)
    raise ValueError(
        f"{repr(value)[:_SHOWN]} is a {type(value).__module__}.{type(value).__qualname__}, which ranks "
        "cannot exchange: pass numbers, text, None, tensors, or containers of them"
    )


def _value_of_leaf(form: str, content: Any) -> Any:
    match form:
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "dtype":
            return _dtype(content)
        case "tensor":
            return _tensor(*content)
    raise ValueError(f"there is no form {form[:_SHOWN]!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"there is no dtype {name[:_SHOWN]!r}")
    return dtype


def _tensor(dtype: str, shape: list[int], content: str | None) -> torch.Tensor:
    if content is None:
        return torch.empty(shape, dtype=_dtype(dtype), device="meta")
    data = bytearray(base64.b64decode(content, validate=True))
    empty = torch.empty(shape, dtype=_dtype(dtype))
    if not data:
        return empty
    return torch.frombuffer(data, dtype=torch.uint8).view(empty.dtype).view(empty.shape)


def _as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Return bytes as a tensor of `length`, filled up with zeros."""
    return torch.frombuffer(bytearray(data.ljust(max(length, 1), b"\0")), dtype=torch.uint8)


def _as_bytes(content: torch.Tensor, length: int) -> bytes:
    return content[:length].cpu().numpy().tobytes()
