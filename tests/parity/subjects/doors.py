"""The same training run through each of the two doors, as subjects of the parity check."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, Subject, check_parity, full_gradients, full_parameters

Batch = tuple[Tensor, ...]
PLUGINS = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}


class Block(nn.Module):
    """A residual block whose width no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.fc = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Net(nn.Module):
    """A stack of blocks between tied weights, with a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.head.weight) * self.scale


def loss_of(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def make_case(
    *, max_norm: float | None = None, num_steps: int = 3, device: str | torch.device = "cpu"
) -> ParityCase:
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(16, 5, generator=generator), torch.randint(5, (16,), generator=generator))
        for _ in range(num_steps)
    ]
    return ParityCase(
        build_model=Net,
        build_optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01),
        compute_loss=loss_of,
        batches=batches,
        max_norm=max_norm,
        device=device,
    )


def through_engine(case: ParityCase, accumulation: int, model: nn.Module) -> Subject:
    """The config door; the features are those that the job was launched with."""
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, nn.functional.cross_entropy, verbose=False)

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=case.device)
        for x, y in zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True):
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        return total / accumulation

    return Subject(
        step=step,
        gradients=lambda: full_gradients(engine.model),
        parameters=lambda: full_parameters(engine.model),
    )


def through_booster(case: ParityCase, accumulation: int, method: str, model: nn.Module) -> Subject:
    """The plugin door."""
    booster = Booster(plugin=PLUGINS[method]())
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.functional.cross_entropy)

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=case.device)
        microbatches = list(zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True))
        optimizer.zero_grad()

        def run(x: Tensor, y: Tensor) -> None:
            loss = criterion(model(x), y)
            booster.backward(loss / accumulation if accumulation > 1 else loss, optimizer)
            total.add_(loss.detach())

        for x, y in microbatches[:-1]:
            with booster.no_sync(model):
                run(x, y)
        run(*microbatches[-1])
        if case.max_norm is not None:
            optimizer.clip_grad_by_norm(case.max_norm)
        optimizer.step()
        return total / accumulation

    return Subject(
        step=step, gradients=lambda: full_gradients(model), parameters=lambda: full_parameters(model)
    )


def both_doors(method: str, accumulation: int, max_norm: float | None) -> tuple[list[float], list[float]]:
    """Check a method through both doors against one process; return the losses of each."""
    config = {"gradient_accumulation": accumulation, "clip_grad_norm": max_norm or 0.0}
    if method == "fsdp":
        config["zero"] = {"stage": 3}
    colossalai.launch_from_torch(config=config, verbose=False)
    case = make_case(max_norm=max_norm)
    by_engine = check_parity(case, partial(through_engine, case, accumulation))
    by_booster = check_parity(case, partial(through_booster, case, accumulation, method))
    gpc.destroy()
    return by_engine, by_booster
