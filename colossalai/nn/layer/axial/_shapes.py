"""Checks of the shapes of arguments."""

from collections.abc import Sequence

from torch import Tensor


def check_shape(name: str, tensor: Tensor | None, shape: Sequence[int | str]) -> None:
    """Raise an error if an argument has another shape.

    Args:
        name: Name of the argument.
        tensor: The argument; None is not checked.
        shape: A size for each dimension, or the name of one of any size.

    Raises:
        ValueError: `tensor` has another number of dimensions or another size.
    """
    if tensor is None:
        return
    if tensor.dim() != len(shape) or any(
        isinstance(size, int) and size != found for size, found in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; it must be ({wanted})")
