"""Masked tokens: checks of masks, masked positions, and the divisors of means.

[Note: masked places]
Masked positions may have any value, NaN and infinity included. They are replaced, not multiplied by zero:
zero times infinity is NaN, in the loss or in the gradient of an unused exponential.

[Note: divisors]
A batch that is divided into microbatches, or over ranks, gives the loss and the gradient of the whole batch
only if each part divides its sum by the count of the whole batch: `num_tokens` or `num_sequences` is that
number, summed over all parts. The losses of the parts then add up. Data parallelism that averages gradients
over ranks divides a second time: multiply the loss by the number of ranks there.
"""

import torch
from torch import Tensor

Divisor = int | float | Tensor


def widen(x: Tensor) -> Tensor:
    """Return a tensor in float32 or better; the same tensor if it is already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def require_shapes(shape: torch.Size, names: str, /, **tensors: Tensor) -> None:
    """Check the shape of tensors; `names` are the names of its dimensions, for the message.

    Raises:
        ValueError: `tensors` has one whose shape is not `shape`, or `shape` has other dimensions than
            `names`.
    """
    for name, tensor in tensors.items():
        if tensor.shape != shape or tensor.dim() != len(names.split(", ")):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be ({names}), as the others, which are "
                f"{tuple(shape)}"
            )


def token_mask(mask: Tensor, /, **tensors: Tensor) -> Tensor:
    """Return a mask as booleans, after a check of the mask and of its tensors.

    Args:
        mask: (batch, length), boolean or integer; 0 is False.
        tensors: (batch, length) each, by their names in errors.

    Raises:
        ValueError: `mask` is of a floating-point dtype, or one of `tensors` has another shape.
    """
    if mask.is_floating_point():
        raise ValueError(f"mask is of type {mask.dtype}; it must be of booleans, or of the numbers 0 and 1")
    require_shapes(mask.shape, "batch, length", mask=mask, **tensors)
    return mask.bool()


def fill_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x in float32 or better, 0 where the mask is False."""
    # See [Note: masked places]: the derivative of `where` is an exact zero there, even for a NaN.
    return torch.where(mask, widen(x), 0.0)


def divide(total: Tensor, count: Tensor | int, given: Divisor | None, *, name: str) -> Tensor:
    """Return a sum over the divisor of the whole batch, or over the count of this part if none is given.

    Args:
        total: A sum of losses.
        count: Count of this part.
        given: Count of all parts together; None if this is the only part.
        name: Name of the argument `given` in the caller.

    Raises:
        ValueError: `count` is 0 and no divisor is given, or the one given is not above 0.
    """
    # See [Note: divisors].
    if given is None:
        if int(count) == 0:
            raise ValueError(
                f"no {name.removeprefix('num_')} to take the mean of; leave this batch out, or give {name}, "
                "that of all parts of the batch, if this is one of them"
            )
        given = count
    elif not isinstance(given, Tensor) and not given > 0:
        raise ValueError(f"{name} is {given}; it must be above 0: the number of all parts of the batch")
    return total / (given.to(total) if isinstance(given, Tensor) else given)
