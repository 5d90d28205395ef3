"""Assertions about two tensors; each failure says how far apart they are."""

import torch
from torch import Tensor


def assert_close(
    actual: Tensor, expected: Tensor, *, rtol: float | None = None, atol: float | None = None
) -> None:
    """Assert that two tensors agree up to rounding.

    Args:
        actual: The tensor to check.
        expected: What it should be; same shape, dtype and device.
        rtol: Relative tolerance; give both tolerances or none (then those of `torch.testing` for the dtype).
        atol: Absolute tolerance.

    Raises:
        AssertionError: They differ; the message has the greatest differences and where they are.
    """
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_close_loose(actual: Tensor, expected: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """Assert that two tensors agree to about three digits, as results in half precision do."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Assert that two tensors agree in every element (NaN is not equal to NaN)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_not_equal(actual: Tensor, other: Tensor) -> None:
    """Assert that two tensors differ, in shape or in at least one element.

    Raises:
        AssertionError: They are equal.
    """
    if torch.equal(actual, other):
        raise AssertionError(f"the tensors of shape {tuple(actual.shape)} are equal, and should not be")
