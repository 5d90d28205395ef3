"""Gathering of results of all data-parallel ranks, each sample once.

[Note: order of gathered samples] A `DataParallelSampler` deals the samples round robin: sample j of replica
r is number j * replicas + r of the epoch's order. So the replicas' rows, interleaved again, are in that
order, and repeated samples are at its end, where they are cut off.
"""

import zlib
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from colossalai.communication import all_gather
from colossalai.context import Axis

T = TypeVar("T")


class LastBatch(NamedTuple):
    """The samples that a loader has returned last.

    Attributes:
        of_replica: Number of samples on each replica.
        of_all: Number of distinct ones on all replicas together.
    """

    of_replica: int
    of_all: int


@torch.no_grad()
def gather_samples(nested: T, replicas: Axis, *, last_batch: LastBatch | None, device: torch.device) -> T:
    """Return nested tensors with the rows of all replicas; two collectives for any number of tensors.

    Args:
        nested: Tensors in dicts, lists, tuples, the same structure on every replica; None stays None. With
            `last_batch`, dim 0 has a row, or equally many rows, for each sample; a tensor without dims counts
            as a row of its replica.
        replicas: The ranks with different samples.
        last_batch: The samples of the rows: then the rows are in the order of the sampler, with each sample
            once. None: the rows of the first replica, then those of the second, and so on.
        device: Device of the exchange.

    Raises:
        ValueError: `nested` holds an object that is not a tensor, its structures or shapes differ beyond
            dim 0, or its rows do not belong to samples; on all ranks.
    """
    leaves, structure = tree_flatten(nested)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise ValueError(
                f"there is a {type(leaf).__name__} among the values to gather; they must be tensors, in "
                "dicts, lists or tuples"
            )
    tensors = [leaf.detach() for leaf in leaves if leaf is not None]
    parts = [tensors]
    if replicas.size > 1:
        parts = _exchange(tensors, str(structure), replicas, device)
    rows = last_batch if replicas.size > 1 else None
    gathered = iter([_join_rows([part[n] for part in parts], rows) for n in range(len(tensors))])
    found: T = tree_unflatten([None if leaf is None else next(gathered) for leaf in leaves], structure)
    return found


def _exchange(
    tensors: list[Tensor], structure: str, replicas: Axis, device: torch.device
) -> list[list[Tensor]]:
    """Return the tensors of every replica, on the devices of this rank's tensors."""
    described = [(str(each.dtype), each.dim(), tuple(each.shape[1:])) for each in tensors]
    fingerprint = zlib.crc32(repr((structure, described)).encode())
    extents = torch.tensor([each.size(0) if each.dim() else 1 for each in tensors], dtype=torch.int64)
    packed = torch.cat([_bytes_of(each.to(device)) for each in (extents, *tensors)])
    meta = torch.tensor([fingerprint, packed.numel()], dtype=torch.int64, device=device)
    # All replicas send fingerprint and length, then bytes padded to the longest of them.
    metas = all_gather(meta, 0, replicas).view(-1, 2).tolist()
    if any(other != fingerprint for other, _ in metas):
        raise ValueError(
            "the values to gather differ between ranks, in structure, dtypes or shapes beyond dim 0; "
            f"here they are {described}: pad sequences to one length first"
        )
    longest = max(length for _, length in metas)
    padded = torch.nn.functional.pad(packed, (0, longest - packed.numel()))
    rows = all_gather(padded, 0, replicas).view(replicas.size, longest)
    return [_unpack(row, tensors) for row in rows]


def _unpack(row: Tensor, like: list[Tensor]) -> list[Tensor]:
    num_bytes = 8 * len(like)
    extents = row[:num_bytes].cpu().clone().view(torch.int64).tolist()
    found = []
    for extent, tensor in zip(extents, like, strict=True):
        shape = (extent, *tensor.shape[1:]) if tensor.dim() else ()
        end = num_bytes + torch.Size(shape).numel() * tensor.element_size()
        part = row[num_bytes:end].clone().view(tensor.dtype)  # cloned: a view must begin at a whole element
        found.append(part.view(shape).to(tensor.device))
        num_bytes = end
    return found


def _join_rows(parts: list[Tensor], last_batch: LastBatch | None) -> Tensor:
    """Return the rows of all replicas as one tensor."""
    # See [Note: order of gathered samples].
    if parts[0].dim() == 0:
        return torch.stack(parts)
    if last_batch is None:
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    sizes = [len(part) for part in parts]
    of_replica, of_all = last_batch
    if of_replica == 1:  # a sample can be a batch that the dataset made, of any size
        return torch.cat(parts[:of_all])
    if len(set(sizes)) > 1 or sizes[0] % of_replica:
        raise ValueError(
            f"dim 0 of a tensor is {sizes} on the ranks, whose batch has {of_replica} samples each: it must "
            "be a row, or equally many rows, for each sample"
        )
    rows = sizes[0] // of_replica
    trailing = parts[0].shape[1:]
    dealt = torch.stack([part.reshape(of_replica, rows, *trailing) for part in parts], dim=1)
    return dealt.flatten(0, 1)[:of_all].flatten(0, 1)  # (of_all * rows, ...)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
