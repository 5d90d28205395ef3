"""Time to save and load 500M float32 parameters: torch.save, safetensors, torch's DCP and ours, in one run.

    colossalai run --nproc_per_node 2 benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json

There are two layouts: every rank holds the whole model (data parallel), or half of each parameter (FSDP). A
save ends when everything is on disk (`fsync`, for all variants) and all ranks have finished; a load ends when
the parameters of all ranks have the values. torch.save and safetensors support whole tensors only: under
FSDP, tensors are gathered before a save and cut after a load, one by one. The rows of the asynchronous save
measure how long training is blocked; their baseline is a plain copy of the same bytes. Every save is the
second in a row of its kind. The first one evicts the page cache of the previous variant, which takes up to
1.5 s for 2 GB here.
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.rounds import report, time_rounds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import colossalai
from colossalai.checkpoint_io import (
    TrainingState,
    load_training_state,
    save_training_state,
    wait_for_saves,
)
from colossalai.checkpoint_io.storage._manifest import read_manifest, verify_files
from colossalai.core import global_context as gpc

HIDDEN = 2048
Action = Callable[[], None]


def make_model(num_parameters: int, *, is_sharded: bool) -> nn.Module:
    """Return pairs of linear layers as in a transformer's feed-forward block."""
    per_block = 8 * HIDDEN * HIDDEN
    blocks = [
        nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN))
        for _ in range(max(1, round(num_parameters / per_block)))
    ]
    model = nn.Sequential(*blocks)
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole parameter."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def to_disk(path: Path) -> None:
    """Flush a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Files:
    """One variant of the single-file formats: rank 0 writes, all ranks read.

    Args:
        model: The model.
        path: The file.
        write: Function that writes a state dict.
        read: Function that reads a state dict.
    """

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        write: Callable[[dict[str, torch.Tensor], Path], Any],
        read: Callable[[Path], dict[str, torch.Tensor]],
    ) -> None:
        self.model, self.path, self._write, self._read = model, path, write, read

    def save(self) -> None:
        """Gather, write, sync."""
        state = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        if dist.get_rank() == 0:
            self._write(state, self.path)
            to_disk(self.path)

    @torch.no_grad()
    def load(self) -> None:
        """Read the file and copy this rank's part."""
        state = self._read(self.path)
        for name, tensor in self.model.state_dict().items():
            value = state[name]
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(value)


def save_dcp(model: nn.Module, path: Path) -> None:
    """Save with torch's distributed checkpoint, which syncs its files."""
    writer = dcp.FileSystemWriter(path, thread_count=1, sync_files=True, overwrite=True)
    dcp.save(model.state_dict(), storage_writer=writer)


def load_dcp(model: nn.Module, path: Path) -> None:
    """Load in place."""
    dcp.load(model.state_dict(), storage_reader=dcp.FileSystemReader(path))


def save_ours(model: nn.Module, path: Path, steps: Iterator[int], *, save_async: bool = False) -> None:
    """Save a training state with the model, and remove the previous checkpoint."""
    state = TrainingState(model=model)
    save_training_state(path, state, step=next(steps), keep_last=1, save_async=save_async)


def load_ours(model: nn.Module, path: Path) -> None:
    """Load the only checkpoint."""
    load_training_state(next(path.glob("step-*")), TrainingState(model=model))


def sum_ours(path: Path) -> None:
    """Verify the checksums of this rank's share of the only checkpoint, as the first step of a load does."""
    folder = next(path.glob("step-*"))
    verify_files(folder, read_manifest(folder), part=dist.get_rank(), num_parts=dist.get_world_size())


