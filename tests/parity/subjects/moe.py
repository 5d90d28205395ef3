"""A small model of MoeLayers, trained through each door, and the loss that one process has on all parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin
from colossalai.context import MOE_CONTEXT
from colossalai.core import global_context as gpc
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import (
    Experts,
    FFNExperts,
    MoeExperts,
    MoeLayer,
    MoeRouter,
    Routes,
    Top1Router,
    Top2Router,
    TopKRouter,
    TPExperts,
)
from colossalai.tensor import spec_of
from colossalai.testing import ParityCase, Subject
from tests.parity.subjects import zero
from tests.parity.subjects.tensor import whole

WIDTH, NUM_EXPERTS, NUM_CLASSES = 6, 4, 3
AUX_WEIGHT = 0.5  # of a loss of about 1: what is wrong with it shows


class Expert(nn.Module):
    """A feed-forward expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 5), nn.Tanh())
        self.outer = nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


ROUTERS: dict[str, Callable[[], MoeRouter]] = {
    "top1": lambda: Top1Router(drop_tks=False),
    "top2": lambda: Top2Router(drop_tks=False, z_loss_weight=0.1),
    "top3": lambda: TopKRouter(3, z_loss_weight=0.1),
    "top1 capacity": lambda: Top1Router(0.5, min_capacity=0),
    "top2 capacity": lambda: Top2Router(0.5, min_capacity=0),
}
EXPERTS: dict[str, Callable[[], MoeExperts]] = {
    "any": lambda: Experts(Expert, NUM_EXPERTS, width=WIDTH),
    "ffn": lambda: FFNExperts(NUM_EXPERTS, WIDTH, 8, torch.tanh),
    "tp": lambda: TPExperts(NUM_EXPERTS, WIDTH, 8, torch.tanh),
}


class Block(nn.Module):
    """A residual block of experts."""

    def __init__(self, router: MoeRouter, experts: MoeExperts) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ffn = MoeLayer(WIDTH, NUM_EXPERTS, router, experts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Net(nn.Module):
    """Blocks between linear layers; tokens are positions of sequences.

    Args:
        router: The name of the router, which the blocks share.
        experts: The name of the experts, of which each block has its own.
        skew: What is added to the gates, so that some experts get no tokens: "none", "one", or "half".
        num_blocks: How many there are.
    """

    def __init__(self, router: str, experts: str = "any", skew: str = "none", num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        shared = ROUTERS[router]()
        self.blocks = nn.ModuleList(Block(shared, EXPERTS[experts]()) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.skew = skew
        for block in self.blocks:
            block.ffn.gate.register_forward_hook(self.bend)

    def bend(self, gate: nn.Module, args: object, logits: Tensor) -> Tensor:
        if self.skew == "one":  # all tokens to the last expert
            return logits + 50 * torch.eye(NUM_EXPERTS, dtype=logits.dtype)[-1]
        if self.skew == "half":  # no token to the second half
            return logits - 50 * (torch.arange(NUM_EXPERTS) >= NUM_EXPERTS // 2)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def cut_copy(plain: Net, build: Callable[[], Net]) -> Net:
    """Return a net built in the launched job with the values of one that a process has whole."""
    model = build().double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec, value = spec_of(param), plain.get_parameter(name)
            param.copy_(value if spec is None else spec.slice_of(value))
    return model


@contextmanager
def collecting(model: nn.Module) -> Iterator[list[Routes]]:
    """Collect what the routers of a model say within the block, in order."""
    found: list[Routes] = []
    routers = [part for part in model.modules() if isinstance(part, MoeRouter)]
    hooks = [
        router.register_forward_hook(lambda module, args, routes: found.append(routes)) for router in routers
    ]
    yield found
    for hook in hooks:
        hook.remove()


def auxiliary(parts: list[Routes], z_weight: float) -> Tensor:
    """Return the auxiliary loss of a layer whose tokens were routed part by part, by its definition."""
    probabilities = torch.cat([routes.probabilities for routes in parts])
    experts = torch.cat([routes.experts for routes in parts])
    num_experts = probabilities.shape[1]
    total = torch.zeros((), dtype=probabilities.dtype)
    for expert in range(num_experts):
        fraction = (experts == expert).double().mean()
        total = total + num_experts * fraction * probabilities[:, expert].mean()
    logits = torch.cat([routes.logits for routes in parts])
    return total + z_weight * logits.exp().sum(-1).log().square().mean()


def make_loss(
    num_parts: int, num_microbatches: int, z_weight: float
) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    """Return the loss of one process: each rank's part, and each microbatch of it, is routed for itself."""

    def compute(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        by_rank = list(zip(*(tensor.chunk(num_parts) for tensor in batch), strict=True))
        for number in range(num_microbatches):
            layers: list[list[Routes]] = []
            for part in by_rank:
                x, y = (tensor.chunk(num_microbatches)[number] for tensor in part)
                with collecting(model) as routes:
                    total = total + nn.functional.cross_entropy(model(x), y) / num_parts
                layers.append(routes)
            for parts in zip(*layers, strict=True):
                total = total + AUX_WEIGHT * auxiliary(list(parts), z_weight)
        MOE_CONTEXT.reset_loss()
        return total / num_microbatches

    return compute


def make_batches(num_steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 16 sequences of 3 tokens."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 3, 5, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(num_steps)
    ]


def criterion() -> MoeLoss:
    return MoeLoss(AUX_WEIGHT, nn.CrossEntropyLoss)


def through_engine(case: ParityCase, build: Callable[[], Net], plain: Net) -> Subject:
    """The config door; the features are those that the job was launched with."""
    model = cut_copy(plain, build)
    subject = zero.through_engine(case, model, criterion())
    if gpc.config.get("zero") and gpc.config.zero.stage < 3:
        return subject
    return of_parameters(model, subject.step)


def through_booster(
    case: ParityCase, build: Callable[[], Net], plugin: Plugin, accumulation: int, plain: Net
) -> Subject:
    """The plugin door; all microbatches but the last run without synchronization."""
    booster = Booster(plugin=plugin)
    model = cut_copy(plain, build)
    boosted, optimizer, loss_of, *_ = booster.boost(
        model, case.build_optimizer(model.parameters()), criterion()
    )

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for number, (x, y) in enumerate(
            zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True), start=1
        ):
            boosted.set_sync(number == accumulation)
            loss = loss_of(boosted(x), y) / accumulation
            booster.backward(loss, optimizer)
            total += loss.detach()
        if case.max_norm is not None:
            optimizer.clip_grad_by_norm(case.max_norm)
        optimizer.step()
        return total

    if hasattr(optimizer.masters, "whole_grads"):  # ZeRO: no parameter has its gradient
        return zero.subject_of(boosted, optimizer, step)
    return of_parameters(model, step)


def of_parameters(model: nn.Module, step: Callable[[tuple[Tensor, ...]], Tensor]) -> Subject:
    """Return a subject whose parameters have their gradients."""

    def wholes(of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        return {name: whole(param, of(param)) for name, param in model.named_parameters()}

    return Subject(
        step=step,
        gradients=lambda: wholes(lambda param: param.grad),
        parameters=lambda: wholes(lambda param: param),
    )


def z_weight_of(router: str) -> float:
    return ROUTERS[router]().z_loss_weight
