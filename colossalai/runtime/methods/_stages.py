"""Pipeline parallelism: a model, or this rank's part of one, becomes the stages of this rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import Precision
from colossalai.checkpoint_io import parameter_names, set_prefix, set_tied_names
from colossalai.cluster import gather_values
from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.nn.layer.moe import collector_of_stages
from colossalai.pipeline import (
    ModelStage,
    PipelineOptions,
    Schedule,
    cut_model,
    has_full_names,
    is_counted,
    share_of,
    share_parameter,
    shared_axis,
    tied_parameters,
)
from colossalai.runtime._pipeline import Pipeline
from colossalai.runtime.methods._assembly import Assembly, PlanMethod, has_stepped

_BALANCES: Mapping[str, Literal["uniform", "parameters"]] = {
    "balanced": "parameters",
    "uniform": "uniform",
}


@dataclass(frozen=True)
class PipelineStages(PlanMethod):
    """This rank's stages of a model; optimizers keep only the parameters of these.

    A whole model is cut if the options have a partition. A stage is not cut again.

    Args:
        options: Options of the pipeline.
        precision: The precision of each stage.
        fused_loss: Whether the model takes the labels, and returns its loss.
    """

    options: PipelineOptions
    precision: Precision
    fused_loss: bool

    def validate(self, job: Assembly) -> None:
        """Check that each stage can update its parameters without those of other stages.

        Raises:
            ValueError: An optimizer needs all parameters of the model.
        """
        if job.mesh.axis_size("pp") > 1:
            for optimizer in job.optimizers:
                _refuse_all_parameters_at_once(optimizer)

    def apply(self, job: Assembly) -> None:
        """Take the stages of this rank; a lazily built model stays lazy.

        Raises:
            ValueError: The model cannot be cut, or its chunks are not those of the schedule.
        """
        axis = job.mesh.axis("pp")
        schedule = self.options.make_schedule(axis.size)
        mine = schedule.stages_of(axis.rank)
        if self.options.partition is not None and not has_full_names(job.model):
            given = {id(param) for param in job.model.parameters()}
            balance = _BALANCES[self.options.partition]
            job.model = job.computing = cut_model(job.model, schedule.num_stages, mine, balance=balance)
            for optimizer in job.optimizers:
                _keep_parameters_of_stages(optimizer, job.model, given)
        _check_chunks(job.model, len(mine), schedule)
        job.owners += [part.model for part in job.model.modules() if isinstance(part, ModelStage)]
        job.optimizer_options |= {"stages": job.mesh.group("pp"), "counts": is_counted}
        job.names_of = parameter_names
        job.wrapper_options["parts"] = job.mesh

    def after_apply(self, job: Assembly) -> None:
        """Build the executor of batches; collective over the pipeline."""
        job.wrapper_options["pipeline"] = Pipeline(
            job.model,
            options=self.options,
            axis=job.mesh.axis("pp"),
            tensor_axis=job.tensor_axis,
            device=job.device,
            precision=self.precision,
            data=job.data,
            collection=collector_of_stages(job.model, job.mesh.axis("pp")),
            fused_loss=self.fused_loss,
        )


@dataclass(frozen=True)
class TiedWeights(PlanMethod):
    """Weights that several stages hold, with equal values and names on all of them.

    Args:
        options: Options of the pipeline.
    """

    options: PipelineOptions

    def apply(self, job: Assembly) -> None:
        """Share the weights; collective over the pipeline. A layer can have been sharded before."""
        job.params.bring_all()  # the first rank's values are broadcast before they are cast
        axis = job.mesh.axis("pp")
        schedule = self.options.make_schedule(axis.size)
        for param, stages in tied_parameters(job.model):
            ranks = shared_axis(axis, [schedule.rank_of_stage[stage] for stage in stages])
            if ranks is not None and share_of(param) is None:
                share_parameter(param, ranks)
        for param, names in _tied_names(job.model):
            set_tied_names(param, names)
        if not has_full_names(job.model):
            _prefix_equal_names(job.model, axis)
        job.late_params = [param for param in job.model.parameters() if share_of(param) is not None]


def _refuse_all_parameters_at_once(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs all parameters in one process: each stage has only its own.

    Raises:
        ValueError: `optimizer` is LBFGS, or has a `max_grad_norm`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS treats all parameters as one vector, of which each stage of a pipeline has a part: train "
            "without a pipeline, or with an optimizer that updates each parameter by itself, such as AdamW"
        )
    if bound := getattr(optimizer, "max_grad_norm", None):
        raise ValueError(
            f"{type(optimizer).__name__} clips to max_grad_norm={bound} by the norm of the gradients that a "
            "stage of the pipeline has: build it with max_grad_norm=0, and give the bound to the plugin "
            "(max_norm) or to the config (clip_grad_norm)"
        )


def _keep_parameters_of_stages(optimizer: Optimizer, model: nn.Module, given: set[int]) -> None:
    """Remove parameters of other stages from an optimizer; unknown ones are kept, and refused later."""
    own = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        kept = [param for param in group["params"] if id(param) in own or id(param) not in given]
        if len(kept) < len(group["params"]) and has_stepped(optimizer):
            raise ValueError(
                "the optimizer has made steps already, but this plan cuts the model: assemble first, then "
                "load the state of the optimizer"
            )
        for param in set(group["params"]).difference(kept):
            optimizer.state.pop(param, None)  # an initial state from before the first step
        group["params"] = kept


def _check_chunks(model: nn.Module, num_stages: int, schedule: Schedule) -> None:
    num_chunks = len(model) if isinstance(model, nn.ModuleList) else 1
    if num_chunks != num_stages:
        wanted = f"a torch.nn.ModuleList of {num_stages} chunks" if num_stages > 1 else "one module"
        raise ValueError(
            f"the schedule {schedule.name!r} has {num_stages} stages on this rank, but the model that was "
            f"given has {num_chunks}: pass {wanted}, or the whole model with a partition ('balanced')"
        )


def _tied_names(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[str, ...]]]:
    """Yield the parameters that are also on other stages, with all their names in the whole model."""
    for stage in model.modules():
        if isinstance(stage, ModelStage):
            named = dict(stage.named_parameters(remove_duplicate=False))
            for tie in stage.ties:
                yield next(named[name] for name in tie.names if name in named), tie.names


def _prefix_equal_names(model: nn.Module, axis: Axis) -> None:
    """Set a prefix for checkpoints if users' stages use one name for different parameters."""
    own = [name for name, _ in model.named_parameters()]
    # All stages compare the same names, so all or none get a prefix.
    names: list[Sequence[str]] = gather_values(own, axis.group)
    if len({name for others in names for name in others}) < sum(map(len, names)):
        set_prefix(model, f"stage{axis.rank}.")
    if axis.rank == 0 and all(set(others) == set(own) for others in names):
        get_dist_logger().warning(
            "every pipeline rank was given a module with the same parameters, which is taken as its stage: "
            "if it is the whole model, add partition='balanced' to parallel.pipeline"
        )
