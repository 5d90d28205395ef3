"""Apply a plan to a model and its optimizers in one order.

Pipeline, tensors, batch norms, precision, compilation, recomputation, loss in chunks, data.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import Masters, OptimizerGroup, OptimizerWrapper, apply_precision, refuse_misfit
from colossalai.checkpoint_io import parameter_names
from colossalai.cluster import gather_values
from colossalai.context import Axis, Layout, Mesh, ParallelMode, get_seeds, set_mode
from colossalai.lazy import Materialization, is_lazy
from colossalai.logging import get_dist_logger
from colossalai.monitor import name_modules
from colossalai.nn.layer import SharesSequence
from colossalai.nn.layer.moe import bias_updates
from colossalai.nn.parallel import AppliedDataMethod, ArrivingParams, remove_owners
from colossalai.pipeline import ModelStage, has_full_names, is_counted, is_elsewhere, share_of
from colossalai.runtime._accumulation import AccumulatingOptimizer
from colossalai.runtime._compile import apply_compile, refuse_compiled
from colossalai.runtime._fused_loss import apply_fused_loss
from colossalai.runtime._pipeline import Pipeline
from colossalai.runtime._plan import Plan
from colossalai.runtime._refused_calls import refuse_calls
from colossalai.runtime._stages import has_stepped, join_stages, take_stages
from colossalai.runtime._wrapper import ModelWrapper
from colossalai.runtime.recomputation import apply_recompute, find_blocks
from colossalai.shardformer import (
    Rule,
    can_shard,
    check_shards,
    experts_to_cut,
    follow_batches_once,
    has_experts,
    keep_float32,
    params_to_cut,
    refuse_unknown_names,
    shard_experts,
    shard_model,
    sync_batch_norms,
)
from colossalai.tensor import (
    CHUNK_PLACE,
    ShardingSpec,
    as_memory,
    as_plain_parameter,
    built_for,
    local_slice,
    process_group_of,
    set_spec,
    spec_of,
)
from colossalai.zero import refuse_cut_parameters


def assemble(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    mesh: Mesh,
    device: torch.device,
) -> tuple[ModelWrapper, OptimizerWrapper | None]:
    """Apply the methods of a plan to a model and its optimizer.

    As `assemble_with_optimizers`, which has the whole story, for one optimizer or none.
    """
    given = [] if optimizer is None else [optimizer]
    wrapped_model, wrapped = assemble_with_optimizers(plan, model, given, mesh=mesh, device=device)
    return wrapped_model, wrapped[0] if wrapped else None


@as_memory()  # parameters that a user has cut are slices here, as those that a method has cut
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

    From here on random numbers are drawn from the state of DATA, or, where ranks share sequences, of SEQUENCE
    or TENSOR: different dropout masks on different slices of the batch.

    Args:
        plan: The layout of the ranks and the methods.
        model: The model; it is moved to `device` and changed in place.
        optimizers: Optimizers over its parameters, each of its own ones, before their first step; they are
            changed in place where the parameters are replaced. They share one loss scale.
        mesh: The ranks, laid out as the plan says.
        device: The device of this rank.
        accumulation_steps: Number of microbatches for which the optimizers keep their steps back, so that
            they can be stepped in each of them; see `AccumulatingOptimizer`.

    Raises:
        ValueError: The model or an optimizer has been assembled before, the plan was made for another model,
            the mesh or the model was laid out or built for another plan, an optimizer holds parameters that
            the model or another one has not alone, or it has made steps already and the plan replaces
            parameters.
    """
    _check(model, optimizers)
    given = model
    layout = _layout_of(plan, mesh)
    if plan.made_for is not None:
        refuse_other_model(plan.made_for, model, is_part=has_full_names(model))
    check_built_for(plan, model, mesh)
    name_modules(model)
    replicas = mesh.axis(mesh.batch_axes)
    tensor_axis = None if layout.alike_axis is None else mesh.axis(layout.alike_axis)
    _check_before_cuts(plan, model, optimizers, mesh, tensor_axis)
    if plan.pipeline is not None:
        model = take_stages(model, optimizers, options=plan.pipeline, axis=mesh.axis("pp"))
    is_cut_by_user = _take_users_cut(plan, model, mesh)
    if not is_cut_by_user:
        _share_layers(plan, model, optimizers, mesh, tensor_axis)
    _check_is_cut(model, mesh, replicas)
    _prepare_batch_norms(plan, model, replicas)
    names = {id(param): name for name, param in model.named_parameters()}
    specs = {name: spec_of(param) for name, param in model.named_parameters()}
    arriving = _expect_params(plan, model, replicas, device)
    if plan.pipeline is not None:
        arriving.bring_all()  # what stages share is made equal before it is cast
        join_stages(model, options=plan.pipeline, axis=mesh.axis("pp"))
    if not plan.data.takes_runs:
        arriving.all()
    blocks = find_blocks(model)
    apply_compile(model, plan, blocks=blocks, mesh=mesh, tensor_axis=tensor_axis, device=device)
    apply_recompute(model, plan.recompute, stages=None if plan.pipeline is None else mesh.axis("pp"))
    apply_fused_loss(model, plan)
    # A pipeline applies the precision stage by stage.
    computing = model if plan.pipeline is not None else apply_precision(model, plan.precision, device.type)
    plan.data.check(model, optimizers, blocks=blocks, replicas=replicas)
    data = plan.data.apply(computing, blocks=blocks, replicas=replicas, arriving=arriving)
    masters = arriving.masters()
    masters.start_equal(replicas)
    _keep_specs(model, specs)
    wrapped = _wrap_optimizers(
        plan, model, optimizers, data, masters, mesh, names=names, accumulates=accumulation_steps > 1
    )
    _draw_apart(mesh)
    pipeline = _make_pipeline(plan, model, data, mesh=mesh, tensor_axis=tensor_axis, device=device)
    is_whole = plan.pipeline is None and all(map(_is_whole, model.parameters()))
    wrapper = ModelWrapper(
        model,
        data,
        pipeline=pipeline,
        fused_loss=plan.fused_loss,
        trained_by=wrapped,
        parts=mesh if plan.pipeline is not None or any(map(_is_cut, model.parameters())) else None,
    )
    refuse_calls(
        [given, *(part.model for part in model.modules() if isinstance(part, ModelStage))],
        wrapper,
        is_alone=is_whole and mesh.world_size == 1 and not any(len(each.masters) for each in wrapped),
        is_whole=is_whole,
    )
    for each in wrapped:
        if isinstance(each, AccumulatingOptimizer):
            each.open_window(wrapper, accumulation_steps)
    return wrapper, wrapped


