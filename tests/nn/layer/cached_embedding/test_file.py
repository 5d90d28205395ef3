"""Tables in files: bits of torch, state dicts, memory, and what is refused."""

import copy
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD, SparseAdam

from colossalai.nn.layer.cached_embedding import (
    CachedEmbedding,
    CachedEmbeddingBag,
)
from tests.nn.layer.cached_embedding.tables import (
    DIM,
    NUM_ROWS,
    OPTIMIZERS,
    batches,
    check_equal,
    make_pair,
    train,
    weights_of,
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_table_in_a_file_has_the_bits_of_torch(kind: str, tmp_path: Path) -> None:
    reference, bag = make_pair(padding_idx=3, weight_path=tmp_path / "below" / "table")
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (reference, bag)]
    for bag_and_optimizer in zip((reference, bag), optimizers, strict=True):
        train(*bag_and_optimizer, batches(40))
    assert sum(bag.num_write_back_history) > 100  # else the file had no part in it
    check_equal(reference, bag, *optimizers)
    assert torch.equal(weights_of(tmp_path / "below" / "table"), reference.weight)


@pytest.mark.parametrize("shape", [(2**18 + 5, 64), (2**22 + 3, 1), (3, 5), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initial_values_are_those_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted, next_values = nn.EmbeddingBag(*shape, dtype=dtype), torch.rand(3)
    torch.manual_seed(0)
    bag = CachedEmbeddingBag(*shape, dtype=dtype, weight_path=tmp_path / "table")
    assert torch.equal(bag.weight, wanted.weight)
    assert torch.equal(torch.rand(3), next_values)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_dicts_load_into_torch_and_under_any_ratio_and_place(kind: str, tmp_path: Path) -> None:
    reference, bag = make_pair(weight_path=tmp_path / "first")
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (reference, bag)]
    for bag_and_optimizer in zip((reference, bag), optimizers, strict=True):
        train(*bag_and_optimizer, batches(10))
    saved = tmp_path / "saved"
    torch.save({"model": bag.state_dict(), "optimizer": optimizers[1].state_dict()}, saved)
    assert saved.stat().st_size < 3.5 * NUM_ROWS * DIM * 4 + 20_000  # tables, and not their files
    others = [
        nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True),
        make_pair(0.1, weight_path=tmp_path / "second")[1],
        make_pair(1.0, weight_path=tmp_path / "third")[1],
        make_pair(0.3)[1],
    ]
    train(reference, optimizers[0], batches(10, seed=1))
    for other in others:
        optimizer = OPTIMIZERS[kind](other.parameters())
        loaded = torch.load(saved, mmap=True)  # torch's optimizers change it
        other.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(other, optimizer, batches(10, seed=1))
        check_equal(reference, other, optimizers[0], optimizer)