class PlainCopy:
    """A copy of the bytes that this rank writes, into allocated memory.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in model.parameters()
        ]
        if not isinstance(next(model.parameters()), DTensor):
            tensors = tensors[dist.get_rank() :: dist.get_world_size()]
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copies = [torch.zeros_like(tensor) for tensor in self._tensors]

    def __call__(self) -> None:
        """Copy."""
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)


def until_all_are_done(action: Action) -> Action:
    """Return an action followed by a barrier."""

    def act() -> None:
        action()
        dist.barrier()

    return act


def rows_of(
    layout: str,
    what: str,
    variants: dict[str, Action],
    *,
    num_bytes: int,
    ours: str,
    rounds: int,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Return a row for each variant; the ratio is our time over theirs, the median over the rounds."""
    waited = {name: until_all_are_done(action) for name, action in variants.items()}
    times = time_rounds(waited, rounds=rounds, warmup=1, repeats=repeats)
    rows = []
    for name, seconds in times.items():
        ratios = [mine / theirs for mine, theirs in zip(times[ours], seconds, strict=True)]
        middle = statistics.median(seconds)
        rows.append(
            {
                "layout": layout,
                "what": what,
                "variant": name,
                "seconds": round(middle, 3),
                "mb_per_s": round(num_bytes / middle / 1e6),
                "ours_over_it": round(statistics.median(ratios), 4),
            }
        )
    return rows


def measure(layout: str, folder: Path, *, num_parameters: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one layout."""
    model = make_model(num_parameters, is_sharded=layout == "sharded")
    num_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    torch_file = Files(
        model, folder / "torch.pt", torch.save, lambda path: torch.load(path, weights_only=True)
    )
    safe_file = Files(
        model, folder / "model.safetensors", safetensors.torch.save_file, safetensors.torch.load_file
    )
    saves: dict[str, Action] = {
        "torch.save": torch_file.save,
        "safetensors": safe_file.save,
        "DCP": partial(save_dcp, model, folder / "dcp"),
        "ours": partial(save_ours, model, folder / "ours", itertools.count()),
    }
    loads: dict[str, Action] = {
        "torch.load": torch_file.load,
        "safetensors": safe_file.load,
        "DCP": partial(load_dcp, model, folder / "dcp"),
        "ours": partial(load_ours, model, folder / "ours"),
        "(checksums alone)": partial(sum_ours, folder / "ours"),
    }
    options: dict[str, Any] = {"num_bytes": num_bytes, "rounds": rounds}
    rows = rows_of(layout, "save", saves, ours="ours", repeats=2, **options)
    rows += rows_of(layout, "load", loads, ours="ours", **options)
    rows += stall_rows(layout, model, folder, **options)
    return rows


def stall_rows(
    layout: str, model: nn.Module, folder: Path, *, num_bytes: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure how long an asynchronous save blocks training."""
    copy = PlainCopy(model)
    variants: dict[str, Action] = {
        "plain copy": copy,
        "ours": partial(save_ours, model, folder / "async", itertools.count(), save_async=True),
        "(wait)": wait_for_saves,
    }
    # Not rotated: the save must have ended before the next round.
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name, action in variants.items():
            seconds = time_rounds({name: until_all_are_done(action)}, rounds=1, warmup=0)[name]
            times[name] += seconds if number >= 0 else []
    ratios = [mine / theirs for mine, theirs in zip(times["ours"], times["plain copy"], strict=True)]
    return [
        {
            "layout": layout,
            "what": "stall",
            "variant": name,
            "seconds": round(statistics.median(times[name]), 3),
            "mb_per_s": round(num_bytes / statistics.median(times[name]) / 1e6),
            "ours_over_it": ratio,
        }
        for name, ratio in (("plain copy", round(statistics.median(ratios), 4)), ("ours", 1.0))
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=500e6, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--layouts", default="replicated,sharded", help="(%(default)s)")
    parser.add_argument("--dir", help="a folder on the disk to measure")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    colossalai.launch_from_torch({}, verbose=False)
    box = [tempfile.mkdtemp(prefix="checkpoint_", dir=arguments.dir) if gpc.get_global_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    folder = Path(box[0])
    rows = []
    try:
        for layout in arguments.layouts.split(","):
            rows += measure(layout, folder, num_parameters=int(arguments.parameters), rounds=arguments.rounds)
    finally:
        dist.barrier()
        if gpc.get_global_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    settings = vars(arguments) | {"hidden": HIDDEN}
    report("Checkpoints of float32 parameters", rows, settings=settings, json_file=arguments.json)


if __name__ == "__main__":
    main()
