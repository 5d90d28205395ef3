"""Whole tensors in the writer's host memory, for the formats that one rank writes."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from colossalai.checkpoint_io._agreement import global_rank, is_writer
from colossalai.checkpoint_io._boxes import whole_box
from colossalai.checkpoint_io._entries import Spread


def gather_on_writer(tensors: Mapping[str, Spread]) -> dict[str, torch.Tensor]:
    """Collect whole tensors in the writer's host memory, one after the other.

    Every rank passes the same names in the same order, and sends to the writer what that does not hold. A
    tensor that the writer holds whole, in host memory, costs none. A tensor under several names is gathered
    once and stays one tensor.

    Returns:
        The tensors by name on the writer; an empty dictionary on other ranks.
    """
    gathered: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in gathered:
            gathered[id(tensor)] = _on_writer(tensor)
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if is_writer() else {}


def _on_writer(tensor: Spread) -> torch.Tensor:
    own_whole = tensor.pieces.get(whole_box(tensor.shape))
    if is_writer() and own_whole is not None:
        return _in_host_memory(own_whole)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if is_writer() else torch.empty(0)
    for box, ranks in tensor.ranks_of.items():
        if is_writer() and 0 in ranks:
            box.of(whole).copy_(tensor.pieces[box])
        elif is_writer():
            received = torch.empty(box.sizes, dtype=tensor.dtype)
            dist.recv(received.reshape(-1).view(torch.uint8), src=ranks[0])
            box.of(whole).copy_(received)
        elif global_rank() == ranks[0]:
            dist.send(_in_host_memory(tensor.pieces[box]).reshape(-1).view(torch.uint8), dst=0)
    return whole


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.contiguous()
    # A view would drag all the memory behind it into a torch file.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
