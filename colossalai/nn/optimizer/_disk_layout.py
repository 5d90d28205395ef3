"""Layout of the states of parameters in files: regions, blocks and pieces; see [Note: states on disk]."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossalai.nn.optimizer._adam_kernel import HALF_DTYPES, is_dense, local
from colossalai.nn.optimizer._disk_file import PAGE, StateFile

KEYS = ("exp_avg", "exp_avg_sq")
"""The keys of the states of every parameter."""

MASTER = "master"
"""The key of the float32 weights among the states of a half parameter."""


@dataclass(frozen=True, eq=False)
class DiskPiece:
    """The elements `start` to `stop` of a parameter, in memory order, in a block.

    Attributes:
        param: The parameter.
        start: Its first element.
        stop: The element behind the last one.
        offset: Offset of its states in the block, in bytes.
    """

    param: Tensor
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False)
class DiskBlock:
    """A run of bytes at the same place in the files of all keys."""

    files: Mapping[str, StateFile]
    dtype: torch.dtype
    offset: int
    num_bytes: int
    pieces: Sequence[DiskPiece]


def kind_of(param: Tensor) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the dtype and the keys of the states of a parameter."""
    if param.dtype in HALF_DTYPES:
        return torch.float32, (*KEYS, MASTER)
    return param.dtype, KEYS


def is_able(param: Tensor) -> bool:
    """Return whether the states of a parameter can be on disk."""
    held = local(param)
    return held.device.type == "cpu" and held.numel() > 0 and is_dense(held)


def shaped_as(tensor: Tensor, param: Tensor) -> Tensor:
    """Return a tensor with the shape and the layout of a parameter; a DTensor if that is one."""
    from torch.distributed.tensor import DTensor

    held = local(param)
    shaped = tensor.as_strided(held.shape, held.stride())
    if not isinstance(param, DTensor):
        return shaped
    return DTensor.from_local(
        shaped,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def regions_of(params: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[int], int]:
    """Return where the region of each parameter begins, and the size of the file, in bytes."""
    offsets = []
    end = 0
    for param in params:
        offsets.append(end)
        end += _pages(local(param).numel() * dtype.itemsize)
    return offsets, end


def cut_into_blocks(
    params: Sequence[Tensor],
    offsets: Sequence[int],
    files: Mapping[str, StateFile],
    dtype: torch.dtype,
    size: int,
) -> Iterator[DiskBlock]:
    begin = end = 0  # of the block, in the file
    pieces: list[DiskPiece] = []
    for param, offset in zip(params, offsets, strict=True):
        numel = local(param).numel()
        start = 0
        while start < numel:
            position = offset + start * dtype.itemsize
            if position - begin == size:
                yield DiskBlock(files, dtype, begin, end - begin, pieces)
                begin, pieces = position, []
            room = (begin + size - position) // dtype.itemsize
            stop = min(numel, start + room)
            pieces.append(DiskPiece(param, start, stop, position - begin))
            end = offset + _pages(stop * dtype.itemsize)
            start = stop
    if pieces:
        yield DiskBlock(files, dtype, begin, end - begin, pieces)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
