"""Tensor and expert parallelism: parameters sharded by a user, or layers and experts sharded by rules."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.cluster import gather_values
from colossalai.context import Mesh
from colossalai.logging import get_dist_logger
from colossalai.nn.layer import SharesSequence
from colossalai.nn.layer.moe import bias_updates
from colossalai.pipeline import PipelineOptions, has_full_names, is_elsewhere
from colossalai.runtime.methods._assembly import Assembly, PlanMethod, has_stepped
from colossalai.shardformer import (
    Rule,
    can_shard,
    check_shards,
    experts_to_cut,
    has_experts,
    params_to_cut,
    refuse_unknown_names,
    shard_experts,
    shard_model,
)
from colossalai.tensor import ShardingSpec, as_plain_parameter, built_for, process_group_of, spec_of
from colossalai.zero import refuse_cut_parameters


@dataclass(frozen=True)
class UserShards(PlanMethod):
    """Parameters sharded by `set_tensor_spec`, if the model has any; its others become plain parameters.

    Args:
        refused: The methods of the plan that replace parameters, which functions of such a model read.
    """

    refused: tuple[str, ...] = ()

    def validate(self, job: Assembly) -> None:
        """Check that the model is sharded over the ranks of the job, and that parameters can stay.

        Raises:
            ValueError: The parameters are sharded over another mesh, or the plan has a method that replaces
                parameters.
        """
        group = process_group_of(job.model)
        job.has_user_shards = group is not None
        if group is None:
            return
        name = type(job.model).__name__
        if group.mesh.axes != job.mesh.axes:
            raise ValueError(
                f"{name} is cut over {group}, and the ranks are laid out as {job.mesh}: lay the job "
                f"out by parallel=dict(tensor=dict(size={group.tp_world_size()}, mode='1d')) in its config"
            )
        for method in self.refused:
            raise ValueError(
                f"{name} has parameters that were cut by set_tensor_spec, and {method} puts "
                "others in their place, which functions use as they are: leave it out; layers of "
                "colossalai.nn and HybridParallelPlugin(tp_size=...) cut models that it takes"
            )

    def apply(self, job: Assembly) -> None:
        """Turn ColoTensors that are not sharded into ordinary parameters."""
        for param in job.model.parameters():
            as_plain_parameter(param)


@dataclass(frozen=True)
class ModelShards(PlanMethod):
    """Layers sharded over tensor-parallel ranks, and experts over expert-parallel ones.

    If the plan names the layers, tensor parallelism alone shards no experts: expert parallelism does.

    Args:
        cuts: Rules for layers, by the names of modules in the whole model; None: by their classes.
        pipeline: Options of the pipeline; each rank shards the layers of its stages.
    """

    cuts: Mapping[str, Rule] | None
    pipeline: PipelineOptions | None = None

    def validate(self, job: Assembly) -> None:
        """Check names of layers, optimizers, and whether ranks that share a sequence have a part in it.

        Raises:
            ValueError: `cuts` has a name that the model lacks, an optimizer has made steps or needs whole
                parameters that will be shards, or the ranks share sequences and the model attends to whole
                ones.
        """
        model, mesh = job.model, job.mesh
        becomes_stages = self.pipeline is not None and self.pipeline.partition is not None
        if self.cuts and becomes_stages and not has_full_names(model):
            check_shards(model, mesh.axis_size("tp"), self.cuts)
        shards = {
            param: name
            for name, param in model.named_parameters()
            if (spec := spec_of(param)) is not None and _is_over_ranks(spec)
        }
        if not job.has_user_shards:
            if job.shares_layers:
                shards |= params_to_cut(model, self.cuts)
            if self._cuts_experts(job):
                shards |= experts_to_cut(model, mesh)
            self._refuse_stepped(job)
        for optimizer in job.optimizers if shards else ():
            refuse_cut_parameters(optimizer, shards)
        if "sp" in mesh.batch_axes:
            _check_shares_sequence(model, mesh)
        if job.layout.dap > 1:
            _log_without_axial_layers(model, job.layout.dap)

    def apply(self, job: Assembly) -> None:
        """Shard layers, then experts, with initial states of optimizers from before their first step."""
        if not job.has_user_shards:
            if job.shares_layers:
                shard_model(job.model, job.mesh, self._cuts_of_stage(job))
            if self.cuts is None or _has_several(job.mesh, "ep"):
                shard_experts(job.model, job.mesh)
            for optimizer in job.optimizers:
                if not has_stepped(optimizer):
                    _shard_first_states(optimizer)
        _log_without_effect(job)
        job.after_step.extend(bias_updates(job.model, job.replicas))

    def _cuts_experts(self, job: Assembly) -> bool:
        return _has_several(job.mesh, "ep") or (job.shares_layers and self.cuts is None)

    def _refuse_stepped(self, job: Assembly) -> None:
        """Refuse optimizers with states of whole parameters, if parameters will be shards."""
        if not any(map(has_stepped, job.optimizers)):
            return
        by_class = job.shares_layers and self.cuts is None
        cuts_experts = self._cuts_experts(job) and has_experts(job.model)
        if cuts_experts or self.cuts or (by_class and can_shard(job.model)):
            raise ValueError(
                "the optimizer has made steps already, but this plan cuts the layers of the model: assemble "
                "first, then load the state of the optimizer"
            )

    def _cuts_of_stage(self, job: Assembly) -> Mapping[str, Rule] | None:
        """Return the cuts of this rank's stages; collective over the stages, which have different names."""
        if not self.cuts or self.pipeline is None:
            return self.cuts
        own = {name for name, part in job.model.named_modules() if not is_elsewhere(part)}
        # Names of all stages, which raise together.
        refuse_unknown_names(self.cuts, own.union(*gather_values(own, job.mesh.group("pp"))))
        return {name: rule for name, rule in self.cuts.items() if name in own}


