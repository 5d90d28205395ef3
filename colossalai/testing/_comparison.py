"""Assertions about tensors on one or several ranks; failures report the differences."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.cluster import gather_values


def assert_close(
    actual: Tensor, expected: Tensor, *, rtol: float | None = None, atol: float | None = None
) -> None:
    """Assert that two tensors agree up to rounding.

    Args:
        actual: The tensor to check.
        expected: Expected tensor, with the same shape, dtype and device.
        rtol: Relative tolerance; give both tolerances or none (then those of `torch.testing` for the dtype).
        atol: Absolute tolerance.

    Raises:
        AssertionError: The tensors differ; the message has the greatest differences and their indices.
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
        AssertionError: The tensors are equal.
    """
    if torch.equal(actual, other):
        raise AssertionError(f"the tensors of shape {tuple(actual.shape)} are equal, and should not be")


def assert_equal_in_group(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Assert that all ranks of a group have the same tensor; every rank calls it.

    Args:
        tensor: Tensor of this rank; shape and dtype are compared, too.
        process_group: Process group of the ranks. Default: all ranks.

    Raises:
        AssertionError: The tensors differ; on every rank. The message lists the ranks that differ from the
            first.
    """
    size = dist.get_world_size(process_group)
    kinds = gather_values((tuple(tensor.shape), tensor.dtype), process_group)
    if len(set(kinds)) > 1:
        raise AssertionError(f"the tensors of the ranks have shapes and dtypes {kinds}")
    held = tensor.detach().contiguous()
    gathered = [torch.empty_like(held) for _ in range(size)]
    dist.all_gather(gathered, held, group=process_group)
    others = [place for place, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
    if others:
        ranks = [
            dist.get_global_rank(process_group, place) if process_group is not None else place
            for place in others
        ]
        raise AssertionError(
            f"the tensors of shape {tuple(tensor.shape)} on ranks {ranks} differ from the first rank's"
        )


def check_state_dict_equal(d1: Mapping[Any, Any], d2: Mapping[Any, Any], ignore_device: bool = True) -> None:
    """Assert that two state dicts have the same keys and equal values, at every depth.

    Args:
        d1: First state dict.
        d2: Second state dict.
        ignore_device: Whether tensors can be on different devices.

    Raises:
        AssertionError: The state dicts differ; the message has the path to the first difference.
    """
    _check_equal(d1, d2, "", ignore_device)


def _check_equal(one: Any, other: Any, path: str, ignore_device: bool) -> None:
    where = path or "the state dict"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            missing, unknown = (
                sorted(map(str, set(one) - set(other))),
                sorted(map(str, set(other) - set(one))),
            )
            raise AssertionError(f"{where}: only the first has {missing}, only the second {unknown}")
        for key in one:
            _check_equal(one[key], other[key], f"{path}.{key}".lstrip("."), ignore_device)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            raise AssertionError(f"{where} has {len(one)} items in the first and {len(other)} in the second")
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            _check_equal(mine, theirs, f"{path}.{number}".lstrip("."), ignore_device)
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        moved = other.to(one.device) if ignore_device else other
        torch.testing.assert_close(
            one, moved, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif type(one) is not type(other) or one != other:
        raise AssertionError(f"{where} is {one!r} in the first and {other!r} in the second")
