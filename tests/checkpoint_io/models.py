"""Small models, trained for a step or two, that the tests save and load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

SMALL = 0.0005  # MB per shard: a few hundred bytes, so that there are many
FORMATS: dict[str, dict[str, Any]] = {
    "file": {},
    "safetensors file": {"use_safetensors": True},
    "shards": {"shard": True, "size_per_shard": SMALL},
    "safetensors shards": {"shard": True, "size_per_shard": SMALL, "use_safetensors": True},
}
every_format = pytest.mark.parametrize("options", FORMATS.values(), ids=list(FORMATS))


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's, buffers, odd sizes that two ranks cut unevenly."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, 5)
        self.norm = nn.BatchNorm1d(5)
        self.back = nn.Linear(5, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.norm(self.hidden(self.embed(tokens))).relu()))


class Counting(nn.Module):
    """A module with extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.calls: dict[str, object] = {"count": 0, "sizes": (1, 2)}

    def get_extra_state(self) -> dict[str, object]:
        return self.calls

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.calls = state


@contextmanager
def group() -> Iterator[None]:
    """Make a process group, and nothing else, for a block."""
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def tied(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tied:
    torch.manual_seed(seed)
    return Tied().to(dtype)


def batch(step: int, rank: int = 0, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(11, (size,), generator=generator)


def train(model: nn.Module, optimizer: Optimizer, *, steps: range) -> list[float]:
    """Take steps on batches that are the same on every rank; return the losses."""
    losses = []
    for step in steps:
        tokens = batch(step)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    """Compare two models bit for bit."""
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[name].dtype
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name]


def overwrite(checkpoint: Path) -> None:
    """Fill the files of a checkpoint with zeros, in place."""
    for path in checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]:
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    """Damage a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
