"""`autoparallelize` and `initialize_model`: a plan of data and tensor parallelism, carried out on a module.

The given model is cut in place and trained. The plans are those of `make_plan` without ZeRO and pipelines,
which need support by the optimizer or the training loop; here any optimizer works.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colossalai.auto_parallel._agreement import broadcast_from_first, described, refuse_other_arguments
from colossalai.auto_parallel._make import PlanProblem, is_number, pose_problem
from colossalai.auto_parallel._parts import may_lack_gradients
from colossalai.auto_parallel._plan import AutoPlan, load_plan
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel._verify import verified_plan
from colossalai.auto_parallel.cuts._find import find_strategies
from colossalai.auto_parallel.tensor_shard._grid import AlphaBetas, check_mesh, profile_of
from colossalai.auto_parallel.tensor_shard._grid import initialize_device_mesh as initialize_device_mesh
from colossalai.auto_parallel.tensor_shard._options import allowed_settings, check_options
from colossalai.auto_parallel.tensor_shard._outputs import WholeOutputs, whole_outputs
from colossalai.auto_parallel.tensor_shard._whole_batch import WholeBatch, follow_cuts
from colossalai.auto_parallel.trace._trace import trace_model
from colossalai.context import Mesh
from colossalai.device import DeviceMesh
from colossalai.nn.parallel import Replicated
from colossalai.runtime import ModelWrapper, assemble
from colossalai.shardformer import Rule
from colossalai.tensor import spec_of

_ONE_BUCKET_MB = 1 << 20


def autoparallelize(  # noqa: PLR0913 - the documented arguments
    model: nn.Module,
    meta_args: Mapping[str, Any] | None = None,
    data_loader: Iterable[Any] | None = None,
    data_process_func: Callable[[Any], Mapping[str, Any]] | None = None,
    alpha_beta_dict: AlphaBetas | None = None,
    logical_mesh_shape: Sequence[int] | None = None,
    logical_mesh_id: torch.Tensor | None = None,
    solver_preference: str = "standard",
    dataloader_option: str = "replicated",
    shard_option: str = "standard",
    save_solver_solution: bool = False,
    load_solver_solution: bool = False,
    solver_solution_path: str | os.PathLike[str] | None = None,
    return_solution: bool = False,
    memory_budget: float = -1.0,
) -> Any:
    """Cut a model over the ranks of the job in the fastest way, and return the module to train; collective.

    A normal training loop follows: the module has the parameters of `model`, some of them as slices of this
    rank, under the same names and with their `ShardingSpec`; any optimizer works, gradients are complete
    after `backward()`, and `torch.nn.utils.clip_grad_norm_` takes the norm of whole gradients.

    Args:
        model: The model, with the same values on all ranks or not; it is changed in place.
        meta_args: Arguments of its forward by name, for the whole batch. Tensors can be on the meta device.
            The module does not accept other arguments later.
        data_loader: Batches to take the arguments from, instead of `meta_args`.
        data_process_func: Function from a batch to the arguments of the forward. Default: the batch itself.
        alpha_beta_dict: See `initialize_device_mesh`, as for the next two.
        logical_mesh_shape: Extents of the grid of ranks.
        logical_mesh_id: The ranks at their places in it.
        solver_preference: "standard": the fastest plan; "tp": only tensor parallelism; "dp": only data
            parallelism.
        dataloader_option: "replicated": the module takes the whole batch on every rank, and returns the
            outputs of the whole batch; "distributed": it takes this rank's part, and the loss is the mean of
            that part.
        shard_option: "standard": parameters are cut if that is faster; "shard": some are cut;
            "shard_last_axis": they are cut over the last axis of the grid; "full_shard": over all ranks.
        save_solver_solution: Whether to write the plan to `solver_solution_path`, for `load_plan`.
        load_solver_solution: Whether to load the plan from that file instead of solving.
        solver_solution_path: The file.
        return_solution: Whether to return (module, solution), with a line on the cut of each operation.
        memory_budget: Bytes of a rank, including the states of AdamW; not above 0: no limit. A plan for a
            budget is run for a step with a copy of the model, and made again if it takes more, as by
            `make_plan`.

    Raises:
        ValueError: `meta_args` and `data_loader` are both missing or both given, `meta_args` does not fit the
            model, an option is unknown or contradicts another one, no plan fits into `memory_budget`, or
            `solver_solution_path` is missing, or has the plan of another trace. The model is then unchanged.
    """
    given: list[Any] = []

    def checked() -> dict[str, str]:
        given[:] = (
            _given_arguments(meta_args, data_loader, data_process_func),
            initialize_device_mesh(
                alpha_beta_dict=alpha_beta_dict,
                logical_mesh_shape=logical_mesh_shape,
                logical_mesh_id=logical_mesh_id,
            ),
        )
        return {}

    refuse_other_arguments("autoparallelize", checked)
    arguments, mesh = given
    return initialize_model(
        model,
        arguments,
        mesh,
        memory_budget,
        overlap=True,
        solver_preference=solver_preference,
        dataloader_option=dataloader_option,
        shard_option=shard_option,
        save_solver_solution=save_solver_solution,
        load_solver_solution=load_solver_solution,
        solution_path=solver_solution_path,
        return_solution=return_solution,
    )


def _given_arguments(
    meta_args: Mapping[str, Any] | None,
    data_loader: Iterable[Any] | None,
    data_process_func: Callable[[Any], Mapping[str, Any]] | None,
) -> Mapping[str, Any]:
    """Return the arguments of a forward: given ones, or those of the first batch of a loader.

    Raises:
        ValueError: `meta_args` and `data_loader` are both given or both missing, `data_process_func` is given
            without a loader, `data_loader` is empty or not iterable, or does not yield a mapping.
    """
    if meta_args is not None:
        if data_loader is not None:
            raise ValueError("meta_args and data_loader both define the arguments: give one of them")
        if data_process_func is not None:
            raise ValueError(
                "data_process_func makes arguments of a data_loader's batches, and meta_args are given: "
                "leave one of them out"
            )
        return meta_args
    if data_loader is None:
        raise ValueError(
            "give meta_args, the arguments of the model's forward by name, or a data_loader that yields them"
        )
    if data_process_func is not None and not callable(data_process_func):
        raise ValueError(
            f"data_process_func is a {type(data_process_func).__name__}: give a function that takes a batch"
        )
    if not isinstance(data_loader, Iterable):
        raise ValueError(
            f"data_loader is a {type(data_loader).__name__}: give a DataLoader, or other batches to iterate"
        )
    nothing = object()
    batch = next(iter(data_loader), nothing)
    if batch is nothing:
        raise ValueError("data_loader is empty: give one with a batch, or meta_args")
    given = data_process_func(batch) if data_process_func is not None else batch
    if not isinstance(given, Mapping) and data_process_func is not None:
        raise ValueError(
            f"data_process_func returns a {type(given).__name__}: let it return a dict of the arguments of "
            "the model's forward"
        )
    if not isinstance(given, Mapping):
        raise ValueError(
            f"data_loader yields a {type(batch).__name__}: give data_process_func, which makes a dict of the "
            "arguments of the model's forward of it"
        )
    return given


def initialize_model(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    device_mesh: DeviceMesh,
    memory_budget: float = -1.0,
    overlap: bool = False,
    solver_preference: str = "standard",
    dataloader_option: str = "replicated",
    shard_option: str = "standard",
    save_solver_solution: bool = False,
    load_solver_solution: bool = False,
    solution_path: str | os.PathLike[str] | None = None,
    return_solution: bool = False,
) -> Any:
    """Apply `autoparallelize` to a given grid of ranks.

    Args:
        model: The model, as for `autoparallelize`; so are all arguments not described here.
        meta_args: The arguments of its forward.
        device_mesh: All ranks of the job. In a grid of several axes the first ones are for data parallelism,
            or the last ones for tensor parallelism, or all of them for one of both.
        memory_budget: Bytes of a rank; not above 0: no limit.
        overlap: Whether to average gradients in buckets while the backward runs; otherwise all together
            afterwards.
        solver_preference: "standard", "tp" or "dp".
        dataloader_option: "replicated" or "distributed".
        shard_option: "standard", "shard", "shard_last_axis" or "full_shard".
        save_solver_solution: Whether to write the plan to `solution_path`.
        load_solver_solution: Whether to load it from there.
        solution_path: The file.
        return_solution: Whether to return (module, solution).

    Raises:
        ValueError: `device_mesh` does not consist of all ranks of the job, or `autoparallelize` would raise.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = {
        "solver_preference": solver_preference,
        "dataloader_option": dataloader_option,
        "shard_option": shard_option,
        "memory_budget": max(memory_budget, -1.0) if is_number(memory_budget) else memory_budget,
        "overlap": bool(overlap),
        "save_solver_solution": bool(save_solver_solution),
        "load_solver_solution": bool(load_solver_solution),
    }

    def checked() -> dict[str, str]:
        check_options(solver_preference, dataloader_option, shard_option)
        if (save_solver_solution or load_solver_solution) and solution_path is None:
            raise ValueError("a solution is to be saved or loaded without a path: give its path")
        if not isinstance(solution_path, str | os.PathLike | None):
            raise ValueError(f"the path of the solution is {solution_path!r}: give a str or a Path")
        if not is_number(memory_budget) or math.isnan(memory_budget) or memory_budget == math.inf:
            raise ValueError(f"memory_budget={memory_budget!r}: give bytes above 0, or -1 for any")
        check_mesh(device_mesh, num_ranks)
        names = {name: repr(value) for name, value in options.items()}
        mesh = str(device_mesh.logical_mesh_id.tolist())
        return {**described(model, meta_args), **names, "device_mesh": mesh}

    refuse_other_arguments("initialize_model", checked)
    posed = cache(
        lambda: pose_problem(
            model,
            meta_args,
            world_size=num_ranks,
            optimizer="adamw",
            precision="fp32",
            profile=profile_of(device_mesh),
            limits=SearchLimits(must_cut=shard_option != "standard" or solver_preference == "tp"),
        )
    )
    budget = memory_budget if memory_budget > 0 else None
    is_whole = dataloader_option == "replicated"
    solution: list[str] = []
    outputs: list[WholeOutputs] = []
    how: dict[str, Any] = {} if overlap else {"bucket_cap_mb": _ONE_BUCKET_MB}

    def solve(scale: float = 1.0) -> AutoPlan:
        def of_first() -> list[Any]:
            problem = posed()
            allowed = allowed_settings(problem, device_mesh.shape, solver_preference, shard_option)
            arguments = meta_args if is_whole else None
            if load_solver_solution:
                assert solution_path is not None, "it was checked"
                plan = _loaded(solution_path, problem, allowed, budget)
                known = _outputs_of(problem, plan, arguments)
            else:
                plan, known = _solved(problem, allowed, budget=budget, scale=scale, arguments=arguments)
            lacks_gradients = may_lack_gradients(problem.trace)
            outputs_of_parts = [each.as_list() for each in known]
            return [plan.to_json(), solution_of(plan, problem), outputs_of_parts, lacks_gradients]

        text, solution[:], known, how["find_unused_parameters"] = (
            broadcast_from_first(of_first) if dist.is_initialized() else of_first()
        )
        outputs[:] = map(WholeOutputs.from_list, known)
        return AutoPlan.from_json(text)

    is_run = budget is not None and dist.is_initialized() and not load_solver_solution
    plan = verified_plan(solve, model, meta_args, memory_budget=budget) if is_run else solve()
    if save_solver_solution:
        assert solution_path is not None, "it was checked"
        save = partial(plan.save, solution_path)
        broadcast_from_first(save) if dist.is_initialized() else save()
    module = _carried_out(
        plan,
        model,
        device_mesh,
        data=Replicated(**how),
        names=[name for name, value in meta_args.items() if isinstance(value, torch.Tensor) and value.dim()],
        outputs=outputs,
    )
    return (module, solution) if return_solution else module