def describe_model(model: nn.Module, plan: Plan) -> str:
    """Return the class of a model and the number of its parameters, with all that other ranks hold of them.

    Args:
        model: The model, before it is assembled. Of a stage of a pipeline the parameters of that stage count.
        plan: The plan.
    """
    if not isinstance(model, nn.Module):
        return ""  # `assemble` refuses it
    specs = ((param, spec_of(param)) for param in model.parameters())
    number = sum(param.numel() if spec is None else math.prod(spec.whole_shape) for param, spec in specs)
    is_stage = has_full_names(model) or (plan.pipeline is not None and plan.pipeline.partition is None)
    return f"{type(model).__name__}, {number:,} parameters{' in this stage' if is_stage else ''}"


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
        from colossalai.runtime.memory import start_line  # formulas that a job needs once, on one rank

        try:
            with as_memory():
                line = start_line(model, optimizers, plan=plan, mesh=mesh, described=described)
        except Exception as error:  # a parameter or an optimizer of the user's own: training goes on
            line = f"{described}: {plan} (bytes unknown: {type(error).__name__}: {error})"
        get_dist_logger().info(line, ranks=[0])


def _is_whole(param: nn.Parameter) -> bool:
    """Return whether this rank holds all values of a parameter."""
    return not _is_cut(param) and local_slice(param) is param and CHUNK_PLACE not in vars(param)


