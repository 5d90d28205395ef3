"""Messages between any ranks of an axis at once, and the uneven all-to-all that is made of them.

What is sent is read, and what is received is written, where it lies: neither is copied first.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from colossalai.communication._collectives import AxisLike, as_axis, shares_memory
from colossalai.communication._ledger import is_timed, record_bytes
from colossalai.context import Axis


def exchange(
    sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], parallel_mode: AxisLike
) -> None:
    """Send each rank of an axis a tensor and receive one from each; collective.

    The ledger's bytes are those that this rank sends to others.

    Args:
        sends: A contiguous tensor for each rank, in their order; no elements: no message.
        receives: Where the tensor of each rank goes, contiguous and of its length; this rank's own is copied.
        parallel_mode: The axis.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        receives[0].copy_(sends[0])
        return
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    with record_bytes("exchange", axis.name, sum(sends[rank].nbytes for rank in others)):
        if shares_memory(axis):  # where ranks meet once, in half the time of as many messages
            dist.all_to_all(list(receives), list(sends), group=axis.group)
            return
        messages = start_messages(
            axis,
            sends={rank: sends[rank] for rank in others},
            receives={rank: receives[rank] for rank in others},
        )
        receives[axis.rank].copy_(sends[axis.rank])
        messages()


def exchange_pieces(
    sent: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], parallel_mode: AxisLike
) -> torch.Tensor:
    """Return what the ranks of an axis have for this one, in their order; collective.

    Args:
        sent: What goes to the first rank, then what goes to the second, and so on; flat.
        send_sizes: How many elements go to each.
        receive_sizes: How many come from each.
        parallel_mode: The axis.
    """
    received = sent.new_empty(sum(receive_sizes))
    exchange(sent.split(list(send_sizes)), received.split(list(receive_sizes)), parallel_mode)
    return received


def start_messages(
    axis: Axis,
    *,
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, torch.Tensor],
    tag: int = 0,
) -> Callable[[], None]:
    """Begin to send to and to receive from ranks of an axis; return what waits for both.

    Under a timed ledger they have ended on return, so that their time is their own. Whoever calls this writes
    to the ledger.

    Args:
        axis: The ranks, by whose positions along it messages are addressed.
        sends: What goes to whom; no elements: no message, which the other one knows.
        receives: Where what comes from whom goes.
        tag: Messages of different tags never meet.
    """
    ops = [
        *(dist.P2POp(dist.irecv, part, None, axis.group, tag, r) for r, part in receives.items()),
        *(dist.P2POp(dist.isend, part, None, axis.group, tag, r) for r, part in sends.items()),
    ]
    ops = [op for op in ops if op.tensor.numel() > 0]  # whose lengths all ranks know
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        for work in works:
            work.wait()

    if is_timed():
        wait()
    return wait
