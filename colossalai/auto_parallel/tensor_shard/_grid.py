"""The ranks of a job as a grid: its arguments, and the speed of its links."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from colossalai.auto_parallel._make import is_number, machine_of
from colossalai.auto_parallel.machine._machine import LinkLevel, MachineProfile
from colossalai.device import OPERATIONS, AlphaBeta, DeviceMesh

AlphaBetas = Mapping[tuple[int, int], tuple[float, float]]


def initialize_device_mesh(
    world_size: int = -1,
    physical_devices: Sequence[int] | None = None,
    alpha_beta_dict: AlphaBetas | None = None,
    logical_mesh_shape: Sequence[int] | None = None,
    logical_mesh_id: torch.Tensor | None = None,
) -> DeviceMesh:
    """Return the ranks as a grid.

    Args:
        world_size: Number of ranks. -1: the world size of the job.
        physical_devices: The global ranks. Default: all, in order.
        alpha_beta_dict: For pairs of ranks, the latency of a message in seconds, and the seconds per byte. An
            axis is as fast as the slowest pair of neighbors along it. Default: unknown.
        logical_mesh_shape: Extents of the grid, outermost first. Default: those of `logical_mesh_id`, or one
            axis with all ranks, which a plan can divide in any way.
        logical_mesh_id: The ranks at their places in the grid.

    Raises:
        ValueError: `world_size` differs from the job's, `physical_devices` has another number of ranks, the
            grid does not consist of these ranks, `alpha_beta_dict` lacks all pairs of an axis, or an argument
            has another type.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    _check_kinds(
        physical_devices=physical_devices,
        alpha_beta_dict=alpha_beta_dict,
        logical_mesh_shape=logical_mesh_shape,
        logical_mesh_id=logical_mesh_id,
    )
    if world_size not in (-1, num_ranks):
        raise ValueError(f"world_size={world_size}, and the job has {num_ranks} ranks: leave it out")
    ranks = list(range(num_ranks)) if physical_devices is None else list(physical_devices)
    if sorted(ranks) != list(range(num_ranks)):
        raise ValueError(f"physical_devices={ranks}: give each of the ranks 0 to {num_ranks - 1} once")
    mesh = DeviceMesh(torch.tensor(ranks), logical_mesh_shape, logical_mesh_id)
    if alpha_beta_dict is None:
        return mesh
    lines = [_line_of_axis(mesh, axis, alpha_beta_dict) for axis in range(len(mesh.shape))]
    return DeviceMesh(
        torch.tensor(ranks),
        mesh.shape,
        mesh.logical_mesh_id,
        mesh_alpha=[alpha for alpha, _ in lines],
        mesh_beta=[beta for _, beta in lines],
    )


def _check_kinds(
    *, physical_devices: object, alpha_beta_dict: object, logical_mesh_shape: object, logical_mesh_id: object
) -> None:
    """Refuse arguments of a grid with other types.

    Raises:
        ValueError: An argument has another type.
    """
    for name, value in (
        ("physical_devices", physical_devices),
        ("logical_mesh_shape", logical_mesh_shape),
    ):
        if value is not None and not (
            isinstance(value, Sequence) and all(type(each) is int for each in value)
        ):
            raise ValueError(f"{name}={value!r}: give a list of integers")
    if logical_mesh_id is not None and not isinstance(logical_mesh_id, torch.Tensor):
        raise ValueError(f"logical_mesh_id={logical_mesh_id!r}: give a tensor, such as torch.arange(4)")
    if alpha_beta_dict is None:
        return
    lines = alpha_beta_dict.items() if isinstance(alpha_beta_dict, Mapping) else [(None, None)]
    for pair, line in lines:
        match pair, line:
            case (int(), int()), (alpha, beta) if all(
                is_number(each) and 0 <= each < math.inf for each in (alpha, beta)
            ):
                continue
        raise ValueError(
            f"alpha_beta_dict={alpha_beta_dict!r}: give {{(first, second): (seconds, seconds per byte)}} for "
            "pairs of ranks"
        )


def _line_of_axis(mesh: DeviceMesh, axis: int, known: AlphaBetas) -> tuple[float, float]:
    """Return alpha and beta of the slowest neighbors along an axis.

    Raises:
        ValueError: `known` has no pair of neighbors.
    """
    places = mesh.logical_mesh_id.movedim(axis, -1).flatten(0, -2) if len(mesh.shape) > 1 else None
    rows = mesh.logical_mesh_id[None] if places is None else places
    found = [
        known[pair]
        for row in rows.tolist()
        for first, second in pairwise(row)
        for pair in ((first, second), (second, first))
        if pair in known
    ]
    if not found and mesh.shape[axis] > 1:
        raise ValueError(
            f"alpha_beta_dict has no pair of ranks that are neighbours along axis {axis} of {mesh.shape}: "
            f"give {{(first, second): (seconds, seconds per byte)}}, as for {tuple(rows[0, :2].tolist())}"
        )
    return max((each[0] for each in found), default=0.0), max((each[1] for each in found), default=0.0)


def check_mesh(mesh: DeviceMesh, num_ranks: int) -> None:
    """Check that a grid consists of the ranks of the job.

    Raises:
        ValueError: `mesh` is not a `DeviceMesh`, or has another number of ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh is a {type(mesh).__name__}: give a colossalai.device.DeviceMesh, such as "
            "initialize_device_mesh() returns"
        )
    if mesh.num_devices != num_ranks:
        raise ValueError(
            f"device_mesh has {mesh.num_devices} ranks, and the job {num_ranks}: start it by "
            f"colossalai run --nproc_per_node {mesh.num_devices}"
        )


def profile_of(mesh: DeviceMesh) -> MachineProfile:
    """Return the shipped profile with the links of a grid, if it has any."""
    profile = machine_of(None)
    if all(value == 1 for value in (*mesh.mesh_alpha, *mesh.mesh_beta)):
        return profile  # the values of an unknown speed
    levels, within = [], 1
    for axis in reversed(range(len(mesh.shape))):
        within *= mesh.shape[axis]
        line = AlphaBeta(mesh.mesh_alpha[axis], mesh.mesh_beta[axis])
        levels.append(LinkLevel(num_ranks=within if axis else None, lines=dict.fromkeys(OPERATIONS, line)))
    return replace(profile, links=tuple(levels))
