"""Nested values: tensors in tuples, lists, dicts and dataclasses, such as batches and outputs of modules."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch


def map_leaves(function: Callable[[Any], Any], value: Any, *, records: bool = True) -> Any:
    """Return a nested value with `function` applied to every element that is not a container.

    Args:
        function: The function.
        value: The value.
        records: Whether dataclasses are containers.
    """
    parts = parts_of(value, records=records)
    if parts is None:
        return function(value)
    return rebuilt(value, [map_leaves(function, part, records=records) for _, part in parts])


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value with `function` applied to every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, part in parts_of(value) or ():
            yield from nested_tensors(part)


class Node(NamedTuple):
    """A part of a nested value, however deep.

    Attributes:
        steps: Accessors from the value to the part, one per container.
        value: The part.
        is_leaf: Whether the part is not a container.
    """

    steps: tuple[str, ...]
    value: Any
    is_leaf: bool


def nodes_of(value: Any, steps: tuple[str, ...] = ()) -> list[Node]:
    """Return a nested value and everything in it, containers before their parts, which are in order."""
    parts = parts_of(value)
    found = [Node(steps, value, parts is None)]
    for step, part in parts or ():
        found += nodes_of(part, (*steps, step))
    return found


def with_leaves(value: Any, leaves: Iterator[Any]) -> Any:
    """Return a nested value with other leaves in the place of its own, in their order."""
    parts = parts_of(value)
    if parts is None:
        return next(leaves)
    return rebuilt(value, [with_leaves(part, leaves) for _, part in parts])


def parts_of(value: Any, *, records: bool = True) -> list[tuple[str, Any]] | None:
    """Return the elements of a container, each with its accessor."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple | list):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if records and is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    return None


def rebuilt(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container like `value` with other parts."""
    if isinstance(value, Mapping):
        named = dict(zip(value, parts, strict=True))
        return named if type(value) is dict else type(value)(named)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its parts one by one
        return type(value)(*parts)
    if isinstance(value, tuple | list):
        return type(value)(parts)
    record = copy.copy(value)
    for field, part in zip(fields(value), parts, strict=True):
        object.__setattr__(record, field.name, part)  # which also works where it is frozen
    return record
