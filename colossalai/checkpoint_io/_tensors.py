"""Between a tensor as a rank holds it (a DTensor, or plain) and the full tensor that a checkpoint holds."""

from collections.abc import Mapping

import torch

from colossalai.checkpoint_io._agreement import is_writer


def gather_on_writer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Collect full tensors in the writer's host memory, one after the other.

    Collective: every rank passes the same names in the same order. Plain tensors are taken from the writer
        and cost no
    memory if they lie in host memory; of DTensors each rank holds one full tensor at a time. A tensor under
    several names is gathered once and stays one tensor.

    Returns:
        The tensors by name on the writer; an empty dictionary on other ranks.
    """
    gathered: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) in gathered:
            continue
        full = _full(tensor.detach())
        gathered[id(tensor)] = _in_host_memory(full) if is_writer() else torch.empty(0)
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if is_writer() else {}


def cut_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, cut and placed as `like` is; no communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return full.to(like.device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


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
    return tensor.numel() * tensor.element_size()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    # A slice that was offloaded to the host is gathered where the mesh communicates.
    gathering = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(gathering, DTensor)
    return gathering.full_tensor()


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.contiguous()
    # A view would drag all the memory behind it into a torch file.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
