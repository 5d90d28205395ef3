"""What travels between stages: nested tensors, taken apart into a spec and a list of tensors."""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colossalai.pipeline._microbatch import map_leaves

_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True, slots=True)
class Slot:
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
        return torch.frombuffer(bytearray(pickle.dumps(self)), dtype=torch.uint8)

    @staticmethod
    def decode(encoded: torch.Tensor) -> "PayloadSpec":
        """Return the spec that `encode` made bytes of."""
        return pickle.loads(encoded.cpu().numpy().tobytes())


def take_apart(value: Any) -> tuple[PayloadSpec, list[torch.Tensor]]:
    """Return the spec of a nested value and its tensors, in order.

    Raises:
        ValueError: There is something in it that cannot be sent.
    """
    tensors: list[torch.Tensor] = []

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return Slot(len(tensors) - 1)
        if not isinstance(leaf, _CONSTANTS):
            raise ValueError(
                f"a stage returned a {type(leaf).__name__}, which cannot be sent to the next one: "
                "return tensors, numbers, strings or None, in tuples, lists or dicts"
            )
        return leaf

    structure = map_leaves(slot, value)
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return PayloadSpec(structure, specs), tensors


def put_together(spec: PayloadSpec, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the nested value that `take_apart` took apart."""
    return map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, spec.structure)


def fixed_spec(shapes: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> PayloadSpec:
    """Return the spec of a tensor of a known shape, or of a tuple of tensors of known shapes."""
    if all(isinstance(extent, int) for extent in shapes):
        return PayloadSpec(Slot(0), (TensorSpec(tuple(shapes), dtype, dtype.is_floating_point),))  # type: ignore[arg-type]
    specs = tuple(TensorSpec(tuple(shape), dtype, dtype.is_floating_point) for shape in shapes)  # type: ignore[arg-type]
    return PayloadSpec(tuple(Slot(index) for index in range(len(specs))), specs)


def shape_digest(data: Any) -> int:
    """Return a number that is the same wherever data has the same structure, shapes, types and constants."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if isinstance(leaf, _CONSTANTS) else type(leaf).__name__

    return digest(map_leaves(describe, data))


def digest(value: Any) -> int:
    """Return a number of 63 bits that is the same on every rank wherever `repr(value)` is the same."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
