"""Tiers: memory of files, and chunks that lie on disk or below the device train as those in memory do."""

import ctypes
import errno
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.amp import FullPrecision, NaiveFP16, Precision, PureBF16
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.runtime import Plan, assemble
from colossalai.zero.gemini import ChunkSizes, Gemini
from colossalai.zero.gemini._tiers import TierMemory
from colossalai.zero.gemini.planning._policy import Home
from tests.parity.training import Task, train
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.gemini.nets import Block
from tests.zero.gemini.test_parity import BERT, GPT, GPT2, in_chunks

CPU = torch.device("cpu")
MIB = 2**20


def pages_of(address: int, num_bytes: int) -> int:
    """Return how many whole pages of some memory this process has, in memory or swapped out."""
    first, end = -(-address // mmap.PAGESIZE), (address + num_bytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (end - first)), np.uint64)
    return int((entries >> np.uint64(62) != 0).sum())


@pytest.mark.unit
def test_what_lies_on_disk_is_a_tensor_whose_memory_can_be_given_back(tmp_path: Path) -> None:
    tiers = TierMemory(CPU, offload_dir=tmp_path / "new")
    assert set(tiers.bounds) == {Home.COMPUTE, Home.DISK}
    values = torch.randn(8 * MIB // 4)
    kept = tiers.keep(values, Home.DISK)
    odd = tiers.keep(torch.arange(7), Home.DISK)
    assert not list((tmp_path / "new").iterdir())  # a file has no name, and cannot be left behind
    assert tiers.keep(kept, Home.DISK) is kept
    assert tiers.keep(kept[3:9], Home.DISK).data_ptr() == kept[3:9].data_ptr()
    assert torch.equal(kept, values)
    kept += 1
    assert pages_of(kept.data_ptr(), kept.nbytes) > 0
    tiers.give_back([kept, odd])
    assert pages_of(kept.data_ptr(), kept.nbytes) == 0
    tiers.expect([kept, values])
    assert torch.equal(kept, values + 1)
    assert odd.tolist() == list(range(7))
    back = tiers.keep(kept, Home.COMPUTE)
    assert back.data_ptr() != kept.data_ptr()
    assert torch.equal(back, kept)
    assert tiers.keep(back, Home.COMPUTE) is back
    empty = tiers.keep(torch.empty(0, 3), Home.DISK)
    assert empty.shape == (0, 3)
    large = [tiers.keep(torch.full((9 * MIB,), float(n)), Home.DISK) for n in range(4)]  # of several files
    assert [int(tensor[-1]) for tensor in large] == [0, 1, 2, 3]
    tiers.give_back(large)


@pytest.mark.unit
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_is_free_in_the_heap_is_given_back() -> None:
    """As after the build of a model without a budget: free blocks between others that are still used."""
    blocks = [(bytearray(100_000), bytearray(600)) for _ in range(600)]
    stay = [small for _, small in blocks]
    places = [ctypes.addressof(ctypes.c_char.from_buffer(large)) for large, _ in blocks]
    num_pages = sum(pages_of(place, 100_000) for place in places)
    del blocks
    tiers = TierMemory(CPU)
    assert num_pages >= 600 * 23
    tiers.give_back_freed()
    assert sum(pages_of(place, 100_000) for place in places) < num_pages / 10
    assert len(stay) == 600


@pytest.mark.unit
def test_a_disk_without_room_is_an_error_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TierMemory(CPU, offload_dir=tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"No space left .*67108864 bytes needed, \d+ free in"):
        tiers.keep(torch.ones(3), Home.DISK)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no file can be made there"):
        TierMemory(CPU, offload_dir=tmp_path / "file")


POLICIES: list[dict[str, Any]] = [
    {"placement_policy": "cpu"},
    {"placement_policy": "cuda"},
    {"placement_policy": "cuda", "memory_budget": 2**30},
    {"placement_policy": "const", "memory_budget": 40_000},  # and what an iteration needs at least
    {"placement_policy": "auto", "memory_budget": 25_000},
    {"placement_policy": "nvme", "memory_budget": 10_000},
]


def of_policies(task: Task, folder: str, accumulation: int, least: int) -> list[Any]:
    """Train with each policy as one process does; return losses, homes and gathers of each."""
    found = []
    for policy in POLICIES:
        options = {**policy, "min_chunk_size_mb": 0.0005, "recompute": True}
        if "memory_budget" in policy:
            options["offload_dir"] = folder
            options["memory_budget"] += least
        models: list[Any] = []
        run = in_chunks(task, 0, accumulation, 0.1, **options)
        losses = train(replace(run, check=models.append))
        cache = models[0].data.cache
        found.append(
            (
                losses,
                [chunk.home.name for chunk in cache.chunks],
                [chunk.states_home.name for chunk in cache.chunks],
                cache.tracer is not None and cache.tracer.is_followed,
                cache.num_gathers,
            )
        )
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("task", "num_ranks", "accumulation", "least"),
    [further(GPT2, 1, 2, 235_000), (GPT, 2, 2, 100_000), further(BERT, 4, 1, 75_000)],
    ids=["gpt2", "gpt", "bert"],
)
def test_all_policies_train_as_one_process(
    task: Task, num_ranks: int, accumulation: int, least: int, tmp_path: Path
) -> None:
    if task is not GPT:
        pytest.importorskip("transformers")
    for found in run_ranks(of_policies, num_ranks, task, str(tmp_path), accumulation, least):
        assert len({tuple(losses) for losses, *_ in found}) == 1  # bit for bit
        for policy, (_, _, states_homes, is_followed, _) in zip(POLICIES, found, strict=True):
            assert is_followed == ("memory_budget" in policy)
            lies_on_disk = policy["placement_policy"] in ("const", "auto", "nvme")
            assert ("DISK" in states_homes) == lies_on_disk
        num_gathers = [gathers for *_, gathers in found]
        assert (
            num_gathers[2] < num_gathers[3] <= num_gathers[5] or num_ranks == 1
        )  # nothing that fits is moved
        assert "DISK" in found[5][1]  # sections, too


class OnHost(Gemini):
    """Chunks of a device that has host memory below it; here both are the same memory."""

    def _tier_memory(self, device: torch.device | None) -> TierMemory:
        return TierMemory(CPU, offload_dir=self.offload_dir, has_host=True)


class Sometimes(nn.Module):
    """Blocks, of which some are left out in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        """Return the mean of the squares."""
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = block(x)
        return x.square().mean()


def changing(method: Gemini, precision: Any, num_steps: int) -> tuple[list[float], Any]:
    """Train while blocks are left out, with evaluations between; return losses and the applied method."""
    torch.manual_seed(0)
    net = Sometimes()
    plan = Plan(data=method, precision=precision, clip_grad_norm=0.1)
    made = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer = assemble(plan, net, made, mesh=gpc.mesh, device=CPU)
    assert optimizer is not None
    losses = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    for step in range(num_steps):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(x, 1 if step in (2, 4, 5) else 9)
            optimizer.backward(loss / 2)
        with torch.no_grad():
            losses += [loss.item(), model(x, 2).item()]
        optimizer.step()
    return losses, model.data


def leave_the_trace(precision: Precision, folder: str) -> tuple[list[list[float]], list[set[str]]]:
    """Return the losses in memory and on disk, and the homes of states."""
    colossalai.launch_from_torch({}, verbose=False)
    sizes = ChunkSizes(200, 0, 1)
    disk = {"placement_policy": "nvme", "memory_budget": 15_000, "offload_dir": folder}
    methods = [Gemini(sizes=sizes, **more) for more in ({}, disk)]
    methods += [
        OnHost(sizes=sizes, **more) for more in ({}, {**disk, "host_budget": 12_000 // dist.get_world_size()})
    ]
    runs = [changing(method, precision, 7) for method in methods]
    homes = [{chunk.states_home.name for chunk in data.cache.chunks} for _, data in runs]
    gpc.destroy()
    return [losses for losses, _ in runs], homes


@pytest.mark.dist
@pytest.mark.parametrize(
    "precision", [further(FullPrecision()), further(PureBF16()), NaiveFP16(initial_scale=2.0**30)]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_iteration_that_leaves_the_trace_trains_to_the_same_values(
    num_ranks: int, precision: Precision, tmp_path: Path
) -> None:
    for losses, homes in run_ranks(leave_the_trace, num_ranks, precision, str(tmp_path)):
        assert losses[1:] == losses[:1] * 3
        assert homes[0] == {"COMPUTE"}
        assert "DISK" in homes[1]
        assert homes[2] == {"HOST"}
        assert homes[3] >= {"HOST", "DISK"}


class Wide(nn.Module):
    """Blocks whose activations grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(16) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squares."""
        return self.blocks(x).square().mean()


def with_batches(
    sizes: list[int], **options: Any
) -> tuple[list[float], list[list[str]], list[int], list[str]]:
    """Train with batches that are larger on the last rank; return losses, homes, peaks and warnings."""
    torch.manual_seed(0)
    net = Wide()
    method = Gemini(sizes=ChunkSizes(600, 0, 1), **options)
    made = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer = assemble(Plan(data=method), net, made, mesh=gpc.mesh, device=CPU)
    cache = model.data.cache
    losses, homes, peaks = [], [], []
    with patch.object(get_dist_logger(), "warning") as log:
        for step, size in enumerate(sizes):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            is_last = dist.get_rank() == dist.get_world_size() - 1
            loss = model(torch.randn(size if is_last else 2, 16, generator=generator))
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            homes.append([home.name for chunk in cache.chunks for home in (chunk.home, chunk.states_home)])
            peaks.append(max(cache.tracer.trace.other_bytes) if cache.tracer else 0)
    return losses, homes, peaks, [call.args[0] for call in log.call_args_list]


BATCHES = [2, 2, 6, 6, 2, 4000, 4000]


def grow(folder: str) -> tuple[Any, Any]:
    colossalai.launch_from_torch({}, verbose=False)
    options = {"placement_policy": "auto", "memory_budget": 60_000, "offload_dir": folder}
    found = with_batches(BATCHES), with_batches(BATCHES, **options)
    gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [further(1), 2])
def test_a_larger_batch_is_planned_for_or_named(num_ranks: int, tmp_path: Path) -> None:
    """Only the last rank has larger batches; all ranks follow one plan."""
    found = run_ranks(grow, num_ranks, str(tmp_path))
    for (expected, *_), (losses, homes, _, warnings) in found:
        assert losses == expected
        in_memory = [row.count("COMPUTE") for row in homes]
        assert in_memory[0] == in_memory[1] > in_memory[2]
        assert all(row == homes[2] for row in homes[3:])
        assert len(warnings) == 1
        assert "a batch larger than those before took more than memory_budget" in warnings[0]
        assert "60000 bytes" in warnings[0]
    measured = found[-1][1][2]
    assert measured[0] == measured[1] < measured[2] == measured[4] < measured[5] == measured[6]