def _is_cut(param: nn.Parameter) -> bool:
    spec = spec_of(param)
    return spec is not None and bool(spec.axes)


def _take_users_cut(plan: Plan, model: nn.Module, mesh: Mesh) -> bool:
    """Return whether a user has cut parameters of a model, and let all others be ordinary ones.

    Raises:
        ValueError: The cut is over other ranks than those of `mesh`, or `plan` has a method that does not
            know how such parameters are used.
    """
    group = process_group_of(model)
    for param in model.parameters():
        as_plain_parameter(param)
    if group is None:
        return False
    if group.mesh.axes != mesh.axes:
        raise ValueError(
            f"{type(model).__name__} is cut over {group}, and the ranks are laid out as {mesh}: lay the job "
            f"out by parallel=dict(tensor=dict(size={group.tp_world_size()}, mode='1d')) in its config"
        )
    unfit = {
        "a pipeline": plan.pipeline is not None,
        "`cuts` of layers": bool(plan.cuts),
        "ZeRO stage 3 by FSDP": plan.data.shards_parameters,
        "compile": plan.compile is not False,
    }
    for what, is_asked in unfit.items():
        if is_asked:
            raise ValueError(
                f"{type(model).__name__} has parameters that were cut by set_tensor_spec, and {what} puts "
                "others in their place, which functions use as they are: leave it out; layers of "
                "colossalai.nn and HybridParallelPlugin(tp_size=...) cut models that it takes"
            )
    return True


