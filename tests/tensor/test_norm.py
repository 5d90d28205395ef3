"""The norm over all ranks, of replicated and sharded parameters together."""

import os
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import colossalai
from colossalai.amp import OptimizerWrapper
from colossalai.core import global_context as gpc
from colossalai.tensor import count_zero_grads, global_grad_norm, scale_grads
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each


def norms_of_mixtures(norm_types):
    dist.init_process_group("gloo")
    return [norms_of_a_mixture(norm_type) for norm_type in norm_types]


def norms_of_a_mixture(norm_type):
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
@pytest.mark.parametrize("world_size", [further(2), 4])
def test_a_mixture(world_size):
    norm_types = [2.0, 1.0, 3.0, float("inf")]
    for found, doubled, expected in chain(*run_ranks(norms_of_mixtures, world_size, norm_types)):
        assert found == pytest.approx(expected, rel=1e-12)
        assert doubled == pytest.approx(expected, rel=1e-12)


def norms_over_stages(norm_type):
    """Each stage holds a weight of its own, the second of four nothing; the outer ones hold a tied one."""
    world_size = int(os.environ["WORLD_SIZE"])
    colossalai.launch_from_torch(config={"parallel": {"pipeline": world_size}}, verbose=False)
    stages = gpc.mesh.axis("pp")
    own = {rank: torch.full((3,), 1.0 + rank).double() for rank in range(world_size)}
    tied = torch.tensor([0.0, -7.0, 0.0]).double()
    if world_size == 4:
        del own[1]
    grads = [own[stages.rank]] if stages.rank in own else []
    is_outer = stages.rank in (0, world_size - 1)
    params = []
    for grad in [*grads, tied] if is_outer else grads:
        params.append(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
        params[-1].grad = grad.clone()
    copies = {params[-1]} if is_outer and stages.rank > 0 else set()

    def counts(param):
        return param not in copies

    expected = torch.linalg.vector_norm(torch.cat([*own.values(), tied]), norm_type).item()
    found = global_grad_norm(params, norm_type, stages=stages.group, counts=counts).item()
    zeros = count_zero_grads(params, stages=stages.group, counts=counts)
    optimizer = OptimizerWrapper(
        torch.optim.SGD(params or [torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        stages=stages.group,
        counts=counts,
    )
    clipped = optimizer.clip_grad_by_norm(1e-3, norm_type).item()
    after = global_grad_norm(params, norm_type, stages=stages.group, counts=counts).item()
    return expected, found, clipped, after, zeros


def dist_size():
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [further(2), 4])
def test_stages_add_theirs(world_size):
    by_type = run_each(world_size, norms_over_stages, [(2.0,), (1.0,), (float("inf"),)])
    for expected, found, clipped, after, zeros in chain(*by_type):
        # A stage without parameters holds its norm in float32.
        assert found == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(1e-3, rel=1e-6)
        assert zeros == 2


@pytest.mark.unit
def test_edges():
    assert global_grad_norm([]) == 0
    assert global_grad_norm([torch.nn.Parameter(torch.ones(2))]) == 0
    with pytest.raises(ValueError, match=r"norm_type is 0.5"):
        global_grad_norm([], 0.5)


def clip_sparse():
    """Train an embedding with sparse gradients; return the parameters, the last norm and number of zeros."""
    colossalai.launch_from_torch({"clip_grad_norm": 0.1}, verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = colossalai.initialize(model, optimizer, torch.nn.CrossEntropyLoss(), verbose=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        words = (torch.arange(8) * 3 + step) % 5  # some come twice
        mine = words.chunk(size)[rank]
        engine.zero_grad()
        engine.backward(engine.criterion(engine(mine), mine % 3))
        engine.step()
    norm = global_grad_norm(model.parameters()).item()
    return (
        [param.detach().tolist() for param in model.parameters()],
        norm,
        count_zero_grads(model.parameters()),
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_sparse_gradients_are_clipped(world_size):
    """One rank has entries that come twice, as autograd leaves them; an average has each once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        words = (torch.arange(8) * 3 + step) % 5
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(words), words % 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    zeros = sum(int((param.grad == 0).sum()) for param in model.parameters())
    for params, norm, num_zeros in run_ranks(clip_sparse, world_size):
        for param, wanted in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(param, dtype=torch.float64), wanted.detach())
        assert norm == pytest.approx(0.1, rel=1e-5)
        assert num_zeros == zeros


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_complex_gradients(dtype, norm_type):
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((4, 3), (5,), ())]
    for number, param in enumerate(params):
        param.grad = torch.randn(param.shape, dtype=dtype, generator=torch.Generator().manual_seed(number))
    params[0].grad[0] = 0
    whole = torch.cat([param.grad.flatten() for param in params])
    found = global_grad_norm(params, norm_type)
    assert found.dtype == whole.abs().dtype
    assert found.item() == pytest.approx(torch.linalg.vector_norm(whole, norm_type).item(), rel=1e-6)
    assert count_zero_grads(params) == 3
    scale_grads(params, 0.5)
    assert torch.equal(torch.cat([param.grad.flatten() for param in params]), whole / 2)
