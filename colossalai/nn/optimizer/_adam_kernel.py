"""Adam on torch's fused kernels.

Adam: Kingma, Ba 2015, arXiv 1412.6980. AdamW: Loshchilov, Hutter 2019, arXiv 1711.05101.

For a weight w with gradient g at its step t = 1, 2, ...

    m = beta1 * m + (1 - beta1) * g               v = beta2 * v + (1 - beta2) * g * g
    w = w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Decoupled weight decay multiplies w by 1 - lr * weight_decay before that, the other kind adds weight_decay * w
to g.

[Note: a mixed step]
A half-precision weight has a float32 master. Casting the whole gradient, updating all masters and casting
them into all weights takes three passes over memory. Here the three are done for one block of elements after
the other: the float32 gradient of a block lives in one small buffer and never leaves the cache, and a master
is still in the cache when it is rounded. Each byte is read and written once: 28 for an element in place of
40. Blocks begin at multiples of `_CUT`, so that the kernel's vectors lie as in a single call: results do not
depend on where a tensor is cut.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of weights that are updated by way of a float32 master."""

BLOCK_NUMEL = 512 * 1024
"""Elements of a block of the mixed step; from 256K to 1M the times of `benchmarks/adam.py` were alike."""

_CUT = 1024


@dataclass(frozen=True)
class AdamOptions:
    """The numbers of an update.

    Attributes:
        lr: Learning rate.
        beta1: Rate of the running average of the gradient.
        beta2: Rate of the running average of its square.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled_weight_decay: Whether the decay is AdamW's, and not part of the gradient.
        bias_correction: Whether the averages, which start at 0, are corrected for it.
        maximize: Whether the loss is to grow.
    """

    lr: float | Tensor = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True
    bias_correction: bool = True
    maximize: bool = False

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> "AdamOptions":
        """Return the options of a parameter group."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            maximize=group["maximize"],
        )


@dataclass(frozen=True)
class Slot:
    """A tensor to update, or a piece of one.

    All have the same memory layout; only a weight that is not dense may have another one.

    Attributes:
        param: The weight.
        grad: Its gradient, in the dtype of the weight.
        exp_avg: Running average of the gradient, float32 where the weight is half.
        exp_avg_sq: Running average of the square of the gradient.
        step: The number of this step, a tensor on the device of the weight.
        master: The float32 copy of a half-precision weight, which is updated.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None = None


def adam_step(slots: Sequence[Slot], options: AdamOptions) -> None:
    """Update weights of one device and one dtype in their own precision, in place."""
    if slots:
        # Torch's kernels ignore strides: gaps would be updated too.
        params = [
            slot.param if is_dense(slot.param) else torch.empty_like(slot.exp_avg).copy_(slot.param)
            for slot in slots
        ]
        _fused_adam(
            params,
            [slot.grad for slot in slots],
            [slot.exp_avg for slot in slots],
            [slot.exp_avg_sq for slot in slots],
            [slot.step for slot in slots],
            options,
        )
        for slot, param in zip(slots, params, strict=True):
            if param is not slot.param:
                slot.param.copy_(param)


def mixed_adam_step(slots: Sequence[Slot], options: AdamOptions, *, block_numel: int = BLOCK_NUMEL) -> None:
    """Update float32 masters from half gradients and round them into half weights, in place.

    See [Note: a mixed step].

    Args:
        slots: The tensors, all of one device; each has a master.
        options: The numbers.
        block_numel: Elements of a block, a multiple of 1024.

    Raises:
        ValueError: `block_numel` is not a positive multiple of 1024.
    """
    if block_numel <= 0 or block_numel % _CUT:
        raise ValueError(f"block_numel={block_numel} must be a positive multiple of {_CUT}")
    pieces = (piece for slot in slots for piece in _cut(slot, block_numel))
    buffer: Tensor | None = None
    for block in _blocks(pieces, block_numel):
        masters = [piece.master for piece in block if piece.master is not None]
        if buffer is None:
            buffer = torch.empty(block_numel, dtype=torch.float32, device=block[0].param.device)
        grads = _grad_buffers(block, buffer)
        _copy(grads, [piece.grad for piece in block])
        _fused_adam(
            masters,
            grads,
            [piece.exp_avg for piece in block],
            [piece.exp_avg_sq for piece in block],
            [piece.step for piece in block],
            options,
        )
        _copy([piece.param for piece in block], masters)


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the memory layout of `like`: itself, or a copy if its layout differs."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory without holes or overlaps."""
    expected = 1
    for extent, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, in the same memory; any other tensor itself."""
    from torch.distributed.tensor import DTensor  # in the function: half a second of imports

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fused_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    options: AdamOptions,
) -> None:
    if not options.bias_correction:
        steps = [torch.full_like(steps[0], math.inf)] * len(params)  # 1 - beta^inf = 1
    kernel: Any = torch._fused_adamw_ if options.decoupled_weight_decay else torch._fused_adam_
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )


def _cut(slot: Slot, block_numel: int) -> Iterator[Slot]:
    assert slot.master is not None
    if slot.param.numel() <= block_numel or not is_dense(slot.param):
        yield slot
        return
    tensors = (slot.param, slot.grad, slot.exp_avg, slot.exp_avg_sq, slot.master)
    parts = (flat(tensor).split(block_numel) for tensor in tensors)
    for piece_of_param, piece_of_grad, m, v, piece_of_master in zip(*parts, strict=True):
        yield Slot(piece_of_param, piece_of_grad, m, v, slot.step, piece_of_master)


def _blocks(pieces: Iterable[Slot], block_numel: int) -> Iterator[list[Slot]]:
    """Yield lists of pieces that together are no larger than a block, or hold one piece."""
    block: list[Slot] = []
    numel = 0
    for piece in pieces:
        size = _rounded_up(piece.param.numel())
        if block and numel + size > block_numel:
            yield block
            block, numel = [], 0
        block.append(piece)
        numel += size
    if block:
        yield block


def _grad_buffers(block: Sequence[Slot], buffer: Tensor) -> list[Tensor]:
    buffers = []
    start = 0
    for piece in block:
        numel = piece.param.numel()
        if numel > buffer.numel():  # it has holes, so it was not cut
            buffers.append(torch.empty_like(piece.exp_avg))
        else:
            part = buffer[start : start + numel]
            buffers.append(part.as_strided(piece.exp_avg.shape, piece.exp_avg.stride()))
        start += _rounded_up(numel)
    return buffers


def _rounded_up(numel: int) -> int:
    return -(-numel // 16) * 16  # whole cache lines


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])  # in all threads; on a CPU foreach is a loop
    else:
        torch._foreach_copy_(list(targets), list(sources))
