"""Application of a plan to a model and its optimizers."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.context import Mesh
from colossalai.logging import get_dist_logger
from colossalai.monitor import name_modules
from colossalai.pipeline import has_full_names
from colossalai.runtime._accumulation import AccumulatingOptimizer
from colossalai.runtime._model_checks import check_given
from colossalai.runtime._plan import Plan
from colossalai.runtime._refused_calls import refuse_calls
from colossalai.runtime._wrapper import ModelWrapper
from colossalai.runtime.methods import Assembly
from colossalai.tensor import CHUNK_PLACE, as_memory, local_slice, row_cache_of, row_caches, spec_of


def assemble(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    mesh: Mesh,
    device: torch.device,
) -> tuple[ModelWrapper, OptimizerWrapper | None]:
    """Apply the methods of a plan to a model and its optimizer.

    Calls `assemble_with_optimizers`, where all is described, for one optimizer or none.
    """
    given = [] if optimizer is None else [optimizer]
    wrapped_model, wrapped = assemble_with_optimizers(plan, model, given, mesh=mesh, device=device)
    return wrapped_model, wrapped[0] if wrapped else None


@as_memory()  # ColoTensors of a user are local shards here, as the shards of other methods are
def assemble_with_optimizers(
    plan: Plan,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    mesh: Mesh,
    device: torch.device,
    accumulation_steps: int = 1,
) -> tuple[ModelWrapper, list[OptimizerWrapper]]:
    """Apply the methods of a plan to a model and any number of optimizers of its parameters.

    The ranks over which gradients are averaged follow from the mesh: each rank's loss is the mean over its
    own part of the batch, and the parts are equally large, or it has a weight. The ranks that share layers
    and have the same activations between them follow from the plan's layout.

    From here on random numbers are drawn from the state of DATA, or, if ranks share sequences, of SEQUENCE
    or TENSOR: different dropout masks on different slices of the batch.

    Args:
        plan: The layout of the ranks and the methods.
        model: The model; it is moved to `device` and changed in place.
        optimizers: Optimizers of separate parameters of the model, before their first step; they are changed
            in place if the parameters are replaced. They share one loss scale.
        mesh: The ranks, with the layout of the plan.
        device: The device of this rank.
        accumulation_steps: Number of microbatches in an optimizer step, if the optimizers are stepped in each
            of them; see `AccumulatingOptimizer`.

    Raises:
        ValueError: `model` or an optimizer has been assembled before, the plan was made for another model,
            the mesh or the model was laid out or built for another plan, an optimizer holds parameters that
            the model lacks or another optimizer holds, or it has made steps already and the plan replaces
            parameters.
    """
    layout = check_given(plan, model, optimizers, mesh)
    name_modules(model)
    accumulates = accumulation_steps > 1
    job = Assembly(model, optimizers, mesh=mesh, layout=layout, device=device, accumulates=accumulates)
    methods = plan.methods()
    for method in methods:
        method.validate(job)
    for method in methods:
        method.apply(job)
    for method in methods:
        method.after_apply(job)
    wrapper = _wrap(job)
    for optimizer in job.wrapped:
        if isinstance(optimizer, AccumulatingOptimizer):
            optimizer.open_window(wrapper, accumulation_steps)
    return wrapper, job.wrapped


def _wrap(job: Assembly) -> ModelWrapper:
    """Return the model with its methods; calls that would be wrong under them are refused on it."""
    params = list(job.model.parameters())
    if any(map(_is_cut, params)):
        job.wrapper_options["parts"] = job.mesh
    wrapper = ModelWrapper(job.model, job.data, trained_by=job.wrapped, **job.wrapper_options)
    is_whole = wrapper.pipeline is None and all(map(_is_whole, params))
    has_masters = any(len(optimizer.masters) for optimizer in job.wrapped)
    is_alone = is_whole and job.mesh.world_size == 1 and not has_masters
    refuse_calls(job.owners, wrapper, is_alone=is_alone, is_whole=is_whole)
    return wrapper


def describe_model(model: nn.Module, plan: Plan) -> str:
    """Return the class of a model and the number of its parameters, including those on other ranks.

    Args:
        model: The model, before it is assembled. For a stage of a pipeline only its parameters count.
        plan: The plan.
    """
    if not isinstance(model, nn.Module):
        return ""  # `assemble` refuses it
    caches = row_caches(model)
    specs = ((param, spec_of(param)) for param in model.parameters() if row_cache_of(param) is None)
    number = sum(param.numel() if spec is None else math.prod(spec.whole_shape) for param, spec in specs)
    is_stage = has_full_names(model) or (plan.pipeline is not None and plan.pipeline.partition is None)
    where = " in this stage" if is_stage else ""
    return f"{type(model).__name__}, {number:,} parameters{where}{' beside cached tables' if caches else ''}"


def log_start(
    model: ModelWrapper, optimizers: Sequence[OptimizerWrapper], *, plan: Plan, mesh: Mesh, described: str
) -> None:
    """Log one line on rank 0: the model, the plan, and the bytes that this rank holds in training.

    Args:
        model: The assembled model.
        optimizers: Its optimizers.
        plan: The plan.
        mesh: The ranks.
        described: The result of `describe_model` before `assemble`.
    """
    if mesh.rank == 0:
        from colossalai.runtime.memory import start_line  # formulas, needed once on one rank

        try:
            with as_memory():
                line = start_line(model, optimizers, plan=plan, mesh=mesh, described=described)
        except Exception as error:  # from a parameter or an optimizer of the user: training goes on
            line = f"{described}: {plan} (bytes unknown: {type(error).__name__}: {error})"
        get_dist_logger().info(line, ranks=[0])


def _is_whole(param: nn.Parameter) -> bool:
    """Return whether this rank holds all values of a parameter."""
    cache = row_cache_of(param)
    if cache is not None and cache.axis is not None and cache.axis.size > 1:
        return False
    return not _is_cut(param) and local_slice(param) is param and CHUNK_PLACE not in vars(param)


def _is_cut(param: nn.Parameter) -> bool:
    spec = spec_of(param)
    return spec is not None and bool(spec.axes)
