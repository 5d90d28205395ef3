"""Tapes: the recorded steps that would have written a tensor without memory.

A tape belongs to a storage, not to a tensor, so that views, `.data` and `nn.Parameter(...)` share it. It is
an attribute of the storage, and is freed with the last tensor on it.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossalai.tensor import LAZY_TAPE

_numbers = itertools.count()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Tape:
    """The steps that write one storage, in order.

    Attributes:
        device: Future device of the storage.
        num_bytes: Its size when it is made.
        steps: The steps; the first one makes the storage, the others write it.
    """

    device: torch.device
    num_bytes: int
    steps: "list[Step]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """A strided part of the storage of a tape, read as its conjugate or negative if so marked."""

    tape: Tape
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of a generator before a step drew from it.

    Attributes:
        device: Device of the generator.
        state: The state.
        is_own: Whether the caller passed the generator; otherwise it is the device's default one.
    """

    device: torch.device
    state: Tensor
    is_own: bool


@dataclass(eq=False, frozen=True, slots=True)
class Step:
    """One recorded operation.

    Attributes:
        op: An overload of `torch.ops`.
        args: Its arguments, with a `Place` for each lazy tensor.
        kwargs: The same by keyword.
        creates: For each output with a new storage, its position among the outputs and its place.
        overwrites: The tape whose whole storage is written without being read, if nothing else is written.
        random_state: Random state before an operation that draws.
        default_dtype: `torch.get_default_dtype()` at the time of recording.
        number: Its position among all steps.
    """

    op: Any
    args: Any
    kwargs: Any
    creates: tuple[tuple[int, Place], ...]
    overwrites: Tape | None
    random_state: RandomState | None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    number: int = field(default_factory=lambda: next(_numbers))


def is_on_meta(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory, independent of the device that a lazy one reports."""
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta"


def tape_of(tensor: Tensor) -> Tape | None:
    """Return the tape of a lazy tensor, and None for any other tensor."""
    return getattr(tensor.untyped_storage(), LAZY_TAPE, None) if is_on_meta(tensor) else None


def start_tape(tensor: Tensor, device: torch.device) -> Tape:
    """Give the storage of a tensor on the meta device a tape."""
    storage = tensor.untyped_storage()
    tape = Tape(device, storage.nbytes())
    setattr(storage, LAZY_TAPE, tape)
    return tape


def place_of(tensor: Tensor, tape: Tape) -> Place:
    """Return the place of a tensor on the storage of its tape."""
    return Place(
        tape,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
