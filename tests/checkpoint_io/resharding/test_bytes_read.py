"""A rank reads of a checkpoint what it needs, and not the rest of it.

What is counted is what the system counts: bytes that went through read calls, and the pages of mapped files
that this process has touched. A page comes with its neighbors, up to 2 MB of them, so what is cut is wide.
"""

import json
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import colossalai
from colossalai.checkpoint_io import TrainingState, load_model, load_training_state, save_training_state
from colossalai.checkpoint_io._model import ModelLoadPlan
from colossalai.core import global_context as gpc
from colossalai.nn.layer import next_linear, restart
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

WIDE = 1 << 21
MATRIX_MB = 2 * WIDE * 8 / 1024 / 1024
SHAPES = {"0.0.weight": (WIDE, 2), "0.1.weight": (2, WIDE)}
WHOLE_MB = len(SHAPES) * MATRIX_MB
EDGES_MB = 4 * 2  # of two half rows
OTHER_MB = 4  # modules that are imported meanwhile, the index; a matrix is far more


def read_mb(folder: Path) -> float:
    """Return what this process has read by calls, and what it has touched of the files that it maps."""
    num_bytes = int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) * 1024 * is_ours
        elif not line.split()[0].endswith(":"):  # the first line of a mapping: addresses, ..., file
            is_ours = f" {folder}/" in line
    return num_bytes / 1024 / 1024


@contextmanager
def counted(folder: Path) -> Iterator[list[float]]:
    """Count from here to the end of the last copy: then the files are let go."""
    found: list[float] = []
    apply = ModelLoadPlan.apply

    def note(self: ModelLoadPlan) -> None:
        apply(self)
        found.append(read_mb(folder) - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelLoadPlan, "apply", note)
        before = read_mb(folder)
        yield found


def value_of(number: int) -> torch.Tensor:
    """A matrix, the same wherever it is made."""
    return torch.arange(2 * WIDE, dtype=torch.float64).view(list(SHAPES.values())[number]) + number


def two_layers() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, WIDE, bias=False), nn.Linear(WIDE, 2, bias=False))
    return nn.Sequential(layers).double()  # in another one: along it a pipeline cuts


def in_tensor_parallel() -> nn.Module:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    restart("1d")
    layers = [next_linear(inputs, outputs, False, mode="1d") for outputs, inputs in SHAPES.values()]
    return nn.Sequential(nn.Sequential(*layers)).double()


def in_a_pipeline() -> nn.Module:
    config = {"parallel": {"pipeline": {"size": 2, "partition": "uniform"}}, "NUM_MICRO_BATCHES": 1}
    colossalai.launch_from_torch(config, verbose=False)
    whole = two_layers()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(whole, optimizer, nn.MSELoss(), verbose=False)
    return engine.model.unwrap()


PLANS: dict[str, Callable[[], nn.Module]] = {"tp2": in_tensor_parallel, "pp2": in_a_pipeline}


def load(plan: str, folder: Path) -> float:
    model = PLANS[plan]()
    with counted(folder) as found:
        load_model(model, folder)
    rank = gpc.get_global_rank()
    wholes = [value_of(number) for number in range(2)]
    expected = (
        [wholes[rank]] if plan == "pp2" else [whole.chunk(2, n)[rank] for n, whole in enumerate(wholes)]
    )
    for param, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param, value)
    gpc.destroy()
    return found[0]


@pytest.mark.long  # so with a training state below
@pytest.mark.parametrize("plan", ["tp2", "pp2"])
def test_of_a_folder_of_hugging_face_a_rank_reads_its_slices(plan: str, tmp_path: Path) -> None:
    """Such a folder has no checksums, for which all of it would be read once."""
    weight_map = {}
    for number, name in enumerate(SHAPES):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: value_of(number)}, tmp_path / file)
        weight_map[name] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for found in run_ranks(load, 2, plan, tmp_path):
        assert 0 <= found - WHOLE_MB / 2 < EDGES_MB + OTHER_MB, found


class CountedMap(mmap.mmap):
    """A mapping of which all is looked at, and which is gone before the end."""

    num_bytes = 0

    def __new__(cls, descriptor: int, length: int, **options: Any) -> "CountedMap":
        CountedMap.num_bytes += length
        return super().__new__(cls, descriptor, length, **options)


def under_fsdp(is_filled: bool) -> TrainingState:
    model = two_layers().float()
    for number, param in enumerate(model.parameters()):
        param.data = value_of(number).float() if is_filled else torch.zeros_like(param)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = param.detach() * (2.0 if is_filled else 1.0)
    return TrainingState(model=model, optimizer=optimizer)


def save_whole_and_load_in_halves(folder: Path) -> float:
    colossalai.launch_from_torch({}, verbose=False)
    path = save_training_state(folder, under_fsdp(is_filled=True), step=1)
    state, expected = under_fsdp(is_filled=False), under_fsdp(is_filled=True)
    before = read_mb(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", CountedMap)
        load_training_state(path, state)
    found = read_mb(folder) - before + CountedMap.num_bytes / 1024 / 1024
    for mine, theirs in zip(state.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        states = [
            each.optimizer.state[param]["momentum_buffer"].to_local()
            for each, param in ((state, mine), (expected, theirs))
        ]
        assert torch.equal(*states)
    gpc.destroy()
    return found


def test_of_a_training_state_a_rank_reads_its_slices_and_half_for_the_checksums(tmp_path: Path) -> None:
    """Weights and states of the optimizer alike."""
    expected = 2 * (WHOLE_MB / 2)  # in float32, with one state of the optimizer: slices, and checksums
    for found in run_ranks(save_whole_and_load_in_halves, 2, tmp_path):
        assert 0 <= found - expected < OTHER_MB, found
