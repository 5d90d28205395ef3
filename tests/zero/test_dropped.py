"""A dropped model gives back its memory and its files, whatever it did last and whichever its door was."""

import gc
import itertools
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.amp import Casts
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import ArrivingParams, Bucketed, GeminiDDP, zero_model_wrapper, zero_optim_wrapper
from colossalai.zero import GeminiAdamOptimizer
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.settling import settled

pytestmark = pytest.mark.dist

WIDTH = 32
CHUNKS: dict[str, Any] = {"min_chunk_size_mb": 0.001, "search_range_mb": 0, "hidden_dim": WIDTH}
Held = list[Any]  # what the caller of a door has, and drops
Train = Callable[[], Held]


class Refuse(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return what comes."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Raise."""
        raise ZeroDivisionError


class Net(nn.Sequential):
    """Layers, of which the backward can fail in the middle."""

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        """Return a loss."""
        for number, layer in enumerate(self):
            x = Refuse.apply(x) if fails and number == 4 else x
            x = layer(x)
        return x.float().square().mean()


def build() -> Net:
    return Net(*itertools.chain(*((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))))


def x() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def train(
    model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], object], num_steps: int = 2
) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        backward(model(x()))
        optimizer.step()


def boosted(plugin: Plugin, num_steps: int, end: str = "step") -> Held:
    """Train, and then do something else as the last."""
    booster = Booster(plugin=plugin)
    raw = build()
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters()))

    def backward(loss: torch.Tensor) -> None:
        booster.backward(loss, optimizer)

    train(model, optimizer, backward, num_steps)
    if end == "evaluation":
        with torch.no_grad():
            model(x())
    elif end == "forward":
        model(x())
    elif end == "backward":
        backward(model(x()))
    elif end == "error":
        with pytest.raises(ZeroDivisionError):
            backward(model(x(), fails=True))
    if end in ("backward", "error") and dist.get_world_size() > 1:
        optimizer.zero_grad()  # the watch of messages looks every 5 s for those that nobody has waited for
    return [raw, model, optimizer, booster]


def in_buckets() -> Held:
    """Train with the method of pipelines."""
    raw = build()
    arriving = ArrivingParams(raw, Casts(), torch.device("cpu"))
    applied = Bucketed().apply(raw, blocks=[], replicas=gpc.mesh.axis("dp"), arriving=arriving)
    optimizer = torch.optim.AdamW(raw.parameters())

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        applied.finish()

    train(applied.module, optimizer, backward)
    return [raw, applied, optimizer]


def in_engine(config: dict[str, Any]) -> Held:
    raw = build()
    gpc.load_config(config)
    engine, *_ = colossalai.initialize(raw, torch.optim.AdamW(raw.parameters()), nn.Identity())
    train(engine, engine, engine.backward)
    return [raw, engine, engine.model, engine.optimizer]


def by_wrappers(stage: int) -> Held:
    raw = build()
    gemini = {"gemini_config": {"precision": "bf16", **CHUNKS}} if stage == 3 else {}
    model = zero_model_wrapper(raw, zero_stage=stage, **gemini)
    optimizer = zero_optim_wrapper(model, torch.optim.AdamW(raw.parameters()))
    train(model, optimizer, optimizer.backward)
    return [raw, model, optimizer]


def by_gemini_ddp() -> Held:
    raw = build()
    model = GeminiDDP(raw, device="cpu", precision="fp32", **CHUNKS)
    optimizer = GeminiAdamOptimizer(model, lr=1e-3)
    train(model, optimizer, optimizer.backward)
    return [raw, model, optimizer]


def cases(folder: str) -> dict[str, Train]:
    """Return what is done with each model."""
    disk = {"placement_policy": "nvme", "memory_budget": 40_000, "offload_dir": folder}
    found: dict[str, Train] = {
        "DDP": lambda: boosted(TorchDDPPlugin(), 2),
        "Bucketed": in_buckets,
        "ZeRO 1": lambda: boosted(LowLevelZeroPlugin(1, precision="bf16"), 2),
        "ZeRO 2": lambda: boosted(LowLevelZeroPlugin(2, precision="fp16", initial_scale=1), 2),
        "ZeRO 2, fp32": lambda: boosted(LowLevelZeroPlugin(2, precision="fp32"), 2, "error"),
        "Engine, ZeRO 2": lambda: in_engine({"zero": {"stage": 2}}),
        "Engine, Gemini": lambda: in_engine({"gemini": {"precision": "fp32", **CHUNKS}}),
        "wrappers, ZeRO 2": lambda: by_wrappers(2),
        "wrappers, Gemini": lambda: by_wrappers(3),
        "GeminiDDP": by_gemini_ddp,
        "whole modules": lambda: boosted(
            GeminiPlugin(precision="fp32", whole_modules=["2", "4"], **CHUNKS), 2, "error"
        ),
    }
    for end, (kind, options, num_steps) in itertools.product(
        ("step", "evaluation", "forward", "backward", "error"),
        (("in memory", {}, 1), ("on disk, recorded", disk, 0), ("on disk, planned", disk, 2)),
    ):
        plugin = GeminiPlugin(precision="bf16", **CHUNKS, **options)
        found[f"Gemini {kind}, {end}"] = partial(boosted, plugin, num_steps, end)
    return found


def float_tensors() -> dict[int, str]:
    """Describe all float tensors of the process by their address."""
    return {
        id(thing): f"{type(thing).__name__}{tuple(thing.shape)}"
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.is_floating_point()
    }


def files_in(folder: str) -> list[str]:
    """Return what of the files in a folder is open or mapped."""
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [place for place in (*opened, *mapped) if folder in place]


def what_is_left(make: Train, folder: str) -> list[str]:
    """Train, drop everything, and return what there is still."""
    before = float_tensors()
    held = make()
    seen = [(type(thing).__name__, weakref.ref(thing)) for thing in held]
    seen += [("storage", weakref.ref(param.untyped_storage())) for param in held[0].parameters()]
    del held

    def look() -> list[str]:
        left = [name for name, ref in seen if ref() is not None] + files_in(folder)
        left += [name for address, name in float_tensors().items() if address not in before]
        return left + ["mode"] * torch.utils._python_dispatch._len_torch_dispatch_stack()

    return settled(look, lambda left: not left)


def drop_all(folder: str) -> dict[str, list[str]]:
    colossalai.launch_from_torch({}, verbose=False)
    found = {name: what_is_left(make, folder) for name, make in cases(folder).items()}
    gpc.destroy()
    return found


@pytest.mark.parametrize("num_ranks", [further(1), 2])
def test_a_dropped_model_leaves_nothing(num_ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(drop_all, num_ranks, str(tmp_path)):
        assert {name: left for name, left in found.items() if left} == {}
