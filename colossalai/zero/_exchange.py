"""The collectives of ZeRO on a bucket: a mean of which each rank gets its section, and the gather.

[Note: direct exchange of sections]
For the mean each rank sends every other rank that rank's section, and sums the received ones, in float32 or
better, in the order of the ranks. For the gather, each rank sends its section to all others. Both send the
bytes of a ring, (n-1)/n of the bucket, from and to the memory of the sections, of any lengths. A sum is
rounded to a low precision once instead of at every hop, and does not depend on the offset of a parameter in
its bucket. The collectives of gloo copy, and take up to twice as long; see docs/design/zero.md.
If ranks share memory its collectives do the same, in the same order, with fewer copies: they take equal
sections in float32 or better, which need no intermediate rounding.
"""

from collections.abc import Callable, Sequence

import torch

from colossalai.communication import (
    record,
    start_gather_of_sections,
    start_messages,
    start_sum_of_sections,
)
from colossalai.context import Axis
from colossalai.zero._layout import FlatBucket

Finish = Callable[[torch.Tensor | None], torch.Tensor]
_EXACT = (torch.float32, torch.float64)


def start_mean(flat: torch.Tensor, bucket: FlatBucket, dtype: torch.dtype | None) -> Finish:
    """Start to average a bucket; return a function that waits and returns this rank's section of the mean.

    Gradients are divided here, once. The returned function takes the destination of the mean, which
    determines its dtype: this rank's section of `flat`, or None for new memory.
    See [Note: direct exchange of sections].

    Args:
        flat: This rank's gradients; not to be touched before the end.
        bucket: Their layout, and the ranks.
        dtype: Dtype of the messages; None: the dtype of the gradients.
    """
    axis, divisor = bucket.sync.axis, bucket.sync.divisor
    if axis.size == 1:  # `flat` is its own only section
        return lambda out: flat if divisor == 1 else flat.div_(divisor)
    sent = flat if dtype is None else flat.to(dtype)
    sections = sent.split(bucket.section_sizes)
    own = sections[axis.rank]
    if sent.dtype in _EXACT and bucket.goes_through_memory:
        # Joined by all ranks of the axis; the sum of this rank's sections replaces `own`.
        wait_for_sum = start_sum_of_sections(sent, axis)

        def finish_sum(out: torch.Tensor | None) -> torch.Tensor:
            wait_for_sum()  # `own` is the sum then, and `sent` can be freed
            return torch.div(own, divisor, out=out)

        return finish_sum
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    received = [torch.empty_like(own) for _ in others]
    # Each rank sends every other rank that rank's section.
    with record("reduce_scatter", axis.name, sent, axis.size):
        wait = start_messages(
            axis,
            sends={rank: sections[rank] for rank in others},
            receives=dict(zip(others, received, strict=True)),
        )

    def finish(out: torch.Tensor | None) -> torch.Tensor:
        wait()  # for the sections of all others; own messages are complete then, and `flat` is free
        total = _sum([*received[: axis.rank], own, *received[axis.rank :]], received[0])
        return torch.div(total, divisor, out=total if out is None else out)

    return finish


def start_gather(flat: torch.Tensor, bucket: FlatBucket, *, stamp: int = 0) -> Callable[[], object]:
    """Begin to fill a bucket with the sections of its ranks, each of which has its own in place.

    Args:
        flat: The memory of the bucket.
        bucket: Its layout, and the ranks.
        stamp: The tag of its messages, from `STAMPED_TAGS` on: gathers of different stamps never meet.
            0: none, where no other gather can be taken for it.

    Returns:
        A function that waits for the end.
    """
    axis = bucket.axis
    if axis.size == 1:
        return lambda: None
    if flat.dtype in _EXACT and bucket.goes_through_memory:
        return start_gather_of_sections(flat, axis, stamp=stamp)  # each rank reads those of all others
    if stamp and flat.device.type != "cpu":
        # The wait is for the stamp first: a rank at another gather stays there, and does not use the data.
        return _both(start_meeting(axis, stamp), start_gather(flat, bucket))
    sections = flat.split(bucket.section_sizes)
    own = sections[axis.rank]
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    # Each rank sends its section to all others.
    with record("all_gather", axis.name, own, axis.size):
        return start_messages(
            axis,
            sends=dict.fromkeys(others, own),
            receives={rank: sections[rank] for rank in others},
            tag=stamp,
        )


def start_meeting(axis: Axis, stamp: int) -> Callable[[], object]:
    """Begin to meet those ranks of an axis that have the same stamp; return the wait, which ends with all.

    Along with a collective of a library without tags: a byte in host memory is sent to each rank.
    """
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    return start_messages(
        axis,
        sends={rank: torch.zeros(1, dtype=torch.uint8, device="cpu") for rank in others},
        receives={rank: torch.zeros(1, dtype=torch.uint8, device="cpu") for rank in others},
        tag=stamp,
    )


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def wait() -> None:
        first()
        second()

    return wait


def _sum(parts: Sequence[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
    """Add up tensors one after the other, in float32 or better; `scratch` is one of the first two."""
    wide = torch.promote_types(scratch.dtype, torch.float32)
    if scratch.dtype == wide:
        total = torch.add(parts[0], parts[1], out=scratch)
    else:
        total = parts[0].to(wide).add_(parts[1])
    for part in parts[2:]:
        total += part
    return total
