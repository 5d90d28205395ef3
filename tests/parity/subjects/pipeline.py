"""A model in a pipeline, through each of the two doors, as subjects of the parity check."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, Subject
from tests.parity.subjects.tensor import whole

Criterion = Callable[..., Tensor]

NUM_MICROBATCHES = 4


def through_engine(
    case: ParityCase,
    model: nn.Module,
    criterion: Criterion = nn.functional.cross_entropy,
    *,
    clip_value: float | None = None,
) -> Subject:
    """The config door: the whole model is given, and `partition` in the config says that it is to be cut."""
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        parts = [tensor.chunk(engine.accumulation_steps) for tensor in batch]
        for x, y in zip(*parts, strict=True):
            engine.zero_grad()
            _, _, loss = engine.execute_schedule(iter([(x, y)]), return_output_label=False)
            if clip_value is not None:
                engine.optimizer.clip_grad_by_value(clip_value)
            engine.step()
            total += loss / engine.accumulation_steps
        return total

    return subject_of(engine.model, engine.optimizer, step)


def through_booster(case: ParityCase, options: dict, model: nn.Module) -> Subject:
    """The plugin door; the job was launched without `parallel`."""
    booster = Booster(
        plugin=HybridParallelPlugin(
            num_microbatches=NUM_MICROBATCHES, max_norm=case.max_norm or 0.0, **options
        )
    )
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.functional.cross_entropy)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_loss=True)
        optimizer.step()
        return result["loss"]

    return subject_of(model, optimizer, step)


def subject_of(model: nn.Module, optimizer, step) -> Subject:
    """Name parameters as the whole model does: what stages share has one name."""
    names = optimizer.param_names
    params = {names[param]: param for param in model.parameters()}
    return Subject(
        step=step,
        gradients=lambda: {
            name: whole(param, param.grad) for name, param in params.items() if param.grad is not None
        },
        parameters=lambda: {name: whole(param, param) for name, param in params.items()},
    )


def slice_of_batch() -> dict[str, int]:
    """Return which part of each batch this rank works on."""
    return {"slice_index": gpc.mesh.axis_rank("dp"), "num_slices": gpc.data_parallel_size}
