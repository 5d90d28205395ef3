"""Nested values: outputs of microbatches put together again, payloads between stages.

Outputs are put together by one rule, see `merge_outputs`. Between stages travel tensors in tuples, lists and
dicts, taken apart into a spec and a list of tensors; a dataclass does not, since its class would have to
travel.
"""

import hashlib
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, NoReturn

import torch

from colossalai.cluster import PlainCodec
from colossalai.tensor import map_leaves, parts_of, rebuilt

_SENT_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))
_EQUAL_CONSTANTS = (bool, int, str, bytes, type(None), torch.dtype, torch.device)


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float], dim: int = 0) -> Any:
    """Put the outputs of microbatches together.

    - Tensors whose rows belong to samples, so many for each, are concatenated along `dim`.
    - Floating tensors with one value otherwise, and floats, are means over samples: they are averaged.
    - What is the same for all microbatches stays: constants, and tensors that are equal.

    Args:
        outputs: Nested values of one structure.
        weights: The number of samples of each microbatch.
        dim: The dimension of the samples.

    Raises:
        ValueError: A value in `outputs` is of no kind above.
    """
    return _merge(list(outputs), weights, dim, "output")


def _merge(values: Sequence[Any], sizes: Sequence[float], dim: int, place: str) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        return _merge_tensors(values, sizes, dim, place)
    if any(type(value) is not type(first) for value in values):
        kinds = " and ".join(sorted({type(value).__name__ for value in values}))
        _refuse(place, f"is of type {kinds}")
    nested = [parts_of(value) for value in values]
    if nested[0] is not None:
        names = [[name for name, _ in parts or ()] for parts in nested]
        if any(found != names[0] for found in names):
            _refuse(place, f"has parts {names[0]} and {next(found for found in names if found != names[0])}")
        columns = zip(*([part for _, part in parts or ()] for parts in nested), strict=True)
        merged = [
            _merge(column, sizes, dim, place + name) for name, column in zip(names[0], columns, strict=True)
        ]
        return rebuilt(first, merged)
    if isinstance(first, float):
        total = sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        return first if all(value == first for value in values) else total
    if not all(
        value is first or (isinstance(first, _EQUAL_CONSTANTS) and value == first) for value in values
    ):
        _refuse(
            place, f"is {first!r}" if isinstance(first, _EQUAL_CONSTANTS) else f"is a {type(first).__name__}"
        )
    return first


def _merge_tensors(
    tensors: Sequence[torch.Tensor], sizes: Sequence[float], dim: int, place: str
) -> torch.Tensor:
    first = tensors[0]
    if all(tensor.ndim > dim for tensor in tensors):
        rows_each = first.shape[dim] / sizes[0]  # for a sample
        whole = abs(rows_each - round(rows_each)) < 1e-6
        fit = (
            round(rows_each * size) == tensor.shape[dim] for tensor, size in zip(tensors, sizes, strict=True)
        )
        if whole and all(fit):
            return torch.cat(list(tensors), dim)
    if all(tensor.numel() == 1 and tensor.is_floating_point() for tensor in tensors):
        shares = [size / sum(sizes) for size in sizes]
        return torch.stack([tensor * share for tensor, share in zip(tensors, shares, strict=True)]).sum(0)
    if not all(torch.equal(tensor, first) for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        _refuse(place, f"is a {first.dtype} tensor of shape {shapes}, for {list(sizes)} samples")
    return first


def _refuse(place: str, what: str) -> NoReturn:
    raise ValueError(
        f"the outputs of microbatches cannot be put together: {place} {what}, and differs between "
        "microbatches. Return tensors with a row (or several) for each sample, floating numbers that are "
        "means over the samples, or what is the same for all of them; or ask for no outputs "
        "(return_output_label=False, return_outputs=False)"
    )


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor stands in a nested value."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the receiver has to know of a tensor; a gradient comes back if it requires one."""

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
        """Return it as bytes."""
        told = _CODEC.encode((_as_told(self.structure), self.tensors))
        return torch.frombuffer(bytearray(told), dtype=torch.uint8)

    @staticmethod
    def decode(encoded: torch.Tensor) -> "PayloadSpec":
        """Return the spec that `encode` made bytes of.

        Raises:
            ValueError: `encoded` is not what `encode` returns, or names a container class that is not known
                here.
        """
        structure, tensors = _CODEC.decode(encoded.cpu().numpy().tobytes())
        return PayloadSpec(_as_was(structure), tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A container of another class than tuple, list and dict, as it is told to other ranks."""

    module: str
    name: str
    parts: tuple[Any, ...]


_CODEC = PlainCodec(TensorSlot, TensorSpec, _Made)


def _as_told(value: Any) -> Any:
    """Return a structure in which a container is a tuple, a list or a dict, or says of what class it is."""
    if isinstance(value, Mapping):
        parts = {key: _as_told(part) for key, part in value.items()}
        return parts if type(value) is dict else _made(value, tuple(parts.items()))
    if isinstance(value, tuple | list):
        items = [_as_told(part) for part in value]
        if type(value) is list:
            return items
        return tuple(items) if type(value) is tuple else _made(value, tuple(items))
    return value


def _made(value: Any, parts: tuple[Any, ...]) -> _Made:
    return _Made(type(value).__module__, type(value).__qualname__, parts)


def _as_was(value: Any) -> Any:
    """Return the structure that `_as_told` took apart.

    A class is looked for among those that this program has imported, and must be a container: to make one
    runs nothing but its own constructor.
    """
    if isinstance(value, dict):
        return {key: _as_was(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_was(part) for part in value]
    if isinstance(value, tuple):
        return tuple(_as_was(part) for part in value)
    if not isinstance(value, _Made):
        return value
    kind: Any = sys.modules.get(value.module)
    for name in value.name.split("."):
        kind = vars(kind).get(name) if isinstance(kind, ModuleType | type) else None
    if not isinstance(kind, type) or not issubclass(kind, dict | UserDict | tuple | list):
        raise ValueError(
            f"a stage sent a {value.module}.{value.name}, which is no container that is known here"
        )
    parts = tuple(_as_was(part) for part in value.parts)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*parts)
    return kind(dict(parts) if issubclass(kind, dict | UserDict) else parts)


def take_apart(value: Any) -> tuple[PayloadSpec, list[torch.Tensor]]:
    """Return the spec of a nested value and its tensors, in order.

    Raises:
        ValueError: `value` holds an object that cannot be sent.
    """
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
    """Return the nested value that `take_apart` took apart."""
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


def shape_digest(data: Any) -> int:
    """Return a number that is the same wherever data has the same structure, shapes, types and constants."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype
        if is_dataclass(leaf) and not isinstance(leaf, type):
            parts = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
            return type(leaf).__name__, map_leaves(describe, parts, records=False)
        return leaf if isinstance(leaf, _SENT_CONSTANTS) else type(leaf).__name__

    return digest(map_leaves(describe, data, records=False))


def digest(value: Any) -> int:
    """Return a number of 63 bits that is the same on every rank wherever `repr(value)` is the same."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
