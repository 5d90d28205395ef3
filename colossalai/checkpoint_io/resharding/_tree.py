"""Nested plain values with tensors in them, taken apart into a JSON tree and a flat dictionary of tensors.

Optimizer states, scheduler states and the like are such values. The two halves fit every file format: JSON
text goes into a safetensors header or an index file, a flat dictionary of tensors into shards. Values come
back as they were, bit for bit. What is not plain is refused by name, so everything that was saved can be
loaded with `weights_only=True`.

    scalar (None, bool, int, float, str)   itself
    list                                   a list
    tuple, tensor                          {"tuple": [...]}, {"tensor": name}
    dict, Counter                          {"dict": [[key, value], ...]}, {"counter": [[key, value], ...]}
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from colossalai.checkpoint_io.resharding._tensors import StoredTensor, TensorMetadata

Json = Any
# A subclass (an enum, say) could not be loaded again: it is stored as its base.
_SCALARS: dict[type, Callable[[Any], Any]] = {bool: bool, int: int, float: float, str: str.__str__}


def pack(value: Any, *, at: str = "") -> tuple[Json, dict[str, Any]]:
    """Take a nested value apart.

    Args:
        value: Scalars, lists, tuples, dicts and tensors (or what stands for one), nested at will. Numpy's
            scalars become Python's.
        at: A name for the whole; tensors are named after their place below it.

    Returns:
        The tree, which `json` can write, and the tensors (the same objects) by name.

    Raises:
        ValueError: There is something else in it; the message says where.
    """
    tensors: dict[str, Any] = {}
    return _pack(value, at, tensors), tensors


def unpack(tree: Json, tensors: Mapping[str, Any]) -> Any:
    """Put together what `pack` took apart.

    Raises:
        ValueError: A tensor is missing, or the tree is not one of ours.
    """
    try:
        return _unpack(tree, tensors)
    except (TypeError, RecursionError) as error:  # a list as a key, or nested without end
        raise ValueError(f"damaged checkpoint: {error}") from error


def plain(value: Any, *, at: str) -> Any:
    """Return a nested value with nothing in it that `torch.load(weights_only=True)` would refuse.

    Raises:
        ValueError: There is something in it that cannot be expressed so; the message says where.
    """
    return unpack(*pack(value, at=at))


def with_own_memory(value: Any) -> Any:
    """Return a nested value whose tensors are copies: no longer views of a file, say."""
    tree, tensors = pack(value)
    return unpack(
        tree,
        {
            name: tensor.whole() if isinstance(tensor, StoredTensor) else tensor.clone()
            for name, tensor in tensors.items()
        },
    )


def _pack(value: Any, at: str, tensors: dict[str, Any]) -> Json:
    if isinstance(value, torch.Tensor | TensorMetadata):
        name = _unused(at, tensors)
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return None
    for kind, as_base in _SCALARS.items():
        if isinstance(value, kind):
            return as_base(value)
    if isinstance(value, list | tuple):
        items = [_pack(item, _below(at, number), tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [
            [_pack(key, at, tensors), _pack(item, _below(at, key), tensors)] for key, item in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ValueError(
        f"{at or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        f"cannot hold: it holds numbers, text, None, tensors, and lists, tuples and dicts of them"
    )


def _unpack(tree: Json, tensors: Mapping[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [("tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("tuple", list(items))]:
            return tuple(_unpack(item, tensors) for item in items)
        case [("dict" | "counter" as kind, list(pairs))]:
            if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                found = {_unpack(key, tensors): _unpack(item, tensors) for key, item in pairs}
                return found if kind == "dict" else Counter(found)
    raise ValueError(f"damaged checkpoint: there is nothing for the entry {str(tree)[:100]}")


def _below(at: str, key: object) -> str:
    return f"{at}/{key}" if at else str(key)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "'"
    return name
