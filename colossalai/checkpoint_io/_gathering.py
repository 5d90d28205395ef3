"""Tensors on their way to the writer, for the formats that one rank writes: block by block, never whole."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from colossalai.checkpoint_io._agreement import global_rank, is_writer
from colossalai.checkpoint_io._blocks import block_boxes, flat_bytes
from colossalai.checkpoint_io._boxes import Box, is_tiled, whole_box
from colossalai.checkpoint_io._entries import Entry, Spread
from colossalai.checkpoint_io._names import listed
from colossalai.checkpoint_io._store import Store, names_by_tensor


def gathered_blocks(tensor: Entry, *, size: int) -> Iterator[torch.Tensor]:
    """Yield the blocks of a tensor on the writer; every other rank sends what the writer does not hold.

    Every rank takes the blocks of the same tensors in the same order, all of them; on other ranks than the
    writer there are none to be seen. In memory are a block, and what was received of it.

    Args:
        tensor: The tensor, `Spread`.
        size: The most bytes of a block.
    """
    assert isinstance(tensor, Spread), "what is gathered is spread"
    whole = whole_box(tensor.shape)
    holders = {whole: tensor.ranks_of[whole]} if whole in tensor.ranks_of else tensor.ranks_of
    for box in block_boxes(tensor.shape, most=max(1, size // tensor.dtype.itemsize)):
        if is_writer():
            yield _received(tensor, box, holders)
        else:
            _send(tensor, box, holders)


def refuse_what_cannot_be_gathered(store: Store, *, only_dense: bool) -> None:
    """Find what would fail on one rank while others wait for it; no communication.

    Args:
        store: What is to be written.
        only_dense: Whether the format has no place for sparse tensors at all.

    Raises:
        ValueError: A part of a tensor is on no rank, or it is sparse and cannot be written.
    """
    for name in names_by_tensor(store.tensors):
        tensor = store.tensors[name]
        if not isinstance(tensor, Spread):
            continue
        whole = whole_box(tensor.shape)
        if whole not in tensor.ranks_of and not is_tiled(tensor.shape, list(tensor.ranks_of)):
            parts = listed(map(str, tensor.ranks_of))
            raise ValueError(
                f"the ranks do not hold all of {name!r}, of shape {tensor.shape}: there is {parts}"
            )
        sparse = [piece.layout for piece in tensor.pieces.values() if piece.layout is not torch.strided]
        if sparse and only_dense:
            raise ValueError(
                f"{name} is {sparse[0]}, safetensors holds dense tensors only: use use_safetensors=False"
            )
        if sparse and 0 not in tensor.ranks_of.get(whole, ()):
            raise ValueError(
                f"{name} is {sparse[0]} and not on rank 0, which writes: only dense tensors can be gathered"
            )


def local_sparse(tensor: Entry) -> torch.Tensor | None:
    """Return the sparse tensor that an entry stands for, if this rank holds it."""
    for piece in tensor.pieces.values() if isinstance(tensor, Spread) else ():
        if piece.layout is not torch.strided:
            return piece
    return None


def _received(tensor: Spread, box: Box, holders: Mapping[Box, tuple[int, ...]]) -> torch.Tensor:
    """Return a block on the writer."""
    for part, ranks in holders.items():
        if 0 in ranks and part.overlap(box) == box:
            return _in_host_memory(box.moved(part.offsets, sign=-1).of(tensor.pieces[part]))
    block = torch.empty(box.sizes, dtype=tensor.dtype)
    for part, ranks in holders.items():
        common = part.overlap(box)
        if common is None:
            continue
        target = common.moved(box.offsets, sign=-1).of(block)
        if 0 in ranks:
            target.copy_(common.moved(part.offsets, sign=-1).of(tensor.pieces[part]))
            continue
        received = target if target.is_contiguous() else torch.empty(common.sizes, dtype=tensor.dtype)
        dist.recv(flat_bytes(received), src=ranks[0])
        if received is not target:
            target.copy_(received)
    return block


def _send(tensor: Spread, box: Box, holders: Mapping[Box, tuple[int, ...]]) -> None:
    for part, ranks in holders.items():
        common = part.overlap(box)
        if common is not None and 0 not in ranks and global_rank() == ranks[0]:
            own = _in_host_memory(common.moved(part.offsets, sign=-1).of(tensor.pieces[part]))
            dist.send(flat_bytes(own), dst=0)


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous()
