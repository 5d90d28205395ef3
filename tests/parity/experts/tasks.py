"""What the rows of experts train: parameters cut by hand, layers with routers, transformers with experts."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.communication import (
    all_gather,
    gather_forward_scatter_backward,
    scatter_forward_gather_backward,
)
from colossalai.context import MOE_CONTEXT, Mesh
from colossalai.core import global_context as gpc
from colossalai.model_zoo.moe.models import Widenet
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
from colossalai.shardformer import Rule, register_rule
from colossalai.tensor import SpecKeeper, cut_dims, set_spec, spec_of
from tests.parity.tasks import rebuilt, vectors
from tests.parity.training import Batch, Task

WIDTH, NUM_EXPERTS, NUM_CLASSES = 6, 4, 3
AUX_WEIGHT = 0.5  # of a loss of about 1: what is wrong with it shows
ALONE = Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 1}, rank=0, views={"dp": ("edp", "ep")})


class CutExperts(SpecKeeper):
    """The expert that a gate chooses for each token; weights are cut over `ep`, the gate is not.

    Each rank along `ep` holds some of the experts, and computes for the tokens of all.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        for name, shape in {"weight": (NUM_EXPERTS, WIDTH, WIDTH), "bias": (NUM_EXPERTS, WIDTH)}.items():
            spec = cut_dims(shape, [("ep",), *[()] * (len(shape) - 1)], mesh)
            param = nn.Parameter(spec.slice_of(torch.randn(shape)))
            set_spec(param, spec)
            setattr(self, name, param)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width)
        axis = self.mesh.axis("ep")
        share, choice = self.gate(x).softmax(-1).max(-1)
        tokens = gather_forward_scatter_backward(x, axis, 0)  # (batch * ep, seq, width)
        choice = all_gather(choice, 0, axis)
        result = torch.zeros_like(tokens)
        num_own = NUM_EXPERTS // axis.size
        for number in range(num_own):
            is_mine = (choice == axis.rank * num_own + number).unsqueeze(-1)
            result = result + torch.tanh(tokens @ self.weight[number] + self.bias[number]) * is_mine
        return scatter_forward_gather_backward(result, axis, 0) * share.unsqueeze(-1)


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

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Net(nn.Module):
    """Blocks of experts between linear layers; tokens are positions of sequences."""

    def __init__(self, ffns: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(map(Block, ffns))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def cut_net(mesh: Mesh = ALONE) -> Net:
    """Return two blocks of experts that are cut by hand."""
    return Net(CutExperts(mesh) for _ in range(2))


def shifted_copy(plain: nn.Module) -> Net:
    """Return a copy of a net cut by hand, with other values on all ranks but the first of each slice.

    A method has to make them equal, among the ranks that hold the same.
    """
    mesh = gpc.mesh
    model = cut_net(mesh).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec, whole = spec_of(param), plain.get_parameter(name)
            param.copy_(whole if spec is None else spec.slice_of(whole))
            param += mesh.axis_rank("dp" if spec is None or not spec.axes else "edp")
    return model


def sequences(num_steps: int = 3) -> list[Batch]:
    """Return batches of 16 sequences of 3 tokens."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 3, 5, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(num_steps)
    ]


CUT_BY_HAND = Task(
    build=cut_net,
    place=shifted_copy,
    batches=sequences,
    optimizer=partial(torch.optim.AdamW, lr=0.05),
)


def moe_net(router: str, experts: str = "any", skew: str = "none", num_blocks: int = 2) -> Net:
    """Return blocks of `MoeLayer`.

    Args:
        router: The name of the router, which the blocks share.
        experts: The name of the experts, of which each block has its own.
        skew: What is added to the gates, so that some experts get no tokens: "none", "one", or "half".
        num_blocks: How many there are.
    """
    shared = ROUTERS[router]()
    net = Net(MoeLayer(WIDTH, NUM_EXPERTS, shared, EXPERTS[experts]()) for _ in range(num_blocks))
    for block in net.blocks:
        block.ffn.gate.register_forward_hook(partial(_bend, skew))
    return net


def _bend(skew: str, gate: nn.Module, args: object, logits: Tensor) -> Tensor:
    if skew == "one":  # all tokens to the last expert
        return logits + 50 * torch.eye(NUM_EXPERTS, dtype=logits.dtype)[-1]
    if skew == "half":  # no token to the second half
        return logits - 50 * (torch.arange(NUM_EXPERTS) >= NUM_EXPERTS // 2)
    return logits


def moe_layers(router: str, *options: Any) -> Task:
    """Return the task of a net of `moe_net`."""
    return routed(partial(moe_net, router, *options), sequences, ROUTERS[router]().z_loss_weight)


def routed(build: Callable[[], nn.Module], batches: Callable[[], Any], z_weight: float = 0.0) -> Task:
    """Return the task of a model of `MoeLayer`."""
    return Task(
        build=build,
        place=rebuilt(build),
        batches=batches,
        criterion=partial(MoeLoss, AUX_WEIGHT, nn.CrossEntropyLoss),
        loss=partial(routed_by_parts, z_weight),
        optimizer=partial(torch.optim.AdamW, lr=0.05),
    )


def routed_by_parts(z_weight: float, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of one process: each rank's part, and each microbatch of it, is routed for itself."""
    num_parts = gpc.data_parallel_size
    num_microbatches = gpc.config.get("gradient_accumulation", 1) * gpc.config.get("NUM_MICRO_BATCHES", 1)
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


@contextmanager
def collecting(model: nn.Module) -> Iterator[list[Routes]]:
    """Collect what the routers of a model return within the block, in order."""
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


TINY: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "num_classes": 3,
    "depth": 2,
    "d_model": 8,
    "num_heads": 2,
    "d_kv": 3,
    "d_ff": 10,
}
"""Sizes of a WideNet."""


def _widenet() -> Widenet:
    """Return a model without what is random; capacity drops tokens."""
    model = Widenet(4, 0.6, **TINY, drop_rate=0.0)
    model.blocks[0].ffn.router.noisy_func = None
    model.blocks[0].ffn.router.min_capacity = 0
    return model


def _images() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]


WIDENET = replace(routed(_widenet, _images), optimizer=partial(torch.optim.AdamW, lr=0.01))


class Towers(nn.Module):
    """Experts of a user's own, called as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 6, 6))
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, choice = torch.where(experts == number)
            if len(token):
                found = torch.tanh(hidden[token] @ self.weight[number] + self.bias[number])
                result = result.index_add(0, token, found * weights[token, choice, None])
        return result


class Tower(nn.Module):
    """A net that sends its tokens to experts, all of them to one of the first two."""

    def __init__(self) -> None:
        super().__init__()
        register_rule(Towers, Rule(experts=("weight", "bias")))
        self.before, self.towers, self.after = nn.Linear(5, 6), Towers(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        weights, experts = hidden[:, :2].softmax(-1).topk(1)
        return self.after(self.towers(hidden, experts, weights))


OF_A_USER = Task(
    build=Tower,
    batches=partial(vectors, num_classes=3),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
)
"""Experts that a rule of the user's names."""