def _draw_apart(mesh: Mesh) -> None:
    """Draw random numbers from the state that differs between the ranks with different parts of the batch."""
    states = [ParallelMode.SEQUENCE, ParallelMode.TENSOR] if "sp" in mesh.batch_axes else [ParallelMode.DATA]
    if known := [mode for mode in states if mode in get_seeds()]:
        set_mode(known[0])


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, under all names that they have."""
    return {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}


def refuse_other_model(
    made_for: Mapping[str, tuple[int, ...]], model: nn.Module, *, is_part: bool = False
) -> None:
    """Refuse a model that is not the one that a plan was made for, by the names and shapes of parameters.

    Args:
        made_for: What `parameter_shapes` has returned of that one.
        model: The model.
        is_part: Whether it is this rank's part of it, which has some of the names.

    Raises:
        ValueError: `model` has other names or shapes; the message has the first that differ.
    """
    own = parameter_shapes(model)
    names = own if is_part else dict.fromkeys((*made_for, *own))
    different = [
        f"{name} is {own.get(name, 'not there')}, and {made_for.get(name, 'not there')} in the plan"
        for name in names
        if own.get(name) != made_for.get(name)
    ]
    if different:
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"this {type(model).__name__} is not the model that the plan was made for: "
            f"{'; '.join(different[:3])}{more}: make a plan for it, by make_plan or colossalai plan"
        )


def check_built_for(plan: Plan, module: nn.Module, mesh: Mesh) -> None:
    """Refuse a model, or a loss, whose layers were built for another mesh than that of the plan.

    Layers of `colossalai.nn` remember the tensor mode that was in force when they were built, and the mesh
    that their parameters are cut over. Modules of torch alone may be built at any time.

    Raises:
        ValueError: A layer of `module` was built for another layout or mesh, or a tensor mode that is not the
            plan's; the message names it.
    """
    layout = plan.layout
    if layout is None:
        return
    elsewhere = [
        *(
            f"{name or 'it'}, a {type(part).__name__}, was built for {field} {extent!r}, and the plan has "
            f"{getattr(layout, field)!r}"
            for name, part, extents in built_for(module)
            for field, extent in extents.items()
            if extent != getattr(layout, field) and (field != "mode" or layout.tensor > 1)
            # A layer of no mode is a plain one, of which `cuts` says whether and how it is cut.
            if not (field == "mode" and extent is None and plan.cuts is not None)
        ),
        *(
            f"{name} was built over the axes {spec.mesh.axes}, and the plan has {mesh.axes}"
            for name, param in module.named_parameters()
            if (spec := spec_of(param)) is not None and spec.axes and spec.mesh.axes != mesh.axes
        ),
    ]
    if elsewhere:
        raise ValueError(
            f"{type(module).__name__}: {elsewhere[0]}: "
            "lay the mesh out before layers of colossalai.nn are built, by Booster(plugin=...) or "
            "plugin.configure()"
        )


def _layout_of(plan: Plan, mesh: Mesh) -> Layout:
    """Return the layout of a plan; one that says nothing about it takes any mesh, and only `dp` counts.

    Raises:
        ValueError: The axes of `mesh` are not those of the plan.
    """
    if plan.layout is None:
        return Layout()
    layout = plan.layout.over(mesh.world_size)
    if layout.axes() != mesh.axes:
        raise ValueError(
            f"the plan lays {mesh.world_size} ranks out as {layout.axes()}, and the mesh has {mesh.axes}: "
            "pass the mesh of the plan"
        )
    return layout


def _wrap_optimizers(
    plan: Plan,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    data: AppliedDataMethod,
    masters: Masters,
    mesh: Mesh,
    *,
    names: dict[int, str],
    accumulates: bool,
) -> list[OptimizerWrapper]:
    """Return the optimizers with what they update, loss scale, clipping, and what all ranks decide together.

    Args:
        plan: The plan.
        model: The model, with its methods applied.
        optimizers: The optimizers.
        data: The data method at work.
        masters: Float32 masters of the parameters that have one.
        mesh: The ranks.
        names: Name of each parameter that the model had before the data method, by its `id`.
        accumulates: Whether optimizers keep their steps back.
    """
    if not optimizers:
        return []
    replicas = mesh.axis(mesh.batch_axes)
    group = OptimizerGroup(
        plan.precision.make_scaler(), ranks=mesh.group(tuple(mesh.axes)), replicas=replicas
    )
    shared = [param for param in data.module.parameters() if share_of(param) is not None]
    wrapped: list[OptimizerWrapper] = []
    for optimizer in optimizers:
        _follow_replaced_params(optimizer, model, names)
        others = masters.without({param for each in optimizer.param_groups for param in each["params"]})
        stand_ins, masters = data.stand_ins(optimizer, masters, late=shared), others
        kind = AccumulatingOptimizer if accumulates else OptimizerWrapper
        wrapped.append(
            kind(
                optimizer,
                group=group,
                param_names=_param_names(model, plan),
                masters=stand_ins,
                before_step=plan.precision.step_hooks(),
                # Biases move once in a step, with the first of several optimizers.
                after_step=() if wrapped else bias_updates(model, replicas),
                max_norm=plan.clip_grad_norm,
                norm_type=plan.clip_norm_type,
                stages=None if plan.pipeline is None else mesh.group("pp"),
                counts=None if plan.pipeline is None else is_counted,
            )
        )
    return wrapped


def _make_pipeline(
    plan: Plan,
    model: nn.Module,
    data: AppliedDataMethod,
    *,
    mesh: Mesh,
    tensor_axis: Axis | None,
    device: torch.device,
) -> Pipeline | None:
    """Return what runs a batch through the stages, None without a pipeline."""
    if plan.pipeline is None:
        return None
    return Pipeline(
        model,
        options=plan.pipeline,
        axis=mesh.axis("pp"),
        tensor_axis=tensor_axis,
        device=device,
        precision=plan.precision,
        data=data,
        fused_loss=plan.fused_loss,
    )


def _param_names(model: nn.Module, plan: Plan) -> dict[nn.Parameter, str]:
    """Return the name of each parameter; under a pipeline the one that all stages which share it use."""
    if plan.pipeline is not None:
        return parameter_names(model)
    return {param: name for name, param in model.named_parameters()}


def _check_before_cuts(
    plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh, tensor_axis: Axis | None
) -> None:
    """Check a model and its optimizers while it is whole: so all ranks find a mistake.

    Optimizers have to step right where ranks will hold slices of parameters, or other layers.

    Raises:
        ValueError: An optimizer needs whole parameters, or all of them, and a rank will not have them.
    """
    _check_whole_cuts(plan, model, mesh)
    if plan.pipeline is not None and mesh.axes.get("pp", 1) > 1:
        for optimizer in optimizers:
            _refuse_all_parameters_at_once(optimizer)
    cut = {
        param: name
        for name, param in model.named_parameters()
        if (spec := spec_of(param)) is not None and any(spec.mesh.axis_size(axis) > 1 for axis in spec.axes)
    }
    if process_group_of(model) is None:
        cuts_layers = tensor_axis is not None and tensor_axis.size > 1
        if cuts_layers:
            cut |= params_to_cut(model, plan.cuts)
        if mesh.axes.get("ep", 1) > 1 or (cuts_layers and plan.cuts is None):
            cut |= experts_to_cut(model, mesh)
    for optimizer in optimizers if cut else ():
        refuse_cut_parameters(optimizer, cut)


def _refuse_all_parameters_at_once(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs all parameters in one process: the stages of a pipeline have others.

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


def _share_layers(
    plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh, tensor_axis: Axis | None
) -> None:
    """Cut layers and experts of a model that was not built for it, where there are rules for it.

    Where the plan names what is cut, tensor parallelism alone cuts no experts: expert parallelism does.
    """
    cuts_layers = tensor_axis is not None and tensor_axis.size > 1
    by_class = cuts_layers and plan.cuts is None
    cuts_experts = (by_class or mesh.axes.get("ep", 1) > 1) and has_experts(model)
    has_steps = any(map(has_stepped, optimizers))
    if has_steps and (cuts_experts or plan.cuts or (by_class and can_shard(model))):
        raise ValueError(
            "the optimizer has made steps already, but this plan cuts the layers of the model: assemble "
            "first, then load the state of the optimizer"
        )
    if cuts_layers:
        shard_model(model, mesh, _cuts_of_stage(plan, model, mesh))
    if plan.cuts is None or mesh.axes.get("ep", 1) > 1:
        shard_experts(model, mesh)
    for optimizer in optimizers:
        if not has_stepped(optimizer):
            _cut_first_states(optimizer)


def _cut_first_states(optimizer: Optimizer) -> None:
    """Cut the states that an optimizer has before its first step, as Adagrad does, with their parameters."""
    for param, states in optimizer.state.items():
        if (spec := spec_of(param)) is None:
            continue
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != param.shape:
                states[key] = spec.slice_of(value)


def _check_whole_cuts(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Check the cuts of a model that is to become stages while it is whole: so all ranks find a mistake."""
    is_whole = plan.pipeline is not None and plan.pipeline.partition is not None and not has_full_names(model)
    if plan.cuts and is_whole:
        check_shards(model, mesh.axis_size("tp"), plan.cuts)


