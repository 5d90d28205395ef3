"""Bytes per rank are those of ZeRO stage 3, and beside them two chunks and two gradients at a time."""

import gc
import itertools
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.zero._placeholder import GradPlaceholder
from colossalai.zero.gemini._hooks import handle_of
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.settling import settled

pytestmark = pytest.mark.dist

WIDTH = 64
NUM_LAYERS = 8
CHUNK = WIDTH * (WIDTH + 1)  # elements: one layer
LEAST = CHUNK // 4  # elements of what is looked at
CASES = {
    2: (("fp32", torch.float64), ("fp16", torch.float32)),
    4: (("fp32", torch.float32), ("bf16", torch.float32)),
}
ACTIVATIONS = 3 * NUM_LAYERS * WIDTH / CHUNK  # saved, and under way
TOLERANCE = 0.01  # of what is held after a step


class Peak(TorchDispatchMode):
    """Notes the most bytes of all float tensors, looked at after functions that return some.

    Args:
        limit: The most bytes for an element of a chunk. Where more are seen, those that a thread of gloo is
            about to give back are waited for, once.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.bytes = 0
        self._limit = limit * CHUNK

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and look."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= LEAST:
            seen = float_bytes()
            if seen > self._limit:
                seen = settled(float_bytes, lambda num_bytes: num_bytes <= self._limit, collects=False)
            if seen > self._limit:
                self._limit = float("inf")  # no use in waiting again
            self.bytes = max(self.bytes, seen)
        return result


class Peaks(NamedTuple):
    """The most bytes at a time in the last microbatch, in the step, and the bytes after it."""

    forward: float
    backward: float
    step: float
    after: float


def float_bytes() -> int:
    """Return the bytes of the memory behind all float tensors that were made since `gc.freeze`."""
    found = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), GradPlaceholder):
            continue
        if thing.is_floating_point() and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def build(dtype: torch.dtype) -> nn.Sequential:
    layers = ((nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh()) for _ in range(NUM_LAYERS))
    return nn.Sequential(*itertools.chain(*layers))


def peaks(precision: str, dtype: torch.dtype) -> Peaks:
    """Train two steps of two microbatches; return the most of each part of the last one."""
    gc.collect()
    gc.freeze()
    plugin = GeminiPlugin(
        precision=precision,
        min_chunk_size_mb=CHUNK / 2**20,
        search_range_mb=0,
        hidden_dim=WIDTH,
        **({"initial_scale": 2.0} if precision == "fp16" else {}),
    )
    booster = Booster(plugin=plugin)
    model = build(dtype)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x = torch.ones(1, WIDTH, dtype=dtype)
    most = limits(precision, dtype, dist.get_world_size())
    forward, backward, step = Peak(most.forward), Peak(most.backward), Peak(most.step)
    for number in range(4):  # two microbatches, twice
        with forward if number == 3 else nullcontext():
            loss = model(x).float().square().mean()
        with backward if number == 3 else nullcontext():
            booster.backward(loss, optimizer)
        del loss
        if number % 2:
            with step if number == 3 else nullcontext():
                optimizer.step()
            if number == 1:
                optimizer.zero_grad()
    left = settled(float_bytes, lambda num_bytes: num_bytes <= (1 + TOLERANCE) * most.after * CHUNK)
    found = (forward.bytes, backward.bytes, step.bytes, left)
    return Peaks(*(num_bytes / CHUNK for num_bytes in found))


def all_peaks() -> list[Peaks]:
    colossalai.launch_from_torch({}, verbose=False)
    torch.optim.AdamW(nn.Linear(1, 1).parameters()).step()  # it imports a lot
    found = [peaks(precision, dtype) for precision, dtype in CASES[dist.get_world_size()]]
    gpc.destroy()
    return found


def bytes_per_element(precision: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the bytes of a parameter, of the mean of its gradients and of its states."""
    size = dtype.itemsize
    return (size, size, 2 * size) if precision == "fp32" else (2, 4, 12)


def limits(precision: str, dtype: torch.dtype, num_ranks: int) -> Peaks:
    """Return the most bytes of Adam for an element of a chunk; a whole chunk is one, a section a part."""
    param, mean = bytes_per_element(precision, dtype)[:2]
    held = NUM_LAYERS / num_ranks * sum(bytes_per_element(precision, dtype))
    section = max(mean, 4) / num_ranks  # in which a mean is added up
    received = 0 if precision == "fp32" else param * (num_ranks - 1) / num_ranks
    beside = received + section + ACTIVATIONS * dtype.itemsize
    return Peaks(
        forward=held + 2 * param + param + beside,
        backward=held + 2 * param + 2 * param + beside,
        step=held + 2 * param + 2 * param,
        after=held,
    )


@pytest.mark.parametrize("num_ranks", [2, further(4)])
def test_bytes_per_rank(num_ranks: int) -> None:
    for of_rank in run_ranks(all_peaks, num_ranks):
        for (precision, dtype), found in zip(CASES[num_ranks], of_rank, strict=True):
            most = limits(precision, dtype, num_ranks)
            assert found.after == pytest.approx(most.after, rel=TOLERANCE)
            assert most.after <= found.forward <= most.forward
            assert found.backward <= most.backward
            assert found.step <= most.step


class Recurrent(nn.Module):
    """Four layers, all weights of which one function takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=4)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.last(self.lstm(x)[0]).square().mean()


def recurrent(folder: str) -> tuple[int, int, int, str]:
    """Return the bytes of the function's chunks, of what was present at most, twice, and what is refused."""
    colossalai.launch_from_torch({}, verbose=False)
    sizes: dict[str, Any] = {"min_chunk_size_mb": 2112 / 2**20, "search_range_mb": 0, "hidden_dim": 16}
    disk = {"placement_policy": "nvme", "offload_dir": folder}
    found = []
    for budget in ({}, {**disk, "memory_budget": 2**20}, {**disk, "memory_budget": 64_000}):
        booster = Booster(plugin=GeminiPlugin(precision="fp32", **sizes, **budget))
        net = Recurrent()
        model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters()))
        cache = handle_of(net.last.weight).hooks.cache
        try:
            for _ in range(2):
                booster.backward(model(torch.ones(2, 2, 16)), optimizer)
                optimizer.step()
            found.append(cache.peak_bytes)
        except ValueError as error:
            message = str(error)
        taken = {handle_of(param).chunk for param in net.lstm.parameters()}
    gpc.destroy()
    assert len(found) == 2, message
    return sum(chunk.num_bytes for chunk in taken), found[0], found[1], message


def test_one_function_has_all_it_takes_or_is_refused_with_its_name(tmp_path: Path) -> None:
    for taken, freely, bounded, message in run_ranks(recurrent, 2, str(tmp_path)):
        assert freely == taken
        assert taken <= bounded <= 2**20
        assert re.search(rf"lstm takes lstm.* at once, whose chunks are {taken} bytes", message)
        assert "memory_budget leaves" in message
