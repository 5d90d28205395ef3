"""The pipeline method of a plan: a model, or this rank's part of one, becomes the stages of this rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io import set_prefix, set_tied_names
from colossalai.cluster import gather_values
from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.pipeline import (
    ModelStage,
    PipelineOptions,
    Schedule,
    cut_model,
    has_full_names,
    share_of,
    share_parameter,
    shared_axis,
    tied_parameters,
)

_BALANCES: Mapping[str, Literal["uniform", "parameters"]] = {
    "balanced": "parameters",
    "uniform": "uniform",
}


def take_stages(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    options: PipelineOptions,
    axis: Axis,
) -> nn.Module:
    """Return the stages of this rank; optimizers keep their parameters only.

    A whole model is cut if the options say how. One that is a stage already is taken as it is.

    Args:
        model: The model or the stage; a lazily built one stays lazy.
        optimizers: Its optimizers.
        options: How the pipeline is run.
        axis: The pipeline ranks.

    Raises:
        ValueError: The model cannot be cut, or its chunks are not those of the schedule.
    """
    schedule = options.make_schedule(axis.size)
    mine = schedule.stages_of(axis.rank)
    if options.partition is not None and not has_full_names(model):
        given = {id(param) for param in model.parameters()}
        model = cut_model(model, schedule.num_stages, mine, balance=_BALANCES[options.partition])
        for optimizer in optimizers:
            _keep_own(optimizer, model, given)
    _check_chunks(model, len(mine), schedule)
    return model


def join_stages(model: nn.Module, *, options: PipelineOptions, axis: Axis) -> None:
    """Share what several stages hold, with equal values and names; collective over the pipeline.

    Args:
        model: What `take_stages` returned, with values; a layer may have been cut over tensor-parallel ranks.
        options: How the pipeline is run.
        axis: The pipeline ranks.
    """
    schedule = options.make_schedule(axis.size)
    for param, stages in tied_parameters(model):
        ranks = shared_axis(axis, [schedule.rank_of_stage[stage] for stage in stages])
        if ranks is not None and share_of(param) is None:
            share_parameter(param, ranks)
    for param, names in _tied_names(model):
        set_tied_names(param, names)
    if not has_full_names(model):
        _tell_names_apart(model, axis)


def _keep_own(optimizer: Optimizer, model: nn.Module, given: set[int]) -> None:
    """Take out of the optimizer what other stages hold; a stranger stays, and is found out later."""
    own = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        kept = [param for param in group["params"] if id(param) in own or id(param) not in given]
        if len(kept) < len(group["params"]) and has_stepped(optimizer):
            raise ValueError(
                "the optimizer has made steps already, but this plan cuts the model: assemble first, then "
                "load the state of the optimizer"
            )
        for param in set(group["params"]).difference(kept):
            optimizer.state.pop(param, None)  # one of before the first step
        group["params"] = kept


def has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has states, other than those of a class that has them before a step."""
    return any(state.get("step", 1) > 0 for state in optimizer.state.values())


def _check_chunks(model: nn.Module, num_stages: int, schedule: Schedule) -> None:
    num_chunks = len(model) if isinstance(model, nn.ModuleList) else 1
    if num_chunks != num_stages:
        wanted = f"a torch.nn.ModuleList of {num_stages} chunks" if num_stages > 1 else "one module"
        raise ValueError(
            f"the schedule {schedule.name!r} has {num_stages} stages on this rank, but the model that was "
            f"given has {num_chunks}: pass {wanted}, or the whole model with a partition ('balanced')"
        )


def _tied_names(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[str, ...]]]:
    """Yield the parameters that other stages hold, too, with all their names in the whole model."""
    for stage in model.modules():
        if isinstance(stage, ModelStage):
            named = dict(stage.named_parameters(remove_duplicate=False))
            for tie in stage.ties:
                yield next(named[name] for name in tie.names if name in named), tie.names


def _tell_names_apart(model: nn.Module, axis: Axis) -> None:
    """Where stages of the user's own use the same names for different parameters, let checkpoints see it."""
    own = [name for name, _ in model.named_parameters()]
    names: list[Sequence[str]] = gather_values(own, axis.group)
    if len({name for others in names for name in others}) < sum(map(len, names)):
        set_prefix(model, f"stage{axis.rank}.")
    if axis.rank == 0 and all(set(others) == set(own) for others in names):
        get_dist_logger().warning(
            "every pipeline rank was given a module with the same parameters, which is taken as its stage: "
            "if it is the whole model, add partition='balanced' to parallel.pipeline"
        )