def _cuts_of_stage(plan: Plan, model: nn.Module, mesh: Mesh) -> Mapping[str, Rule] | None:
    """Return the cuts of what this rank holds; collective over the stages, each of which has other names."""
    if not plan.cuts or plan.pipeline is None:
        return plan.cuts
    own = {name for name, part in model.named_modules() if not is_elsewhere(part)}
    refuse_unknown_names(plan.cuts, own.union(*gather_values(own, mesh.group("pp"))))
    return {name: rule for name, rule in plan.cuts.items() if name in own}


def _prepare_batch_norms(plan: Plan, model: nn.Module, replicas: Axis) -> None:
    """Let batch norms see the whole batch, where the plan says so, and no batch twice."""
    if plan.sync_batch_norm and not sync_batch_norms(model, replicas) and plan.pipeline is None:
        get_dist_logger().log_once(  # a stage may have none
            f"sync_batch_norm has no effect: {type(model).__name__} has no batch norms", ranks=[0]
        )
    if plan.recompute:
        follow_batches_once(model)


def _check_is_cut(model: nn.Module, mesh: Mesh, replicas: Axis) -> None:
    """Say it where there are tensor-parallel ranks and the model has nothing for them to share."""
    if "sp" in mesh.batch_axes:  # those that share a sequence are replicas, too
        _check_shares_sequence(model, mesh)
    num_sharing = mesh.world_size // (replicas.size * mesh.axes.get("pp", 1))
    specs = list(filter(None, map(spec_of, model.parameters())))
    if mesh.axes.get("ep", 1) > 1 == mesh.axes.get("pp", 1) and not any("ep" in spec.axes for spec in specs):
        get_dist_logger().log_once(
            f"expert parallelism cuts nothing of {type(model).__name__}, which has no experts that are "
            "known: take layers of colossalai.nn.layer.moe or a model of transformers with experts, or leave "
            "it out",
            ranks=[0],
        )
    # Experts are cut along the replicas: that is nothing which the ranks of a tensor group share.
    if num_sharing > 1 and all(spec.axes and {"edp", "ep"}.issuperset(spec.axes) for spec in specs):
        get_dist_logger().log_once(
            f"tensor parallelism cuts nothing of {type(model).__name__}: {num_sharing} ranks each compute "
            "all of it: build it with layers of colossalai.nn, or leave tensor parallelism out; mode '1d' "
            "cuts models of transformers, too, that have a tp_plan or rules in colossalai.shardformer",
            ranks=[0],
        )


