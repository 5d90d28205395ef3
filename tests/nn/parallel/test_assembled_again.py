"""A model that is assembled again trains as one that was not: nothing of the earlier assembly runs in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.communication import ledger
from colossalai.context import MOE_CONTEXT
from colossalai.core import global_context as gpc
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, TopKRouter
from colossalai.nn.parallel import Unsynchronized
from colossalai.nn.parallel._buckets import GradHook, hooks_of_grad
from colossalai.runtime import Plan, assemble
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from tests.tiers import further
from tests.turns import run_each

pytestmark = pytest.mark.dist

Optimizer = torch.optim.Optimizer
Door = Callable[[nn.Module, Optimizer], tuple[nn.Module, Any]]


def by_booster(plugin: Callable[..., Any], **options: Any) -> Door:
    def boost(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        return Booster(plugin=plugin(**options)).boost(model, optimizer)[:2]

    return boost


def by_wrapper(stage: int) -> Door:
    def wrap(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        model = zero_model_wrapper(model, stage)
        return model, zero_optim_wrapper(model, optimizer)

    return wrap


def by_plan(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
    plan = Plan(data=Unsynchronized())
    return assemble(plan, model, optimizer, mesh=gpc.mesh, device=gpc.device)


DOORS: dict[str, Door] = {
    "ddp": by_booster(TorchDDPPlugin),
    "zero-1": by_booster(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero-2": by_booster(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "fsdp": by_booster(TorchFSDPPlugin),
    "gemini": by_booster(GeminiPlugin, precision="fp32"),
    "unsynchronized": by_plan,
    "wrapped zero-2": by_wrapper(2),
    "wrapped gemini": by_wrapper(3),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch_of(step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def num_hooks(model: nn.Module) -> list[int]:
    return [
        sum(isinstance(hook, GradHook) for hooks in hooks_of_grad(param) for hook in hooks.values())
        for param in model.parameters()
    ]


def train(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], list[str]]:
    """Make three steps; return the losses and the collectives."""
    replicas, losses = gpc.mesh.axis("dp"), []
    with ledger() as book:
        for step in range(3):
            optimizer.zero_grad()
            losses.append(model(batch_of(step).chunk(replicas.size)[replicas.rank]).square().mean())
            optimizer.backward(losses[-1])
            optimizer.step()
    return [loss.detach() for loss in losses], [entry.op for entry in book.entries]


def again(first: str, second: str) -> None:
    """Assemble a model twice, while the first assembly is alive; the second time one layer is frozen."""
    colossalai.launch_from_torch({}, verbose=False)
    model, fresh = build(), build()
    held = DOORS[first](model, sgd_of(model))
    for each in (model, fresh):
        each[0].requires_grad_(False)
    model, optimizer = DOORS[second](model, sgd_of(model))
    fresh, fresh_optimizer = DOORS[second](fresh, sgd_of(fresh))
    assert num_hooks(model) == num_hooks(fresh)
    assert train(model, optimizer) == train(fresh, fresh_optimizer)
    del held  # not earlier


def sgd_of(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


@pytest.mark.parametrize("first", ["ddp", "zero-2", further("zero-1")])
def test_nothing_of_an_earlier_assembly_runs(first: str) -> None:
    run_each(2, again, [(first, second) for second in DOORS])


def with_experts(first: str, second: str) -> None:
    """The losses of its experts are added once, and the biases of its routers move once in a step."""
    colossalai.launch_from_torch({}, verbose=False)
    model, fresh = (Routed() for _ in range(2))
    held = DOORS[first](model, sgd_of(model))
    found, sent = [], []
    for raw in (model, fresh):
        with ledger() as book:
            found.append(train_routed(raw, *DOORS[second](raw, sgd_of(raw))))
        sent.append([entry.op for entry in book.entries])
    assert all(map(torch.equal, *found))
    assert sent[0] == sent[1]
    del held


def train_routed(raw: nn.Module, model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Make two steps; return the losses, gradients and buffers of each."""
    found: list[Tensor] = []
    criterion = MoeLoss(0.5, nn.CrossEntropyLoss)
    for step in range(2):
        optimizer.zero_grad()
        loss = criterion(model(batch_of(step)), torch.arange(8) % 3)
        found += [loss.detach(), MOE_CONTEXT.get_loss().detach()]
        optimizer.backward(loss)
        optimizer.step()
        found += [param.grad.clone() for param in raw.parameters()]
        found += [buffer.clone() for buffer in raw.buffers()]
    return found


class Routed(nn.Module):
    """A layer of experts whose router has an auxiliary loss and a bias that follows the load."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        router = TopKRouter(2, z_loss_weight=0.1, bias_update_rate=0.1, num_experts=4)
        self.ffn = MoeLayer(5, 4, router, FFNExperts(4, 5, 8))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.ffn(x))


@pytest.mark.parametrize("first", ["ddp", further("zero-2")])
def test_losses_of_experts_are_collected_once(first: str) -> None:
    run_each(2, with_experts, [(first, second) for second in ("ddp", "unsynchronized")])
