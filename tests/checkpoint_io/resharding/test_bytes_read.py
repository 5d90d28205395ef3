"""A rank reads only its parts of a checkpoint.

Counted are the bytes of read calls, of mappings that are read whole, and of the parts of mapped tensors that
operations read. The pages that the system loads for these are its own choice, up to 2 MB around an access.
"""

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import colossalai
from colossalai.checkpoint_io import TrainingState, load_model, load_training_state, save_training_state
from colossalai.core import global_context as gpc
from colossalai.nn.layer import next_linear, restart
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

WIDE = 1 << 21
MATRIX_MB = 2 * WIDE * 8 / 1024 / 1024
SHAPES = {"0.0.weight": (WIDE, 2), "0.1.weight": (2, WIDE)}
WHOLE_MB = len(SHAPES) * MATRIX_MB
OTHER_MB = 2  # modules that are imported meanwhile, the index; a matrix is far more


def read_by_calls_mb() -> float:
    """Return what this process has read by calls."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0]) / 1024 / 1024


class CopiedFromFiles(TorchDispatchMode):
    """Counts the bytes of tensors in mapped files of a folder that operations read; a view reads nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.num_bytes = 0
        self._folder = folder
        self._is_of_file: dict[StorageWeakRef, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count."""
        result = func(*args, **(kwargs or {}))
        if not any(map(self._is_mapped, tree_leaves(result))):
            self.num_bytes += sum(tensor.nbytes for tensor in tree_leaves(args) if self._is_mapped(tensor))
        return result

    def _is_mapped(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return False
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        if ref not in self._is_of_file:
            text = Path("/proc/self/maps").read_text()
            self.num_bytes -= len(text)  # this is a read call, too
            self._is_of_file[ref] = f" {self._folder}/" in _mapping_at(storage.data_ptr(), text)
        return self._is_of_file[ref]


def _mapping_at(address: int, text: str) -> str:
    """Return the line of the mapping with an address: addresses, ..., file."""
    for line in text.splitlines():
        begin, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return line
    return ""


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
    for _ in range(2):  # the first time modules are read, too, which are imported on first use
        for param in model.parameters():
            param.detach().zero_()
        before = read_by_calls_mb()
        with CopiedFromFiles(folder) as copied:
            load_model(model, folder)
        found = read_by_calls_mb() - before + copied.num_bytes / 1024 / 1024
    rank = gpc.get_global_rank()
    wholes = [value_of(number) for number in range(2)]
    expected = (
        [wholes[rank]] if plan == "pp2" else [whole.chunk(2, n)[rank] for n, whole in enumerate(wholes)]
    )
    for param, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param, value)
    gpc.destroy()
    return found


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
        assert 0 <= found - WHOLE_MB / 2 < OTHER_MB, found


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
    before = read_by_calls_mb()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", CountedMap)
        load_training_state(path, state)
    found = read_by_calls_mb() - before + CountedMap.num_bytes / 1024 / 1024
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
