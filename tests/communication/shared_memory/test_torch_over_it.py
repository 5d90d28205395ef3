"""What torch builds on process groups runs over shared memory, and gives what one process gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from colossalai.communication.shared_memory import transport_of
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def start() -> tuple[int, int]:
    dist.init_process_group("shared_memory")
    assert transport_of() == "shared memory"
    return dist.get_rank(), dist.get_world_size()


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch() -> torch.Tensor:
    return torch.arange(48, dtype=torch.float64).view(8, 6).sin()


def trained(net: nn.Module, x: torch.Tensor, optimizer: Any) -> list[torch.Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in net.parameters()]


def alone() -> list[torch.Tensor]:
    net = model()
    return trained(net, batch(), torch.optim.AdamW(net.parameters(), lr=0.1))


def close(found: list[Any], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole, theirs, rtol=1e-10, atol=1e-12)


def ddp(folder: Path) -> None:
    rank, size = start()
    net = DistributedDataParallel(model(), bucket_cap_mb=1e-4)
    close(trained(net, batch().chunk(size)[rank], torch.optim.AdamW(net.parameters(), lr=0.1)), alone())
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    close(trained(net, batch().chunk(size)[rank], optimizer), alone())
    end()


def sparse_gradients(folder: Path) -> None:
    rank, size = start()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 2)).double()
    net = DistributedDataParallel(copy.deepcopy(whole))
    words = torch.arange(8).mul(7) % 10
    found = trained(net, words.chunk(size)[rank], torch.optim.SGD(net.parameters(), lr=0.1))
    close(found, trained(whole, words, torch.optim.SGD(whole.parameters(), lr=0.1)))
    end()


def fsdp(folder: Path) -> None:
    rank, size = start()
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    close(trained(net, batch().chunk(size)[rank], optimizer), alone())
    state = {"model": net.state_dict()}
    pending = dcp.async_save(state, checkpoint_id=folder / "dcp")
    pending.result()
    kept = {name: param.full_tensor().clone() for name, param in net.state_dict().items()}
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    net.load_state_dict(state["model"])
    close([param.full_tensor() for param in net.state_dict().values()], list(kept.values()))
    end()


def tensors(folder: Path) -> None:
    _, size = start()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    close(trained(net, batch(), torch.optim.AdamW(net.parameters(), lr=0.1)), alone())
    whole = torch.arange(12.0).view(4, 3)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(cut.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal((cut + 1).redistribute(mesh, [Replicate()]).to_local(), whole + 1)
    total = functional.all_reduce(torch.ones(3), "sum", mesh.get_group())
    assert torch.equal(total + 0, torch.full((3,), float(size)))
    end()


def compiled(folder: Path) -> None:
    _, size = start()
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def add(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", group) + 1

    assert torch.equal(add(torch.ones(4)), torch.full((4,), 2.0 * size + 1))
    end()


def pipeline(folder: Path) -> None:
    rank, _ = start()
    whole = model()
    parts = [nn.Sequential(whole[0], whole[1]), nn.Sequential(whole[2])]
    stage = PipelineStage(copy.deepcopy(parts[rank]), rank, 2, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
    target = torch.zeros(8, 4, dtype=torch.float64)
    if rank == 0:
        schedule.step(batch())
    else:
        schedule.step(target=target, losses=losses)
    loss = whole(batch()).square().mean()
    loss.backward()
    found = [param.grad for param in stage.submod.parameters()]
    close(found, [param.grad for param in parts[rank].parameters()])
    end()


# The plugins of DDP and of FSDP, and pipelines, run over it wherever else they are tested.
@pytest.mark.parametrize("job", [tensors, *map(further, (ddp, fsdp, pipeline, sparse_gradients, compiled))])
def test_gives_what_one_process_gives(job: Callable[[Path], None], tmp_path: Path) -> None:
    run_ranks(job, 2, tmp_path)


def objects(_: Path) -> None:
    rank, size = start()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 100 * rank})
    assert [item["rank"] for item in gathered] == list(range(size))
    listed = [rank, "first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(listed, src=0)
    assert listed == [0, "first"]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    with dist._coalescing_manager():
        first, second = torch.full((3,), float(rank)), torch.full((2,), 1.0)
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert first.tolist() == [sum(range(size))] * 3
    assert second.tolist() == [size] * 2
    end()


def test_objects_and_several_calls_in_one(tmp_path: Path) -> None:
    run_ranks(objects, 3, tmp_path)
