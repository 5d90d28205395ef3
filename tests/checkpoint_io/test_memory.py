"""Saving and loading take a few blocks of memory beside what the ranks hold anyway, however it is cut."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import colossalai
from colossalai.checkpoint_io import (
    TrainingState,
    load_training_state,
    resume_training_state,
    save_training_state,
)
from colossalai.core import global_context as gpc
from colossalai.tensor import ShardingSpec, set_spec
from tests.harness.allocations import RankAllocations
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS, COLUMNS = 5000, 5000  # of float32: 100 MB, two of them
MOST_MB = 20  # two blocks of 8 MB, and a fifth of what a rank has of the model


def value_of(number: int) -> torch.Tensor:
    """A matrix, the same wherever it is made."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS).add_(number)


def under_fsdp(is_filled: bool) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(2)))
    for number, layer in enumerate(model):
        layer.weight.data = value_of(number) if is_filled else torch.zeros(ROWS, COLUMNS)
        fully_shard(layer)
    fully_shard(model)
    return model


def in_slices(dim: int, stored_as: tuple[int, int] | None, is_filled: bool) -> nn.Module:
    """Slices along a dimension of what is stored, which may be the other way round."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)))
    shape = (ROWS, COLUMNS) if stored_as is None else (COLUMNS, ROWS)
    cut = tuple(("tp",) if axis == dim else () for axis in range(2))
    for number, layer in enumerate(model):
        spec = ShardingSpec(shape, cut, gpc.mesh, stored_as)
        whole = value_of(number) if is_filled else torch.zeros(ROWS, COLUMNS)
        layer.weight = nn.Parameter(spec.slice_of(whole))
        set_spec(layer.weight, spec)
    return model


LAYOUTS: dict[str, Callable[[bool], nn.Module]] = {
    "fsdp": under_fsdp,
    "columns": lambda is_filled: in_slices(1, None, is_filled),
    "turned": lambda is_filled: in_slices(0, (1, 0), is_filled),
}
FROM = {"fsdp": "columns", "columns": "turned", "turned": "fsdp"}


def mesh_config(name: str) -> dict[str, object]:
    return {} if name == "fsdp" else {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


def save(name: str, folder: Path, buffer_size: float = 512) -> float:
    colossalai.launch_from_torch(mesh_config(name), verbose=False)
    model = LAYOUTS[name](True)
    with RankAllocations(model.parameters()) as peak:
        save_training_state(folder / name, TrainingState(model=model), step=1, buffer_size=buffer_size)
    gpc.destroy()
    return peak.mb


def load(name: str, folder: Path, buffer_size: float = 512) -> float:
    colossalai.launch_from_torch(mesh_config(name), verbose=False)
    model = LAYOUTS[name](False)
    with RankAllocations(model.parameters()) as peak:
        path = folder / FROM[name] / "step-00000001"
        load_training_state(path, TrainingState(model=model), buffer_size=buffer_size)
    expected = LAYOUTS[name](True)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        mine, theirs = (getattr(param, "_local_tensor", param) for param in (mine, theirs))
        assert torch.equal(mine, theirs)
    gpc.destroy()
    return peak.mb


@pytest.mark.long  # of single files it is in test_whole_writer, and of what is read in test_bytes_read
@pytest.mark.parametrize("name", ["columns", "fsdp", "turned"])
def test_extra_memory_of_saving_and_loading(name: str, tmp_path: Path) -> None:
    saving = run_ranks(save, 2, FROM[name], tmp_path)
    loading = run_ranks(load, 2, name, tmp_path)
    print(f"\nextra MB in saving {FROM[name]} {saving}\nand in loading {name} {loading}")
    assert max(*saving, *loading) < MOST_MB


def turned(buffer_size: float, folder: Path) -> tuple[float, float]:
    """Save and load a weight whose rows lie in no order of a file: it goes through blocks both ways."""
    weight = torch.nn.Parameter(value_of(0).t())
    model = nn.ParameterDict({"weight": weight})
    with RankAllocations([weight]) as saving:
        save_training_state(folder, TrainingState(model=model), step=1, buffer_size=buffer_size)
    weight.data.zero_()
    with RankAllocations([weight]) as loading:
        load_training_state(folder / "step-00000001", TrainingState(model=model), buffer_size=buffer_size)
    assert torch.equal(weight, value_of(0).t())
    return saving.mb, loading.mb


@pytest.mark.long  # the next test and test_whole_writer see what the buffer is for
def test_a_smaller_buffer_takes_less_memory(tmp_path: Path) -> None:
    peaks = {size: run_ranks(turned, 1, size, tmp_path / str(size))[0] for size in (512.0, 1.0)}
    print(f"\nextra MB in saving and in loading, by buffer {peaks}")
    assert peaks[1.0][1] < peaks[512.0][1] - 4, peaks
    assert max(peaks[1.0]) < 1, peaks


def test_no_more_is_written_at_once_than_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of a weight that is not contiguous is a copy; below a buffer of 8 MB it counts."""
    sizes, write = [], os.write

    def note(descriptor: int, content: bytes) -> int:
        sizes.append(len(content))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", note)
    weight = nn.Parameter(torch.zeros(100, 600).t())
    state = TrainingState(model=nn.ParameterDict({"weight": weight}))
    save_training_state(tmp_path, state, step=1, buffer_size=0.1)
    assert sum(sizes) > weight.nbytes
    assert max(sizes) < 0.1 * 1024 * 1024 / 4, "some of them are needed at once"


def test_a_buffer_that_is_too_small_is_refused(tmp_path: Path) -> None:
    state = TrainingState(model=nn.Linear(2, 2))
    path = save_training_state(tmp_path, state, step=1)
    for call in (
        lambda: save_training_state(tmp_path, state, step=2, buffer_size=0.001),
        lambda: load_training_state(path, state, buffer_size=0.001),
        lambda: resume_training_state(tmp_path, state, buffer_size=0.001),
    ):
        with pytest.raises(ValueError, match=r"buffer_size=0.001 MB is too small"):
            call()
