"""A net with everything that makes it hard to see where parameters are used, and how chunks train it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.amp import Casts, Masters
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import ArrivingParams, DataMethod, Replicated
from colossalai.runtime import Plan
from colossalai.runtime._assemble import assemble_with_optimizers
from colossalai.zero import ZeroReplicas
from colossalai.zero.gemini import ChunkSizes, Gemini

CHECKPOINTING = ("once", "nested", "reentrant", "none")


class Block(nn.Module):
    """A part with a bare parameter beside its layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` and what the layers make of it."""
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Scaled(torch.autograd.Function):
    """Multiply by a parameter, which the function itself saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of both."""
        x, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * x).sum((0, 1))


class HardNet(nn.Module):
    """Tied, reused, frozen and unused weights, batch normalization, and some kind of checkpointing."""

    def __init__(self, checkpointing: str = "none", *, width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.BatchNorm1d(width)
        self.unused = nn.Linear(width, width)
        self.reused = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + 0.1 * self.reused(x) + 0.1 * self.frozen(Scaled.apply(x, self.scale))
            x = self._through(block, x)
        x = self.norm(x.flatten(0, 1))
        return F.cross_entropy(x @ self.embedding.weight.t(), labels.flatten())

    def _through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> Any:
            return checkpoint(block, y, use_reentrant=False) + 0.1 * self.reused(y)

        match self.checkpointing:
            case "none":
                return block(x)
            case "nested":
                return checkpoint(inner, x, use_reentrant=False)
            case kind:
                return checkpoint(block, x, use_reentrant=kind == "reentrant")


def twins(checkpointing: str, **options: Any) -> tuple[HardNet, HardNet]:
    """Return two nets of the same values, in float64."""
    torch.manual_seed(0)
    net = HardNet(checkpointing, **options).double()
    return net, copy.deepcopy(net)


def batch(num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of all ranks: (4 * num_ranks, 6)."""
    drawn = torch.randint(0, 32, (2, 4 * num_ranks, 6), generator=torch.Generator().manual_seed(7))
    return drawn[0], drawn[1]


def put(net: nn.Module, chunk_size: int, **options: Any) -> Any:
    """Put a net into chunks over all ranks of a launched job; return the applied method."""
    replicas = gpc.mesh.axis(gpc.mesh.batch_axes)
    method = Gemini(sizes=ChunkSizes(chunk_size, 0, 1), **options)
    method.check(net, [], blocks=[], replicas=replicas)
    arriving = ArrivingParams(net, Casts(), torch.device("cpu"))
    return method.apply(net, blocks=[], replicas=replicas, arriving=arriving)


def trained(net: nn.Module, applied: Any, make: Callable[..., torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return a function that makes a step of a net in chunks on some batches, and returns the last loss."""
    optimizer = make(net.parameters())
    shards = applied.optimizer_params(optimizer, Masters())

    def step(*batches: tuple[torch.Tensor, ...]) -> Any:
        for part in batches:
            for reducer in shards.reducers:
                reducer.before_backward()
            loss = net(*part) / len(batches)
            loss.backward()
        shards.take_grads()
        optimizer.step()
        shards.write_weights()
        shards.zero_grad(set_to_none=True)
        return loss * len(batches)

    return step


METHODS: dict[str, DataMethod] = {
    "plain": Replicated(),
    "zero2": ZeroReplicas(stage=2, bucket_cap_mb=0.001),
    "chunks": Gemini(sizes=ChunkSizes(150, 0, 1)),
    "small chunks": Gemini(sizes=ChunkSizes(37, 0, 1)),
    # Budgets of the ranks together.
    "chunks on disk": Gemini(sizes=ChunkSizes(150, 0, 1), placement_policy="nvme", memory_budget=100_000),
    "on disk": Gemini(sizes=ChunkSizes(60, 0, 1), placement_policy="nvme", memory_budget=80_000),
}


class Assembled:
    """A net with optimizers under a data method, in a job that is launched for it.

    Args:
        build: Makes the net.
        make_optimizers: Makes the optimizers of the net.
        method: One of `METHODS`.
        folder: Where chunks on disk are.
        seed: Seed of the net.
        plan: Fields of the plan; without a precision the net is in float64.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        make_optimizers: Callable[[Any], list[torch.optim.Optimizer]],
        method: str,
        *,
        folder: Path | str | None = None,
        seed: int = 0,
        **plan: Any,
    ) -> None:
        colossalai.launch_from_torch({}, verbose=False)
        torch.manual_seed(seed)
        self.raw: Any = build() if "precision" in plan else build().double()
        data: Any = METHODS[method]
        if isinstance(data, Gemini) and data.memory_budget is not None:
            budget = data.memory_budget // dist.get_world_size()
            data = replace(data, memory_budget=budget, offload_dir=folder)
        self.model, self.optimizers = assemble_with_optimizers(
            Plan(data=data, **plan),
            self.raw,
            make_optimizers(self.raw),
            mesh=gpc.mesh,
            device=torch.device("cpu"),
        )
        self.cache: Any = getattr(self.model.data, "cache", None)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the whole values, in memory of their own; collective."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of values."""
    assert found.keys() == expected.keys()
    return max(
        float((value.double() - expected[name].double()).abs().max())
        for name, value in found.items()
        if value.numel()
    )
