"""Batched messages between ranks of an axis, and the uneven all-to-all that consists of them.

Messages are sent from the given tensors and received into the given tensors, without copies.
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

    The ledger counts the bytes that this rank sends to other ranks.

    Args:
        sends: Contiguous tensors in the order of their target ranks; an empty one is not sent.
        receives: Contiguous tensors of the same lengths for the messages of the ranks, in their order. This
            rank's own message is copied.
        parallel_mode: The axis.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        receives[0].copy_(sends[0])
        return
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    with record_bytes("exchange", axis.name, sum(sends[rank].nbytes for rank in others)):
        if shares_memory(axis):  # one collective takes half the time of the messages
            # Joined by all ranks of the axis. Blocking; includes this rank's own message.
            dist.all_to_all(list(receives), list(sends), group=axis.group)
            return
        messages = start_messages(
            axis,
            sends={rank: sends[rank] for rank in others},
            receives={rank: receives[rank] for rank in others},
        )
        # The own message is copied while the others are in flight.
        receives[axis.rank].copy_(sends[axis.rank])
        messages()


def exchange_pieces(
    sent: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], parallel_mode: AxisLike
) -> torch.Tensor:
    """Return the pieces that the ranks of an axis send to this one, in their order; collective.

    Args:
        sent: Pieces to send, in the order of their target ranks; flat.
        send_sizes: Number of elements for each rank.
        receive_sizes: Number of elements from each rank.
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
    """Start to send to and to receive from ranks of an axis; return the function that waits for all messages.

    Under a timed ledger the messages are complete on return. The caller records them in the ledger.

    Args:
        axis: The ranks; their positions along it address the messages.
        sends: Tensors by target rank; an empty one is not sent.
        receives: Tensors by source rank; an empty one is not received.
        tag: Tag of the messages.
    """
    ops = [
        *(dist.P2POp(dist.irecv, part, None, axis.group, tag, r) for r, part in receives.items()),
        *(dist.P2POp(dist.isend, part, None, axis.group, tag, r) for r, part in sends.items()),
    ]
    ops = [op for op in ops if op.tensor.numel() > 0]  # both ranks know the length
    # Receives are posted first. Messages between two ranks match in this order.
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        for work in works:
            work.wait()

    if is_timed():
        wait()
    return wait
