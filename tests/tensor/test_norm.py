"""The norm over all ranks, of replicated and sharded parameters together."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from colossalai.tensor import global_grad_norm, scale_grads
from tests.ranks import run_ranks


def norms_of_a_mixture(norm_type):
    dist.init_process_group("gloo")
    from torch.distributed.tensor import Shard, distribute_tensor

    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(3)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [torch.nn.Parameter(whole[0].clone())]
    params[0].grad = whole[0].clone()
    for tensor in whole[1:]:  # 5 rows over 2 or 4 ranks: uneven, with 4 ranks one is empty
        param = torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))
        param.grad = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        params.append(param)
    params.append(torch.nn.Parameter(torch.ones(2)))  # without a gradient
    found = global_grad_norm(params, norm_type).item()
    scale_grads(params, 0.5)
    halved = global_grad_norm(params, norm_type).item()
    expected = torch.linalg.vector_norm(torch.cat([t.flatten() for t in whole]), norm_type).item()
    return found, halved * 2, expected


@pytest.mark.dist
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mixture(world_size, norm_type):
    for found, doubled, expected in run_ranks(norms_of_a_mixture, world_size, norm_type):
        assert found == pytest.approx(expected, rel=1e-12)
        assert doubled == pytest.approx(expected, rel=1e-12)


@pytest.mark.unit
def test_edges():
    assert global_grad_norm([]) == 0
    assert global_grad_norm([torch.nn.Parameter(torch.ones(2))]) == 0
    with pytest.raises(ValueError, match=r"norm_type is 0.5"):
        global_grad_norm([], 0.5)
