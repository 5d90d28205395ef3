"""A mesh that knows its speed says which way a tensor goes from one cut to another."""

import pytest
import torch

from colossalai.device import DeviceMesh
from colossalai.tensor import ConversionPlanner, ShardingLayout, ShardingSpec

pytestmark = pytest.mark.unit


def planned(alpha: tuple[float, float], beta: tuple[float, float]) -> float:
    """Return what a plan from S0R to the whole costs on a 2 x 2 mesh of some speed."""
    mesh = DeviceMesh(torch.arange(4).reshape(2, 2), mesh_alpha=list(alpha), mesh_beta=list(beta))
    planner = ConversionPlanner(mesh.mesh, mesh.speed)
    source, target = (ShardingSpec.from_notation(name, (64, 64), mesh) for name in ("S0R", "RR"))
    return planner.plan(ShardingLayout(source), ShardingLayout(target), itemsize=8).cost


def test_a_gather_costs_what_the_mesh_says() -> None:
    """Of 64 * 64 * 8 bytes each of two ranks sends a half: alpha + beta / 2 * bytes."""
    assert planned((1e-3, 5.0), (1e-6, 5.0)) == pytest.approx(1e-3 + 1e-6 * 64 * 64 * 8 / 2, rel=1e-9)