def _check_shares_sequence(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a model that is known to see whole sequences only, and warn of one that seems to."""
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


def _check(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if isinstance(model, ModelWrapper) or any(isinstance(each, OptimizerWrapper) for each in optimizers):
        raise ValueError(
            "this model or optimizer has been through a door already: pass the one you built yourself"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    refuse_compiled(model)
    held: set[nn.Parameter] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
            )
        own = {param for group in optimizer.param_groups for param in group["params"]}
        if (twice := next(iter(held & own), None)) is not None:
            raise ValueError(
                f"a parameter of shape {tuple(twice.shape)} is in two optimizers: its gradient is unscaled "
                "and clipped with the step of one, so give each optimizer parameters of its own"
            )
        held |= own


def _expect_params(plan: Plan, model: nn.Module, replicas: Axis, device: torch.device) -> ArrivingParams:
    """Return the parameters of the model, of which none is there yet: no values, device, precision."""
    refuse_misfit(plan.precision, shards_parameters=plan.data.shards_parameters)
    remove_owners(model.parameters())  # those of an earlier boost
    keep_float32(model)
    casts = plan.precision.casts(model, float32_grads=plan.data.allows_float32_grads(replicas))
    # What is left of a lazy one: this rank's stage, and its slices.
    return ArrivingParams(model, casts, device, lazy=Materialization(model) if is_lazy(model) else None)


def _keep_specs(model: nn.Module, specs: dict[str, ShardingSpec | None]) -> None:
    """Let parameters that a method has put in the place of others carry the specs of those."""
    for name, param in model.named_parameters():
        spec = specs[name]
        if spec is not None and spec_of(param) is None:
            set_spec(param, spec)


def _follow_replaced_params(optimizer: Optimizer, model: nn.Module, names: dict[int, str]) -> None:
    """Let the optimizer hold the parameters that the model has now, where a method has replaced them."""
    now = dict(model.named_parameters())
    for number, group in enumerate(optimizer.param_groups):
        replaced = [_successor(param, names, now, number) for param in group["params"]]
        changed = any(new is not old for new, old in zip(replaced, group["params"], strict=True))
        if changed and optimizer.state:
            raise ValueError(
                "the optimizer has made steps already, but this plan replaces parameters: assemble first, "
                "then load the state of the optimizer"
            )
        group["params"] = replaced


def _successor(
    param: nn.Parameter, names: dict[int, str], now: dict[str, nn.Parameter], group: int
) -> nn.Parameter:
    if id(param) not in names:
        raise ValueError(
            f"group {group} of the optimizer holds a parameter of shape {tuple(param.shape)} that the model "
            "does not have: build the optimizer from the parameters of the model that you pass with it"
        )
    return now[names[id(param)]]
