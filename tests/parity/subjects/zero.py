"""A model under ZeRO, through each of the two doors, as subjects of the parity check."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, Plugin
from colossalai.testing import ParityCase, Subject
from tests.parity.subjects.tensor import whole

Criterion = Callable[..., Tensor]


def through_engine(
    case: ParityCase,
    model: nn.Module,
    criterion: Criterion = nn.functional.cross_entropy,
    *,
    make_subject: Callable[..., Subject] | None = None,
) -> Subject:
    """The config door; the features are those that the job was launched with."""
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(*(tensor.chunk(engine.accumulation_steps) for tensor in batch), strict=True):
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.accumulation_steps
        return total

    return (make_subject or subject_of)(engine.model, engine.optimizer, step)


def through_pipeline(
    case: ParityCase, model: nn.Module, criterion: Criterion = nn.functional.cross_entropy
) -> Subject:
    """The config door with a pipeline."""
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(*(tensor.chunk(engine.accumulation_steps) for tensor in batch), strict=True):
            engine.zero_grad()
            _, _, loss = engine.execute_schedule(iter([(x, y)]), return_output_label=False)
            engine.step()
            total += loss / engine.accumulation_steps
        return total

    return subject_of(engine.model, engine.optimizer, step)


def through_booster(
    case: ParityCase, plugin: Plugin, accumulation: int, model: nn.Module, *, all_sync: bool = False
) -> Subject:
    """The plugin door; all microbatches but the last run under `no_sync`, unless all synchronize."""
    booster = Booster(plugin=plugin)
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.functional.cross_entropy)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        microbatches = list(zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True))
        optimizer.zero_grad()

        def run(x: Tensor, y: Tensor) -> None:
            loss = criterion(model(x), y) / accumulation
            booster.backward(loss, optimizer)
            total.add_(loss.detach())

        for x, y in microbatches[:-1]:
            with nullcontext() if all_sync else booster.no_sync(model):
                run(x, y)
        run(*microbatches[-1])
        optimizer.step()
        return total

    return subject_of(model, optimizer, step)


def pipeline_through_booster(case: ParityCase, options: dict, model: nn.Module) -> Subject:
    """The plugin door with a pipeline."""
    plugin = HybridParallelPlugin(num_microbatches=2, max_norm=case.max_norm or 0.0, **options)
    booster = Booster(plugin=plugin)
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.functional.cross_entropy)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_loss=True)
        optimizer.step()
        return result["loss"]

    return subject_of(model, optimizer, step)


def subject_of(model: nn.Module, optimizer, step) -> Subject:
    """Name parameters as the whole model does, and put the slices of gradients together."""
    names = optimizer.param_names
    params = {names[param]: param for param in model.parameters()}

    def gradients() -> dict[str, Tensor]:
        return {names[param]: whole(param, grad) for param, grad in optimizer.masters.whole_grads().items()}

    return Subject(
        step=step,
        gradients=gradients,
        parameters=lambda: {name: whole(param, param) for name, param in params.items()},
    )
