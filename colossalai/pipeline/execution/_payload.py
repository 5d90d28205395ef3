"""Payloads between stages: nested values of tensors, flattened into a spec and a list of tensors.

Dataclasses are not sent: the receiver would need their class.
"""

import hashlib
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch

from colossalai.cluster import PlainCodec
from colossalai.tensor import map_leaves

_SENT_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Placeholder of a tensor in a nested value."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether a gradient is sent back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """The structure of a nested value, constants included, and its tensors."""

    structure: Any
    tensors: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return ", ".join(str(tensor) for tensor in self.tensors) or "no tensor"

    def encode(self) -> torch.Tensor:
        """Return the spec as a uint8 tensor."""
        encoded = _CODEC.encode((_encode_structure(self.structure), self.tensors))
        return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)

    @staticmethod
    def decode(encoded: torch.Tensor) -> "PayloadSpec":
        """Return the spec from the result of `encode`.

        Raises:
            ValueError: `encoded` is not a result of `encode`, or names a container class that this process
                has not imported.
        """
        structure, tensors = _CODEC.decode(encoded.cpu().numpy().tobytes())
        return PayloadSpec(_decode_structure(structure), tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A container of another class than tuple, list and dict, in its encoded form."""

    module: str
    name: str
    parts: tuple[Any, ...]


_FIRST = TensorSlot(0)
_CODEC = PlainCodec(TensorSlot, TensorSpec, _Made)


def _encode_structure(value: Any) -> Any:
    """Return a structure of tuples, lists and dicts, with other containers as `_Made`."""
    if isinstance(value, Mapping):
        parts = {key: _encode_structure(part) for key, part in value.items()}
        return parts if type(value) is dict else _encode_container(value, tuple(parts.items()))
    if isinstance(value, tuple | list):
        items = [_encode_structure(part) for part in value]
        if type(value) is list:
            return items
        return tuple(items) if type(value) is tuple else _encode_container(value, tuple(items))
    return value


def _encode_container(value: Any, parts: tuple[Any, ...]) -> _Made:
    return _Made(type(value).__module__, type(value).__qualname__, parts)


def _decode_structure(value: Any) -> Any:
    """Return the structure from the result of `_encode_structure`.

    A class is looked up only among the modules that this process has imported, and must be a container, so
    decoding runs no code but its constructor.
    """
    if isinstance(value, dict):
        return {key: _decode_structure(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_decode_structure(part) for part in value]
    if isinstance(value, tuple):
        return tuple(_decode_structure(part) for part in value)
    if not isinstance(value, _Made):
        return value
    kind: Any = sys.modules.get(value.module)
    for name in value.name.split("."):
        kind = vars(kind).get(name) if isinstance(kind, ModuleType | type) else None
    if not isinstance(kind, type) or not issubclass(kind, dict | UserDict | tuple | list):
        raise ValueError(f"a stage sent a {value.module}.{value.name}, which is not a known container")
    parts = tuple(_decode_structure(part) for part in value.parts)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*parts)
    return kind(dict(parts) if issubclass(kind, dict | UserDict) else parts)


def take_apart(value: Any) -> tuple[PayloadSpec, list[torch.Tensor]]:
    """Return the spec of a nested value and its tensors, in order.

    Raises:
        ValueError: `value` holds an object that cannot be sent.
    """
    if isinstance(value, torch.Tensor):
        return PayloadSpec(_FIRST, (TensorSpec(tuple(value.shape), value.dtype, value.requires_grad),)), [
            value
        ]
    tensors: list[torch.Tensor] = []

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return TensorSlot(len(tensors) - 1)
        if not isinstance(leaf, _SENT_CONSTANTS):
            raise ValueError(
                f"a stage returned a {type(leaf).__name__}, which cannot be sent to the next one: "
                "return tensors, numbers, strings or None, in tuples, lists or dicts"
            )
        return leaf

    structure = map_leaves(slot, value, records=False)
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return PayloadSpec(structure, specs), tensors


def put_together(spec: PayloadSpec, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the nested value from the result of `take_apart`."""
    if isinstance(spec.structure, TensorSlot):
        return tensors[spec.structure.index]
    return map_leaves(
        lambda leaf: tensors[leaf.index] if isinstance(leaf, TensorSlot) else leaf,
        spec.structure,
        records=False,
    )


def fixed_spec(shapes: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> PayloadSpec:
    """Return the spec of a tensor of a known shape, or of a tuple of tensors of known shapes."""
    if all(isinstance(extent, int) for extent in shapes):
        return PayloadSpec(TensorSlot(0), (TensorSpec(tuple(shapes), dtype, dtype.is_floating_point),))  # type: ignore[arg-type]
    specs = tuple(TensorSpec(tuple(shape), dtype, dtype.is_floating_point) for shape in shapes)  # type: ignore[arg-type]
    return PayloadSpec(tuple(TensorSlot(index) for index in range(len(specs))), specs)


def shape_digests(microbatches: Sequence[Any]) -> list[int]:
    """Return for each microbatch a digest of its structure, shapes, dtypes and constants."""
    numbers: dict[str, int] = {}
    found = []
    for data in microbatches:
        is_plain = isinstance(data, torch.Tensor)
        described = repr(_described(data) if is_plain else map_leaves(_described, data, records=False))
        if described not in numbers:  # most microbatches of a batch are alike
            numbers[described] = _number_of(described)
        found.append(numbers[described])
    return found


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
        return type(leaf).__name__, map_leaves(_described, parts, records=False)
    return leaf if isinstance(leaf, _SENT_CONSTANTS) else type(leaf).__name__


def digest(value: Any) -> int:
    """Return a 63-bit number, the same on every rank for the same `repr(value)`."""
    return _number_of(repr(value))


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
