"""`colossalai.initialize`: an Engine with the features of the launched config.

The name is documented as a module (`from colossalai.initialize import launch`) and as a function
(`colossalai.initialize(...)`), so the module can be called.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.context import get_default_parser as get_default_parser
from colossalai.context import global_context, names_arguments
from colossalai.context import launch as launch
from colossalai.context import launch_from_openmpi as launch_from_openmpi
from colossalai.context import launch_from_slurm as launch_from_slurm
from colossalai.context import launch_from_torch as launch_from_torch
from colossalai.engine import Engine, build_gradient_handler
from colossalai.engine.schedule import BaseSchedule, NonPipelineSchedule, PipelineSchedule
from colossalai.nn.layer.moe import MoeExperts
from colossalai.runtime import (
    Criterion,
    Plan,
    TrainingStep,
    assemble,
    check_division,
    criterion_of,
    describe_model,
    log_start,
    settings_of,
    watched,
)
from colossalai.shardformer import has_experts

Loader = Iterable[Any] | None


@names_arguments
def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    criterion: Criterion | None = None,
    train_dataloader: Loader = None,
    test_dataloader: Loader = None,
    lr_scheduler: Any = None,
    verbose: bool = True,
    *,
    schedule: BaseSchedule | None = None,
) -> tuple[Engine, Any, Any, Any]:
    """Build the features of the launched config into training components.

    Args:
        model: The model; it is moved to the device of this rank and changed in place. With a pipeline it is
            this rank's stage (with chunks, a `torch.nn.ModuleList` of its stages); a whole model is cut if
            the config has a partition, for example `pipeline=dict(size=2, partition="balanced")`.
        optimizer: Its optimizer; None for a model that is only run.
        criterion: The loss function, called with the output and the label. With `fused_loss=True` in the
            config it can be left out: the loss is then the model's own.
        train_dataloader: Batches to train on. Iterate over the returned one: it marks the end of an epoch,
            so that the last, short accumulation window is not lost.
        test_dataloader: Batches to evaluate on; returned as it is.
        lr_scheduler: A scheduler of the optimizer; returned as it is.
        verbose: Whether rank 0 logs the model, the plan and its bytes.
        schedule: The schedule of `engine.execute_schedule`. Default: the config's.

    Returns:
        Engine, train dataloader, test dataloader, scheduler.

    Raises:
        RuntimeError: The job has not been launched.
        ConfigException: The config has a feature that does not exist yet.
        ValueError: `optimizer` holds parameters that `model` lacks, a component has been initialized
            before, `model` cannot be built for the plan of the config, or `train_dataloader` divides samples
            among another number of ranks than the model has data-parallel ones.
    """
    mesh, device = global_context.mesh, global_context.device
    options = schedule.options if isinstance(schedule, PipelineSchedule) else None
    layout, auto = global_context.layout, global_context.auto_plan
    lowered = None if auto is None else auto.runtime_plan()
    plan = replace(Plan.from_config(global_context.config, pipeline=options, auto=lowered), layout=layout)
    criterion = criterion_of(criterion, fused_loss=plan.fused_loss)
    check_division(
        train_dataloader,
        mesh.axis_size("dp"),
        remedy="colossalai.utils.get_dataloader(dataset, batch_size=...)",
    )
    described = describe_model(model, plan)
    assembled, wrapped = assemble(plan, model, optimizer, mesh=mesh, device=device)
    raw = assembled.unwrap()
    handlers = (
        [build_gradient_handler(entry, raw, wrapped) for entry in plan.gradient_handlers] if wrapped else []
    )
    if wrapped and not handlers and _has_experts(raw):
        handlers = [build_gradient_handler({"type": "MoeGradientHandler", "averaged": True}, raw, wrapped)]
    step = TrainingStep(
        assembled,
        wrapped,
        accumulation_steps=plan.accumulation_steps,
        sync_grads=[handler.handle_gradient for handler in handlers],
    )
    if train_dataloader is not None and plan.accumulation_steps > 1:
        train_dataloader = step.watch = watched(train_dataloader)
    engine = Engine(
        step,
        criterion.to(device) if isinstance(criterion, nn.Module) else criterion,
        schedule=schedule or _default_schedule(plan),
        mesh=mesh,
        device=device,
        observers=mesh.axis(mesh.observer_axes),
        gradient_handlers=handlers,
        lr_scheduler=lr_scheduler,
        train_dataloader=train_dataloader,
        settings=settings_of(plan, mesh, global_context.config),
    )
    if verbose:
        trained = [] if wrapped is None else [wrapped]
        log_start(assembled, trained, plan=plan, mesh=mesh, described=described)
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _has_experts(model: nn.Module) -> bool:
    return has_experts(model) or any(isinstance(part, MoeExperts) for part in model.modules())


def _default_schedule(plan: Plan) -> BaseSchedule:
    return NonPipelineSchedule() if plan.pipeline is None else PipelineSchedule.from_options(plan.pipeline)


class _CallableModule(ModuleType):
    __call__ = staticmethod(initialize)


sys.modules[__name__].__class__ = _CallableModule
