"""Between a tensor as a rank holds it and the whole tensor that a checkpoint holds.

A rank holds a plain tensor whole, a slice that carries its `ShardingSpec`, a `DTensor`, or a `DTensor` of
such a slice. Here, and nowhere else in this package, is it asked which of them a tensor is.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from colossalai.checkpoint_io._agreement import global_rank, is_writer
from colossalai.tensor import ShardingSpec, set_spec, spec_of

_HOLDER = "checkpoint_holder"


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor; collective over the ranks that hold slices of it."""
    spec = _spec(tensor)
    tensor = tensor.detach()
    # A slice that was offloaded to the host is gathered where the mesh communicates.
    if _is_dtensor(tensor):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    if spec is None:
        return tensor
    return spec.whole(tensor.to(spec.mesh.device_type) if spec.axes else tensor)


def cut_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, cut and placed as `like` is; no communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    spec = _spec(like)
    part = full if spec is None else spec.slice_of(full)
    if not isinstance(like, DTensor):
        return part.to(like.device)
    return distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    spec = _spec(tensor)
    return tuple(tensor.shape) if spec is None else spec.whole_shape


def is_cut_by_spec(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not the whole, or not in torch's order, and its spec says how."""
    return _spec(tensor) is not None


def cut_as(state: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a state of a parameter, of the same shape, with the parameter's spec; the memory is the same."""
    spec = _spec(param)
    alias = state.detach()
    if spec is not None:
        set_spec(alias, spec)
    return alias


def holder_of(tensor: torch.Tensor) -> int:
    """Return the rank that gives the writer a tensor's values: 0, the writer, where all ranks have them."""
    return getattr(tensor, _HOLDER, 0)


def set_holder(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Let a tensor know the rank that gives the writer its values."""
    setattr(tensor, _HOLDER, rank)
    return tensor


def gather_on_writer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Collect full tensors in the writer's host memory, one after the other.

    Collective: every rank passes the same names in the same order. Plain tensors are taken from the writer
    and cost no memory if they lie in host memory; of those that are cut each rank holds one full tensor at a
    time. A tensor under several names is gathered once and stays one tensor. One that the writer does not
    hold (see `_parts`) is sent to it.

    Returns:
        The tensors by name on the writer; an empty dictionary on other ranks.
    """
    gathered: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) in gathered:
            continue
        full = tensor if tensor.is_meta else full_tensor(tensor)
        gathered[id(tensor)] = _on_writer(full, holder=holder_of(tensor))
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if is_writer() else {}


def new_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `cut_like(full, like)` in memory of its own."""
    return cut_like(full, like).clone()


def new_replicated(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that the ranks which share `like` all hold whole.

    A number stays a plain tensor beside a DTensor, as torch's optimizers keep them.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if not isinstance(like, DTensor) or full.ndim == 0:
        return full.to(like.device, copy=True)
    everywhere = [Replicate()] * like.device_mesh.ndim
    return distribute_tensor(full, like.device_mesh, everywhere, src_data_rank=None).clone()


def copy_into(target: torch.Tensor, full: torch.Tensor) -> None:
    """Overwrite a tensor, or this rank's slice of it, with a full one of the same shape; no communication."""
    with torch.no_grad():
        target.detach().copy_(cut_like(full, target))


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the full tensor."""
    return math.prod(whole_shape(tensor)) * tensor.element_size()


def _spec(tensor: torch.Tensor) -> ShardingSpec | None:
    """Return the spec of a tensor; None where it says nothing: the whole, in torch's order."""
    spec = spec_of(tensor)
    return None if spec is None or spec.is_identity else spec


def _is_dtensor(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _on_writer(full: torch.Tensor, *, holder: int) -> torch.Tensor:
    """Return a whole tensor in the writer's host memory, sent by its holder; elsewhere an empty one."""
    if holder == 0:
        return _in_host_memory(full) if is_writer() else torch.empty(0)
    if is_writer():
        received = torch.empty(full.shape, dtype=full.dtype)
        dist.recv(received.reshape(-1).view(torch.uint8), src=holder)
        return received
    if global_rank() == holder:
        dist.send(_in_host_memory(full).reshape(-1).view(torch.uint8), dst=0)
    return torch.empty(0)


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.contiguous()
    # A view would drag all the memory behind it into a torch file.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
