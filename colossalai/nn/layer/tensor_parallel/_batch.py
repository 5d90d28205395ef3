"""The batch of a tensor-parallel group, whole on every rank, and each rank's part of it."""

from collections.abc import Hashable

import torch

from colossalai.communication import (
    as_axis,
    reduce_forward_copy_backward,
    slice_of,
    split_forward_gather_backward,
)
from colossalai.context import Axis, Mesh
from colossalai.nn.layer.tensor_parallel._launched import launched_job, require_mode
from colossalai.nn.layer.tensor_parallel._scheme import LINEAR_SCHEMES, Axes


def check_batch(batch: torch.Tensor, axes: Axes, mesh: Mesh, *, by: str) -> None:
    """Require that the axes divide a whole batch, along dimension 0.

    Raises:
        ValueError: The ranks along `axes` do not divide `batch`; the message names `by`.
    """
    _check_divisible(batch, 0, mesh.axis(axes), by=by)


def own_part(batch: torch.Tensor, axes: Axes, mesh: Mesh, *, by: str) -> torch.Tensor:
    """Return this rank's part of a batch that needs no gradient: ids, images, labels.

    Args:
        batch: The whole batch, along dimension 0.
        axes: Axes that cut it, the coarsest cut first.
        mesh: The ranks.
        by: The caller, for the message.

    Raises:
        ValueError: The axes do not divide the batch.
    """
    check_batch(batch, axes, mesh, by=by)
    for name in axes:
        batch = slice_of(batch, mesh.axis(name), 0)
    return batch


def split_batch_2d(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of a batch in mode "2d"; its gradient is gathered.

    Args:
        input_: The batch, the same on all ranks of the tensor-parallel group.
        dim: The dimension to cut.

    Raises:
        ValueError: The job has another mode, or the ranks do not divide the batch.
    """
    return _split_batch(input_, dim, "2d", by="split_batch_2d")


def split_batch_2p5d(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of a batch in mode "2.5d"; see `split_batch_2d`."""
    return _split_batch(input_, dim, "2.5d", by="split_batch_2p5d")


def split_batch_3d(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of a batch in mode "3d", as the input of a model; see `split_batch_2d`."""
    return _split_batch(input_, dim, "3d", by="split_batch_3d")


def reduce_by_batch_2d(input_: torch.Tensor, reduce_mean: bool = False) -> torch.Tensor:
    """Return the sum, or the mean, of the ranks' results for their parts of a batch in mode "2d".

    Args:
        input_: A term, of the same shape on all ranks. Its gradient is the sum's, or the mean's.
        reduce_mean: Whether to divide by the number of parts.

    Raises:
        ValueError: The job has another mode.
    """
    return _reduce_by_batch(input_, "2d", mean=reduce_mean, by="reduce_by_batch_2d")


def reduce_by_batch_2p5d(input_: torch.Tensor, reduce_mean: bool = False) -> torch.Tensor:
    """Return the sum, or the mean, over the parts of a batch in mode "2.5d"; see `reduce_by_batch_2d`."""
    return _reduce_by_batch(input_, "2.5d", mean=reduce_mean, by="reduce_by_batch_2p5d")


def reduce_by_batch_3d(input_: torch.Tensor, reduce_mean: bool = False) -> torch.Tensor:
    """Return the sum, or the mean, over the parts of a batch in mode "3d"; see `reduce_by_batch_2d`."""
    return _reduce_by_batch(input_, "3d", mean=reduce_mean, by="reduce_by_batch_3d")


def split_tensor_3d(tensor: torch.Tensor, dim: int, parallel_mode: Hashable) -> torch.Tensor:
    """Return this rank's slice along one parallel mode of "3d"; its gradient is gathered.

    Args:
        tensor: The whole, the same on all ranks of the mode.
        dim: The dimension to cut.
        parallel_mode: PARALLEL_3D_INPUT, PARALLEL_3D_WEIGHT or PARALLEL_3D_OUTPUT.

    Raises:
        ValueError: The job has another mode, or the ranks do not divide the dimension.
    """
    require_mode("3d", by="split_tensor_3d")
    axis = as_axis(parallel_mode)
    _check_divisible(tensor, dim, axis, by="split_tensor_3d")
    return split_forward_gather_backward(tensor, axis, dim)


def _split_batch(tensor: torch.Tensor, dim: int, mode: str, *, by: str) -> torch.Tensor:
    require_mode(mode, by=by)
    axes, mesh = LINEAR_SCHEMES[mode][0].x.batch, launched_job().mesh
    _check_divisible(tensor, dim, mesh.axis(axes), by=by)
    for name in axes:
        tensor = split_forward_gather_backward(tensor, mesh.axis(name), dim)
    return tensor


def _reduce_by_batch(tensor: torch.Tensor, mode: str, *, mean: bool, by: str) -> torch.Tensor:
    require_mode(mode, by=by)
    axes, mesh = LINEAR_SCHEMES[mode][0].x.batch, launched_job().mesh
    for name in axes:
        tensor = reduce_forward_copy_backward(tensor, mesh.axis(name))
    return tensor / mesh.axis_size(axes) if mean else tensor


def _check_divisible(tensor: torch.Tensor, dim: int, axis: Axis, *, by: str) -> None:
    if tensor.shape[dim] % axis.size:
        raise ValueError(
            f"{by} cuts dimension {dim} of {tuple(tensor.shape)}: it is {tensor.shape[dim]}, which the "
            f"{axis.size} ranks along {axis.name} do not divide"
        )
