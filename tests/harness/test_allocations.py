"""Counts of allocations: the same in each run, with what kernels take for a moment."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness.allocations import Allocations, RankAllocations
from tests.ranks import run_ranks

KIB = 1024
MB = 1024 * 1024
TENSOR = MB
OTHER = 512 * KIB  # modules and counters of the first call


@pytest.mark.unit
def test_the_peak_and_the_rest_of_tensors() -> None:
    before = torch.ones(TENSOR // 4)
    with Allocations() as counted:
        first = torch.ones(TENSOR // 4)
        second = first + before
        del first
        third = second[: TENSOR // 8].clone()
        third.zero_()
    assert counted.tensors == 2 * TENSOR
    assert counted.left == TENSOR + TENSOR // 2
    assert [size for size in counted.sizes if size > KIB] == [TENSOR, TENSOR, TENSOR // 2]
    assert counted.objects < OTHER


@pytest.mark.unit
def test_memory_of_before_makes_no_room() -> None:
    before = [torch.ones(TENSOR // 4)]
    with Allocations():
        before.append(torch.ones(TENSOR // 4))
    with Allocations() as counted:
        before.clear()
        after = torch.ones(TENSOR // 4)
    assert counted.tensors == counted.left == after.nbytes


@pytest.mark.unit
def test_temporary_memory_of_a_kernel_and_of_a_backward_counts() -> None:
    layer, x = nn.Linear(512, 512, bias=False), torch.randn(512, 512)
    with Allocations() as counted:
        layer(x).sum().backward()
    assert counted.tensors >= 2 * layer.weight.nbytes
    with Allocations() as counted:
        torch.randn(512, 1024).t().sort(dim=0)
    assert counted.tensors > 512 * 1024 * (4 + 4 + 8)


@pytest.mark.unit
def test_storages_without_a_tensor_count() -> None:
    with Allocations() as counted:
        storage = torch.UntypedStorage(TENSOR)
        storage.resize_(0)
    assert counted.tensors == TENSOR
    assert counted.left == 0


@pytest.mark.unit
def test_objects_and_arrays_count() -> None:
    with Allocations() as counted:
        content = bytes(TENSOR)
        del content
        np.ones(2 * TENSOR, dtype=np.uint8).sum()
    assert 2 * TENSOR <= counted.objects < 2 * TENSOR + OTHER
    assert counted.tensors < KIB
    assert counted.peak == counted.tensors + counted.objects


@pytest.mark.unit
def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    torch.save(torch.ones(TENSOR // 4), tmp_path / "x.pt")
    with Allocations() as counted:
        torch.from_file(str(tmp_path / "x"), shared=True, size=TENSOR // 4).fill_(1)
        torch.load(tmp_path / "x.pt", mmap=True).sum()
    assert counted.peak < OTHER
    with Allocations() as counted:
        torch.load(tmp_path / "x.pt")
    assert TENSOR <= counted.tensors <= counted.peak < TENSOR + OTHER


# Counting on a rank leaves tracemalloc on, so it is for processes that end with their test.
@pytest.mark.dist
def test_copies_and_objects_of_a_rank_count() -> None:
    run_ranks(count_copies, 1)


def count_copies() -> None:
    before = torch.ones(MB)
    with RankAllocations([before]) as counted:
        before.add_(1).view(-1)
        for _ in range(3):
            before[: MB // 2].clone()
        content = bytes(MB)
        del content
    assert counted.tensors == 2 * MB
    assert MB <= counted.objects < 1.5 * MB
    assert 3 <= counted.mb < 3.5


@pytest.mark.dist
def test_mapped_files_and_meta_tensors_of_a_rank_do_not_count(tmp_path: Path) -> None:
    run_ranks(count_mapped, 1, tmp_path)


def count_mapped(folder: Path) -> None:
    torch.save(torch.ones(MB), folder / "x.pt")
    with RankAllocations() as counted:
        torch.load(folder / "x.pt", mmap=True).view(-1)
        torch.empty(MB, device="meta")
    assert counted.mb < 0.5
    with RankAllocations() as counted:
        torch.load(folder / "x.pt")
    assert 4 <= counted.mb < 4.5
