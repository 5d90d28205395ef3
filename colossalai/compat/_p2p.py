"""Messages between neighbouring stages of the launched job's pipeline, for schedules written by hand.

A stage sends forward to its next stage, and backward to the previous one. Shapes and dtypes
are known to the receiver: each function that receives is given them. The first stage has no previous one and
the last no next one: there, sending does nothing and receiving returns None.
"""

from collections.abc import Callable, Sequence

import torch

from colossalai.communication import record_bytes, start_messages
from colossalai.context import Axis, ParallelMode, global_context
from colossalai.logging import get_dist_logger

Sent = torch.Tensor | Sequence[torch.Tensor]
Shapes = Sequence[int] | Sequence[Sequence[int]]
Received = torch.Tensor | list[torch.Tensor] | None


def send_forward(
    output_tensor: Sent, next_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send the output of this stage to the next one, which calls `recv_forward`.

    Args:
        output_tensor: A tensor, or several.
        next_rank: Global rank of the next stage; default: the neighbour in the pipeline.
        scatter_gather_tensors: No effect: tensors are sent whole.
    """
    _pass(to_next=output_tensor, next_rank=next_rank, cuts=scatter_gather_tensors)


def send_backward(
    input_tensor_grad: Sent, prev_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send the gradient of this stage's input to the previous stage, which calls `recv_backward`.

    Args:
        input_tensor_grad: A tensor, or several.
        prev_rank: Global rank of the previous stage; default: the neighbour in the pipeline.
        scatter_gather_tensors: No effect: tensors are sent whole.
    """
    _pass(to_prev=input_tensor_grad, prev_rank=prev_rank, cuts=scatter_gather_tensors)


def recv_forward(
    input_tensor_shape: Shapes,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Received:
    """Return the input of this stage, which the previous one sends with `send_forward`.

    Args:
        input_tensor_shape: Shape of the tensor, or a list of shapes of several.
        prev_rank: Global rank of the previous stage; default: the neighbour in the pipeline.
        dtype: Dtype of the tensors; floating ones require a gradient.
        scatter_gather_tensors: No effect: tensors are sent whole.
    """
    return _pass(from_prev=input_tensor_shape, prev_rank=prev_rank, dtype=dtype, cuts=scatter_gather_tensors)[
        0
    ]


def recv_backward(
    output_grad_shape: Shapes,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Received:
    """Return the gradient of this stage's output, which the next one sends with `send_backward`.

    Args:
        output_grad_shape: Shape of the tensor, or a list of shapes of several.
        next_rank: Global rank of the next stage; default: the neighbour in the pipeline.
        dtype: Dtype of the tensors.
        scatter_gather_tensors: No effect: tensors are sent whole.
    """
    return _pass(from_next=output_grad_shape, next_rank=next_rank, dtype=dtype, cuts=scatter_gather_tensors)[
        1
    ]


def send_forward_recv_backward(
    output_tensor: Sent,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Received:
    """Send the output to the next stage and return its gradient, if `recv_next`; both at once."""
    return _pass(
        to_next=output_tensor,
        from_next=output_grad_shape if recv_next else None,
        next_rank=next_rank,
        dtype=dtype,
        cuts=scatter_gather_tensors,
    )[1]


def send_backward_recv_forward(
    input_tensor_grad: Sent,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Received:
    """Send the gradient to the previous stage and return the next input, if `recv_prev`; both at once."""
    return _pass(
        to_prev=input_tensor_grad,
        from_prev=input_tensor_shape if recv_prev else None,
        prev_rank=prev_rank,
        dtype=dtype,
        cuts=scatter_gather_tensors,
    )[0]


def send_forward_recv_forward(
    output_tensor: Sent,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Received:
    """Send the output to the next stage and return the next input, if `recv_prev`; both at once."""
    return _pass(
        to_next=output_tensor,
        from_prev=input_tensor_shape if recv_prev else None,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        cuts=scatter_gather_tensors,
    )[0]


def send_backward_recv_backward(
    input_tensor_grad: Sent,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Received:
    """Send the gradient to the previous stage and return the next one, if `recv_next`; both at once."""
    return _pass(
        to_prev=input_tensor_grad,
        from_next=output_grad_shape if recv_next else None,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        cuts=scatter_gather_tensors,
    )[1]


def send_forward_backward_recv_forward_backward(
    output_tensor: Sent,
    input_tensor_grad: Sent,
    input_tensor_shape: Shapes,
    output_grad_shape: Shapes,
    recv_prev: bool = True,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> tuple[Received, Received]:
    """Send to both neighbours and return the next input and the gradient of the output; all at once."""
    return _pass(
        to_next=output_tensor,
        to_prev=input_tensor_grad,
        from_prev=input_tensor_shape if recv_prev else None,
        from_next=output_grad_shape if recv_next else None,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        cuts=scatter_gather_tensors,
    )


def _pass(
    *,
    to_next: Sent | None = None,
    to_prev: Sent | None = None,
    from_prev: Shapes | None = None,
    from_next: Shapes | None = None,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    cuts: bool = False,
) -> tuple[Received, Received]:
    """Send and receive at once; return the tensors of the previous and the next stage."""
    if cuts:
        get_dist_logger().log_once(
            "scatter_gather_tensors=True has no effect: stages send whole tensors", ranks=[0]
        )
    axis = global_context.axis(ParallelMode.PIPELINE)
    if axis.rank == 0:
        to_prev = from_prev = None
    if axis.rank == axis.size - 1:
        to_next = from_next = None
    prev = axis.rank - 1 if prev_rank is None else axis.ranks.index(prev_rank)
    following = axis.rank + 1 if next_rank is None else axis.ranks.index(next_rank)
    outputs, input_grads = _tensors(to_next), _tensors(to_prev)
    inputs, output_grads = _empty(from_prev, dtype), _empty(from_next, dtype)
    sent = sum(tensor.nbytes for tensor in (*outputs, *input_grads))
    with record_bytes("exchange", axis.name, sent):
        # All messages are in flight before the first wait: the neighbours may call in either order.
        waits = [
            *_start(axis, outputs, following, inputs, prev, first_tag=0),
            *_start(axis, input_grads, prev, output_grads, following, first_tag=1),
        ]
        for wait in waits:
            wait()
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    return _as_given(inputs, from_prev), _as_given(output_grads, from_next)


def _start(
    axis: Axis,
    sent: Sequence[torch.Tensor],
    receiver: int,
    received: Sequence[torch.Tensor],
    sender: int,
    *,
    first_tag: int,
) -> list[Callable[[], None]]:
    """Begin the messages of one direction: each tensor of a list has a tag, even forward and odd backward."""
    return [
        start_messages(
            axis,
            sends={receiver: sent[number]} if number < len(sent) else {},
            receives={sender: received[number]} if number < len(received) else {},
            tag=first_tag + 2 * number,
        )
        for number in range(max(len(sent), len(received)))
    ]


def _tensors(sent: Sent | None) -> list[torch.Tensor]:
    """Return the tensors that are sent, contiguous and apart from the graph."""
    if sent is None:
        return []
    tensors = [sent] if isinstance(sent, torch.Tensor) else sent
    return [tensor.detach().contiguous() for tensor in tensors]


def _empty(shapes: Shapes | None, dtype: torch.dtype) -> list[torch.Tensor]:
    if shapes is None:
        return []
    sizes = shapes if _is_list(shapes) else [shapes]
    return [torch.empty(tuple(size), dtype=dtype, device=global_context.device) for size in sizes]  # type: ignore[arg-type]


def _as_given(tensors: list[torch.Tensor], shapes: Shapes | None) -> Received:
    """Return one tensor for one shape and a list for several; None where no message came."""
    if shapes is None or not tensors:
        return None
    return tensors if _is_list(shapes) else tensors[0]


def _is_list(shapes: Shapes) -> bool:
    """Whether several shapes were given; a scalar's shape is empty."""
    return len(shapes) > 0 and not isinstance(shapes[0], int)
