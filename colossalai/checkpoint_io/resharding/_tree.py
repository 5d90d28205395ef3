"""State tree: nested plain values with tensors, as a JSON tree and a flat dictionary of the tensors.

Optimizer states, scheduler states and the like are such values. The two halves fit every file format: JSON
text goes into a safetensors header or an index file, a flat dictionary of tensors into shards. Values are
restored bit for bit. Values that are not plain are refused by name, so everything that was saved can be
loaded with `weights_only=True`.

    scalar (None, bool, int, float, str)   itself
    list                                   a list
    tuple, tensor                          {"tuple": [...]}, {"tensor": name}
    dict, Counter                          {"dict": [[key, value], ...]}, {"counter": [[key, value], ...]}
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from colossalai.checkpoint_io.resharding._tensors import StoredTensor, TensorMetadata
from colossalai.checkpoint_io.storage import Json

T = TypeVar("T")
TensorLike: TypeAlias = torch.Tensor | TensorMetadata
# A subclass (for example an enum) could not be loaded again: it is stored as its base.
_SCALARS: dict[type, Callable[..., Json]] = {bool: bool, int: int, float: float, str: str.__str__}


def pack(value: object, *, at: str = "") -> tuple[Json, dict[str, TensorLike]]:
    """Take a nested value apart.

    Args:
        value: Scalars, lists, tuples, dicts and tensors (or metadata of one), nested at will. Numpy's
            scalars become Python's.
        at: A name for the whole; tensors are named after their place below it.

    Returns:
        The tree, which `json` can write, and the tensors (the same objects) by name.

    Raises:
        ValueError: `value` holds an object of another type; the message has its place.
    """
    tensors: dict[str, TensorLike] = {}
    return _pack(value, at, tensors), tensors


def unpack(tree: Json, tensors: Mapping[str, object]) -> object:
    """Restore a value that `pack` took apart.

    Raises:
        ValueError: A tensor is missing, or `tree` is not one of ours.
    """
    try:
        return _unpack(tree, tensors)
    except (TypeError, RecursionError) as error:  # a list as a key, or nested without end
        raise ValueError(f"damaged checkpoint: {error}") from error


def with_tensors_named(tree: Json, names: Mapping[str, str]) -> Json:
    """Return a tree in which tensors have other names.

    Args:
        tree: The tree of `pack`.
        names: The new names by the present ones; tensors without an entry keep theirs.
    """
    if isinstance(tree, list):
        return [with_tensors_named(item, names) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if list(tree) == ["tensor"]:
        name = tree["tensor"]
        return {"tensor": names.get(name, name) if isinstance(name, str) else name}
    return {key: with_tensors_named(value, names) for key, value in tree.items()}


def plain(value: T, *, at: str) -> T:
    """Return a nested value with nothing in it that `torch.load(weights_only=True)` would refuse.

    Raises:
        ValueError: `value` holds an object without such a form; the message has its place.
    """
    copy: Any = unpack(*pack(value, at=at))
    found: T = copy
    return found


def with_own_memory(value: T) -> T:
    """Return a nested value whose tensors are copies: for example no longer views of a file."""
    tree, tensors = pack(value)
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, StoredTensor | torch.Tensor), "there are values to copy"
        copies[name] = tensor.whole() if isinstance(tensor, StoredTensor) else tensor.clone()
    copy: Any = unpack(tree, copies)
    found: T = copy
    return found


def _pack(value: Any, at: str, tensors: dict[str, TensorLike]) -> Json:
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
        pairs: list[Json] = [
            [_pack(key, at, tensors), _pack(item, _below(at, key), tensors)] for key, item in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ValueError(
        f"{at or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        f"cannot hold: it holds numbers, text, None, tensors, and lists, tuples and dicts of them"
    )


def _unpack(tree: Any, tensors: Mapping[str, object]) -> Any:
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