def _has_several(mesh: Mesh, axis: str) -> bool:
    return mesh.axes.get(axis, 1) > 1


def _is_over_ranks(spec: ShardingSpec) -> bool:
    return any(spec.mesh.axis_size(axis) > 1 for axis in spec.axes)


def _shard_first_states(optimizer: Optimizer) -> None:
    """Shard the states of an optimizer from before its first step, as of Adagrad, like their parameters."""
    for param, states in optimizer.state.items():
        if (spec := spec_of(param)) is None:
            continue
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != param.shape:
                states[key] = spec.slice_of(value)


def _log_without_effect(job: Assembly) -> None:
    """Log ranks for layers or experts of which the model has none to share."""
    model, mesh = job.model, job.mesh
    num_sharing = mesh.world_size // (job.replicas.size * mesh.axes.get("pp", 1))
    specs = list(filter(None, map(spec_of, model.parameters())))
    has_ep = _has_several(mesh, "ep") and not _has_several(mesh, "pp")
    if has_ep and not any("ep" in spec.axes for spec in specs):
        get_dist_logger().log_once(
            f"expert parallelism cuts nothing of {type(model).__name__}, which has no experts that are "
            "known: take layers of colossalai.nn.layer.moe or a model of transformers with experts, or leave "
            "it out",
            ranks=[0],
        )
    # Experts are sharded along the replicas, so the ranks of a tensor group do not share them.
    if num_sharing > 1 and all(spec.axes and {"edp", "ep"}.issuperset(spec.axes) for spec in specs):
        get_dist_logger().log_once(
            f"tensor parallelism cuts nothing of {type(model).__name__}: {num_sharing} ranks each compute "
            "all of it: build it with layers of colossalai.nn, or leave tensor parallelism out; mode '1d' "
            "cuts models of transformers, too, that have a tp_plan or rules in colossalai.shardformer",
            ranks=[0],
        )


def _log_without_axial_layers(model: nn.Module, num_ranks: int) -> None:
    if not any("dap" in extents for _, _, extents in built_for(model)):
        get_dist_logger().log_once(
            f"tensor mode 'dap' cuts nothing of {type(model).__name__}, and each of {num_ranks} ranks "
            "computes all of it: build it with layers of colossalai.nn.layer.axial, or take another mode",
            ranks=[0],
        )


def _check_shares_sequence(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a model of transformers, which attends to whole sequences; warn of other unknown models.

    Raises:
        ValueError: `model` is a transformers model.
    """
    if any(isinstance(part, SharesSequence) for part in model.modules()):
        return
    what = (
        f"sequence parallelism cuts nothing of {type(model).__name__}: each of the "
        f"{mesh.axis_size('sp')} ranks would compute all of every sequence"
    )
    bases = {base for part in model.modules() for base in type(part).__mro__}
    if any(base.__module__.startswith("transformers.") for base in bases):
        raise ValueError(
            f"{what}, since models of transformers attend to whole sequences: leave sequence parallelism out "
            "(tensor mode '1d', tp_size=... of HybridParallelPlugin, cuts layers of such models), or take a "
            "model of colossalai.model_zoo"
        )
    get_dist_logger().log_once(
        f"{what}: build it with TransformerSelfAttentionRing of colossalai.nn or as a model of "
        "colossalai.model_zoo; if it calls ring attention by itself, all is well",
        ranks=[0],
    )
