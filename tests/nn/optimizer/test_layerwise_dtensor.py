"""Lamb and Lars on sharded parameters take the same steps as on whole ones."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossalai.nn import Lamb, Lars
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

OPTIMIZERS = {
    "Lamb": (Lamb, {"lr": 0.1, "weight_decay": 0.1}),
    "Lars": (Lars, {"lr": 0.1, "momentum": 0.9, "eeta": 0.05, "weight_decay": 0.1}),
}


def _largest_difference_after_three_steps() -> dict[str, float]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    mesh = dist.init_device_mesh("cpu", (2,))
    placements = [Shard(0), Shard(1), Replicate(), Shard(0), None]  # None: a plain tensor among the others
    shapes = [(5, 3), (2, 4), (3,), (1,), (4,)]  # 5 rows and 1 row: pieces of unequal size, one empty
    differences = {}
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        torch.manual_seed(0)
        twins = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
        params = [
            nn.Parameter(
                distribute_tensor(twin.data.clone(), mesh, [place])
                if place is not None
                else twin.data.clone()
            )
            for twin, place in zip(twins, placements, strict=True)
        ]
        optimizer, twin_optimizer = optimizer_class(params, **options), optimizer_class(twins, **options)
        for _ in range(3):
            for param, twin, place in zip(params, twins, placements, strict=True):
                twin.grad = torch.randn_like(twin)
                param.grad = distribute_tensor(twin.grad, mesh, [place]) if place is not None else twin.grad
            optimizer.step()
            twin_optimizer.step()
        wholes = [
            p.full_tensor() if place is not None else p for p, place in zip(params, placements, strict=True)
        ]
        errors = [(w - t).abs().max() for w, t in zip(wholes, twins, strict=True)]
        differences[name] = torch.stack(errors).max().item()  # a NaN is kept, which Python's max may lose
    dist.destroy_process_group()
    return differences


def test_sharded_parameters_move_like_whole_ones() -> None:
    for differences in run_ranks(_largest_difference_after_three_steps, 2):
        assert all(difference < 1e-13 for difference in differences.values())
        assert set(differences) == set(OPTIMIZERS)