def _solved(
    problem: PlanProblem,
    allowed: Sequence[Setting],
    *,
    budget: float | None,
    scale: float,
    arguments: Mapping[str, Any] | None,
) -> tuple[AutoPlan, list[WholeOutputs]]:
    """Return the best plan, without replicas if the whole outputs do not follow from theirs."""
    plan = problem.best_plan(allowed, memory_budget=budget, scale=scale)
    try:
        return plan, _outputs_of(problem, plan, arguments)
    except ValueError:
        undivided = [each for each in allowed if each.data == 1]
        if not undivided:
            raise
        return problem.best_plan(undivided, memory_budget=budget, scale=scale), []


def _outputs_of(
    problem: PlanProblem, plan: AutoPlan, arguments: Mapping[str, Any] | None
) -> list[WholeOutputs]:
    """Return the reduction from outputs of parts of the batch to the whole; empty if no rank needs it.

    Args:
        problem: The problem.
        plan: Its plan.
        arguments: Arguments of the forward, if it takes the whole batch.

    Raises:
        ValueError: The model has outputs that are neither samples nor means nor sums over them.
    """
    num_parts = plan.setting.data
    if arguments is None or num_parts == 1:
        return []
    own = slice(problem.batch // num_parts)
    part = {
        name: value[own] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in arguments.items()
    }
    return [whole_outputs(problem.trace, trace_model(problem.model, part), num_parts)]


def _loaded(
    path: str | os.PathLike[str], problem: PlanProblem, allowed: Sequence[Setting], budget: float | None
) -> AutoPlan:
    """Return the plan of a file.

    Raises:
        ValueError: The file at `path` is missing, has the plan of another trace or of a layout that is not
            allowed, or its plan takes more than `budget`.
    """
    plan = load_plan(os.fspath(path))
    if plan.digest != problem.trace.digest:
        raise ValueError(
            f"{os.fspath(path)} is the plan of another trace, of {plan.model} with a batch of {plan.batch}: "
            f"this is {type(problem.model).__name__} with a batch of {problem.batch}, or other layers; "
            "solve again"
        )
    if plan.setting not in allowed:
        raise ValueError(
            f"{os.fspath(path)} lays the ranks out as {plan.setting}, which is none of the layouts of this "
            f"grid and these options: {'; '.join(map(str, allowed))}"
        )
    needed = plan.counted_bytes or plan.peak_bytes
    if budget is not None and needed > budget:
        raise ValueError(
            f"{os.fspath(path)} is a plan that takes {needed:,.0f} bytes of a rank, and memory_budget is "
            f"{budget:,.0f}: solve again with it"
        )
    return plan


def solution_of(plan: AutoPlan, problem: PlanProblem) -> list[str]:
    """Return a line on the cut of each operation in a model's trace.

    Args:
        plan: The plan.
        problem: The problem that it solves.
    """
    strategies = find_strategies(problem.trace, problem.model, plan.setting.tensor)
    parts = {f"{name}.{key}".strip(".") for name, rule in plan.rules.items() for key in _giving_parts(rule)}
    cut_followers = {site.gives for site in strategies.sites if site.name in parts}
    lines = []
    for each in problem.trace.operations:
        owner = each.module
        while owner and owner not in plan.cuts:
            owner = owner.rpartition(".")[0]
        cut = plan.cuts.get(owner, "whole")
        if strategies.followers_of.get(each.name) in cut_followers - {None}:
            cut = "cut as its operands are"
        place = each.module or "the model"
        lines.append(f"{each.name}: {each.target.removeprefix('aten.')} of {place}: {cut}")
    return lines


def _giving_parts(rule: Rule) -> tuple[str, ...]:
    """Return the names of the layers of a rule that output parts of the features."""
    return (*rule.columns, *rule.channel_norms)


def _carried_out(
    plan: AutoPlan,
    model: nn.Module,
    device_mesh: DeviceMesh,
    *,
    data: Replicated,
    names: Sequence[str],
    outputs: Sequence[WholeOutputs],
) -> ModelWrapper:
    """Return the module that trains a model under a plan."""
    lowered = plan.runtime_plan()
    layout = lowered.layout
    assert layout is not None, "a produced plan says its layout"
    if plan.setting.data > 1:
        lowered = replace(lowered, data=data)
    own = device_mesh.mesh
    mesh = Mesh(
        layout.over(own.world_size).axes(),
        rank=own.rank,
        device_type=own.device_type,
        order=own.order,
        views={"dp": ("edp", "ep")},
    )
    mesh.take_groups_of(own)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    module, _ = assemble(lowered, model, mesh=mesh, device=device)
    cut = {
        name
        for name, param in module.named_parameters()
        if (spec := spec_of(param)) is not None and "tp" in spec.axes
    }
    if cut:
        follow_cuts(model, mesh.axis("tp"), cut)
    for each in outputs:  # one element if ranks share the batch of the module, none otherwise
        WholeBatch(model, mesh.axis("dp"), names, each).attach(module)
    return module
