"""Where an inf or nan stands: the decision of all ranks to skip a step, and the parameter that caused it.

[Note: one overflow decision]
An inf or nan may stand in the gradients of one rank only (each rank of a sharded model sees its own slices).
If that rank alone skipped its step, the replicas would drift apart. So the ranks take the maximum of their
findings, once per step, and all skip or none does. A finding is one number: 0 if all is well, else the larger
the earlier the parameter stands in the model, then the lower the rank. Its maximum over the ranks thus says
which parameter is the first, and who has it, without a message more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_RANK_BITS = 20
_MAX_RANK = 2**_RANK_BITS - 1
_MAX_PLACE = 2**40
_NAME_BYTES = 256


@dataclass(frozen=True)
class Overflow:
    """The first gradient with an inf or nan.

    Attributes:
        place: Place of its parameter in the model.
        global_rank: The lowest rank on which it stands.
    """

    place: int
    global_rank: int


def find_overflow(
    grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None, places: Sequence[int]
) -> Overflow | None:
    """Return the first overflow over all ranks of a group, the same on each; None if all is well.

    One all-reduce of one int64 over `group`. See [Note: one overflow decision].

    Args:
        grads: This rank's gradients (slices, where they are sharded).
        group: The ranks that decide together; None for this process alone.
        places: For each gradient, the place of its parameter in the model.
    """
    finding = _finding(grads, places)
    if group is not None:
        dist.all_reduce(finding, op=dist.ReduceOp.MAX, group=group)
    value = int(finding.item())
    if value == 0:
        return None
    return Overflow(_MAX_PLACE - (value >> _RANK_BITS), _MAX_RANK - (value & _MAX_RANK))


def share_name(name: str, overflow: Overflow, group: dist.ProcessGroup) -> str:
    """Return the name that the rank of an overflow has for its parameter; the other ranks may not know it.

    One broadcast of 256 bytes over `group`.

    Args:
        name: What this rank takes it for.
        overflow: The overflow.
        group: The ranks that found it together.
    """
    content = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    encoded = name.encode()[-_NAME_BYTES:]
    content[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    content = content.to(_default_device())
    dist.broadcast(content, src=overflow.global_rank, group=group)
    return bytes(content.tolist()).rstrip(b"\0").decode(errors="replace")


def _finding(grads: Sequence[torch.Tensor], places: Sequence[int]) -> torch.Tensor:
    """Return this rank's finding as an int64 scalar on the gradients' device."""
    # torch has no infinity norm of nothing
    held = [(grad, place) for grad, place in zip(grads, places, strict=True) if grad.numel()]
    if not held:
        return torch.zeros((), dtype=torch.int64, device=_default_device())
    global_rank = dist.get_rank() if dist.is_initialized() else 0
    codes = [((_MAX_PLACE - place) << _RANK_BITS) + _MAX_RANK - global_rank for _, place in held]
    largest = torch._foreach_norm([grad for grad, _ in held], float("inf"))
    is_bad = ~torch.stack([norm.isfinite() for norm in largest])
    return (is_bad * torch.tensor(codes, device=is_bad.device)).amax()


def _default_device() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