def test_states_are_in_files_that_end_with_their_optimizer(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    optimizer = SparseAdam(bag.parameters())
    train(bag, optimizer, batches(3))
    assert _num_deleted_files(tmp_path) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["table"]
    del optimizer
    train(bag, SGD(bag.parameters(), lr=0.1), batches(3))
    assert _num_deleted_files(tmp_path) == 0


def _num_deleted_files(folder: Path) -> int:
    """Return the number of files without a name that this process has open in a folder."""
    targets = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    return sum(each.startswith(f"{folder}/") and each.endswith("(deleted)") for each in targets)


def test_a_failed_constructor_leaves_no_file_and_no_lock(tmp_path: Path) -> None:
    for wrong in ({"ids_freq_mapping": [1, 2]}, {"warmup_ratio": 2}, {"buffer_size": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CachedEmbedding(8, 4, cache_ratio=0.5, weight_path=tmp_path / "table", **wrong)
        assert not [*tmp_path.iterdir()]
    CachedEmbedding(8, 4, weight_path=tmp_path / "table")
    with pytest.raises(ValueError, match="ids_freq_mapping") as kept:
        CachedEmbedding(8, 4, weight_path=tmp_path / "table", ids_freq_mapping=[1, 2])
    CachedEmbedding(8, 4, weight_path=tmp_path / "table")
    del kept


def test_rows_without_width() -> None:
    bag = CachedEmbeddingBag(50, 0, sparse=True, mode="sum", cache_ratio=0.5)
    assert bag(torch.tensor([[1, 2]])).shape == (1, 0)
    bag.load_state_dict(bag.state_dict())


def test_a_module_of_inference_mode_is_trained(tmp_path: Path) -> None:
    with torch.inference_mode():
        bag = make_pair(weight_path=tmp_path / "table")[1]
        bag(torch.tensor([[1]]))
    train(bag, SGD(bag.parameters(), lr=0.1), batches(2))


def test_refusals_of_files(tmp_path: Path) -> None:
    path = tmp_path / "table"

    def make(num_rows: int = 8, **options: Any) -> CachedEmbedding:
        return CachedEmbedding(num_rows, 4, cache_ratio=0.5, weight_path=path, **options)

    first = make()
    with pytest.raises(RuntimeError, match="table is used by another table"):
        make()
    with pytest.raises(RuntimeError, match="which a copy cannot share"):
        copy.deepcopy(first)
    with pytest.raises(RuntimeError, match=r"file of type torch.float32, which is not cast to torch.float64"):
        first.double()
    assert first.cache_weight_mgr.param.dtype == torch.float32
    first.float().to("cpu")
    del first
    with pytest.raises(ValueError, match="has a table of 8 x 4 of type F32, and this one is 9 x 4"):
        make(9)
    with pytest.raises(ValueError, match="this one is 8 x 4 of type BF16"):
        make(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="from_pretrained or _weight give values"):
        make(_weight=torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"cannot be of type torch.int64"):
        CachedEmbedding.from_pretrained(torch.zeros(8, 4).long(), weight_path=tmp_path / "other")
    for shape in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="it has no rows"):
            CachedEmbedding(*shape, weight_path=tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a device or a pipe"):
        CachedEmbedding(8, 4, weight_path=tmp_path / "pipe")
    assert make(np.int64(8)).num_embeddings == 8  # type: ignore[arg-type]
    with safe_open(path, "pt") as file:
        save_file({"weight": file.get_tensor("weight")}, tmp_path / "copy", file.metadata())
    with pytest.raises(ValueError, match="not a table that was made with weight_path"):
        CachedEmbedding(8, 4, weight_path=tmp_path / "copy")
    torch.save({}, path)
    with pytest.raises(ValueError, match="not a table that was made with weight_path"):
        make()
    with pytest.raises(IsADirectoryError):
        CachedEmbedding(8, 4, weight_path=tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    try:
        with pytest.raises(OSError, match=r"1052672 bytes needed, \d+ bytes free"):
            CachedEmbedding(4096, 64, weight_path=tmp_path / "table")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    os.truncate(tmp_path / "table", 5000)
    for use in (lambda: bag(torch.arange(70, 90)[None]), lambda: bag.weight):
        with pytest.raises(OSError, match="the file ends after 5000 bytes"):
            use()


def test_given_values_are_copied_into_a_file(tmp_path: Path) -> None:
    values = torch.randn(NUM_ROWS, DIM, dtype=torch.float64)
    bag = CachedEmbeddingBag.from_pretrained(
        values, freeze=False, weight_path=tmp_path / "table", cache_ratio=0.1
    )
    before = values.clone()
    train(bag, SGD(bag.parameters(), lr=0.1), batches(5))
    assert torch.equal(values, before)
    assert not torch.equal(bag.weight, before)
    bag.load_state_dict({"weight": before.float()}, assign=True)
    before = before.float().double()
    assert torch.equal(weights_of(tmp_path / "table"), before)
    nn.init.zeros_(bag.weight)
    assert not bag(torch.tensor([[1, 2]])).any()


LIMITED = """
import mmap, resource, sys
import torch
from torch.optim import Adagrad
from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag

path, checkpoint = sys.argv[1] or None, sys.argv[2]
torch.set_num_threads(1)
NUM_ROWS, DIM, LIMIT = 1_000_000, 64, 64_000_000
small = CachedEmbeddingBag(100, DIM, mode="sum", sparse=True)  # what libraries take at their first use
small(torch.tensor([[1]])).sum().backward()
Adagrad(small.parameters()).step()
taken = 1024 * int(next(each for each in open("/proc/self/status") if each.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT, -1))  # memory that the system cannot take back
bag = CachedEmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True, cache_ratio=0.02, weight_path=path)
optimizer = Adagrad(bag.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    bag(torch.randint(NUM_ROWS, (1024, 4))).square().sum().backward()
    optimizer.step()
torch.save([bag.state_dict(), optimizer.state_dict()], checkpoint)
torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)  # a private mapping counts as taken
model, states = torch.load(checkpoint, mmap=True)
bag.load_state_dict(model)
optimizer.load_state_dict(states)
print("whole table: ", bag.weight.nbytes // LIMIT)
"""


@pytest.mark.long
def test_a_table_of_four_times_the_memory(tmp_path: Path) -> None:
    def run_limited(path: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LIMITED, path, str(tmp_path / "checkpoint")]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    done = run_limited(str(tmp_path / "table"))
    assert done.stdout == "whole table:  4\n", done.stderr
    assert "can't allocate memory" in run_limited("").stderr
