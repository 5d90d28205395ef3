"""Whole tensors in the memory of every rank, gathered from the shards of ranks one after the other.

Shards are described as for a checkpoint: boxes, for any kind of sharding. Each box is broadcast by one rank
that holds it, to those that lack it.

[Note: receivers of a box]
Each replica of a model that is cut over tensor ranks or stages holds all of it: a missing box is broadcast
within the replica. If replicas share one copy (FSDP, ZeRO 3), boxes are broadcast over all ranks. All ranks
have the descriptions of all, hence choose alike.
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import torch

from colossalai.checkpoint_io.resharding._tensors import ShardedTensor
from colossalai.communication import broadcast
from colossalai.context import Axis, Mesh
from colossalai.tensor import is_tiled, whole_box


def gathered(
    tensors: Mapping[str, ShardedTensor],
    mesh: Mesh,
    *,
    device: torch.device,
    into: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Iterator[torch.Tensor]:
    """Yield tensors whole, in their order; collective.

    Every rank iterates over all of them: for each box that some rank lacks there is a broadcast, when its
    tensor is yielded. So a rank receives each missing byte once, and none that it has.

    Args:
        tensors: The tensors by name, with the owners of all boxes.
        mesh: The ranks.
        device: Device of the whole tensors.
        into: Memory for some of them, by name, which is used where shape and dtype are the same.

    Raises:
        ValueError: A part of a tensor is on no rank; before anything is sent.
    """
    for name, tensor in tensors.items():
        if not _is_complete(tensor, mesh.order):
            raise ValueError(f"the ranks do not hold all of {name!r}, of shape {tensor.shape}")
    is_next_door = all(
        _is_complete(tensor, ranks)
        for ranks in mesh.all_ranks(mesh.replica_axes)
        for tensor in tensors.values()
    )
    # See [Note: receivers of a box].
    axes = mesh.replica_axes if is_next_door else tuple(mesh.axes)
    for name, tensor in tensors.items():
        yield _whole(tensor, mesh.axis(axes), device, into.get(name))


def _is_complete(tensor: ShardedTensor, ranks: Collection[int]) -> bool:
    whole = whole_box(tensor.shape)
    held = [box for box, holders in tensor.ranks_of.items() if not set(ranks).isdisjoint(holders)]
    return whole in held or is_tiled(tensor.shape, held)


def _whole(
    tensor: ShardedTensor, team: Axis, device: torch.device, into: torch.Tensor | None
) -> torch.Tensor:
    """Return a tensor that the ranks of a team put together."""
    whole = whole_box(tensor.shape)
    holders = {box: [rank for rank in team.ranks if rank in ranks] for box, ranks in tensor.ranks_of.items()}
    if holders.get(whole):
        holders = {whole: holders[whole]}
        if len(holders[whole]) == team.size:
            return tensor.shards[whole].detach()
    fits = into is not None and (into.shape, into.dtype) == (tensor.shape, tensor.dtype)
    made = (
        into.detach()
        if into is not None and fits
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    )
    for box, ranks in holders.items():
        if not ranks:  # another replica's way of cutting it, of which this one has all
            continue
        target, own = box.of(made), tensor.shards.get(box)
        if own is not None:
            target.copy_(own.detach())
        if len(ranks) == team.size:
            continue
        # The first that has it sends it to the whole team: in place where the box is a stretch of memory.
        received = broadcast(
            target
            if target.is_contiguous() or own is not None
            else torch.empty_like(target, memory_format=torch.contiguous_format),
            ranks[0],
            team,
        )
        if own is None and received.data_ptr() != target.data_ptr():
            target.copy_(received)
    return made
