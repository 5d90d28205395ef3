"""`autoparallelize` and its neighbours: a plan of data and tensor parallelism, carried out on a module.

What is trained is the model that was given, cut in place. The plans are those of `make_plan` but for ZeRO and
pipelines, which need an optimizer or a training loop that knows of them; here any optimizer works.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colossalai.auto_parallel._make import (
    PlanProblem,
    described,
    is_number,
    machine_of,
    pose_problem,
    refuse_other_arguments,
    told_by_first,
)
from colossalai.auto_parallel._parts import may_lack_gradients
from colossalai.auto_parallel._plan import AutoPlan, load_plan
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel._strategies import find_strategies
from colossalai.auto_parallel._verify import verified_plan
from colossalai.auto_parallel.machine._machine import LinkLevel, MachineProfile
from colossalai.auto_parallel.tensor_shard._outputs import WholeOutputs, whole_outputs
from colossalai.auto_parallel.tensor_shard._whole_batch import WholeBatch, follow_cuts
from colossalai.auto_parallel.trace._trace import trace_model
from colossalai.context import Mesh
from colossalai.device import OPERATIONS, AlphaBeta, DeviceMesh
from colossalai.nn.parallel import Replicated
from colossalai.runtime import ModelWrapper, assemble
from colossalai.shardformer import Rule
from colossalai.tensor import spec_of

SOLVER_PREFERENCES = ("standard", "tp", "dp")
DATALOADER_OPTIONS = ("replicated", "distributed")
SHARD_OPTIONS = ("standard", "shard", "shard_last_axis", "full_shard")
_ONE_BUCKET_MB = 1 << 20

AlphaBetas = Mapping[tuple[int, int], tuple[float, float]]


def initialize_device_mesh(
    world_size: int = -1,
    physical_devices: Sequence[int] | None = None,
    alpha_beta_dict: AlphaBetas | None = None,
    logical_mesh_shape: Sequence[int] | None = None,
    logical_mesh_id: torch.Tensor | None = None,
) -> DeviceMesh:
    """Return the ranks as a grid.

    Args:
        world_size: Number of ranks; -1: that of the job.
        physical_devices: The global ranks; default: all, in order.
        alpha_beta_dict: For pairs of ranks the seconds of a message, however short, and the seconds per byte.
            An axis is as fast as the slowest pair of neighbours along it. Default: not known.
        logical_mesh_shape: Extents of the grid, outermost first; default: those of `logical_mesh_id`, or one
            axis with all ranks, which a plan may divide in any way.
        logical_mesh_id: The ranks at their places in the grid.

    Raises:
        ValueError: `world_size` is not that of the job, `physical_devices` are not so many, the grid is not
            of these ranks, `alpha_beta_dict` has no pair of an axis, or an argument is of another type.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    _check_kinds(
        physical_devices=physical_devices,
        alpha_beta_dict=alpha_beta_dict,
        logical_mesh_shape=logical_mesh_shape,
        logical_mesh_id=logical_mesh_id,
    )
    if world_size not in (-1, num_ranks):
        raise ValueError(f"world_size={world_size}, and the job has {num_ranks} ranks: leave it out")
    ranks = list(range(num_ranks)) if physical_devices is None else list(physical_devices)
    if sorted(ranks) != list(range(num_ranks)):
        raise ValueError(f"physical_devices={ranks}: give each of the ranks 0 to {num_ranks - 1} once")
    mesh = DeviceMesh(torch.tensor(ranks), logical_mesh_shape, logical_mesh_id)
    if alpha_beta_dict is None:
        return mesh
    lines = [_line_of_axis(mesh, axis, alpha_beta_dict) for axis in range(len(mesh.shape))]
    return DeviceMesh(
        torch.tensor(ranks),
        mesh.shape,
        mesh.logical_mesh_id,
        mesh_alpha=[alpha for alpha, _ in lines],
        mesh_beta=[beta for _, beta in lines],
    )


def _check_kinds(
    *, physical_devices: object, alpha_beta_dict: object, logical_mesh_shape: object, logical_mesh_id: object
) -> None:
    """Refuse arguments of a grid that are of another type.

    Raises:
        ValueError: An argument is of another type.
    """
    for name, value in (
        ("physical_devices", physical_devices),
        ("logical_mesh_shape", logical_mesh_shape),
    ):
        if value is not None and not (
            isinstance(value, Sequence) and all(type(each) is int for each in value)
        ):
            raise ValueError(f"{name}={value!r}: give a list of integers")
    if logical_mesh_id is not None and not isinstance(logical_mesh_id, torch.Tensor):
        raise ValueError(f"logical_mesh_id={logical_mesh_id!r}: give a tensor, such as torch.arange(4)")
    if alpha_beta_dict is None:
        return
    lines = alpha_beta_dict.items() if isinstance(alpha_beta_dict, Mapping) else [(None, None)]
    for pair, line in lines:
        match pair, line:
            case (int(), int()), (alpha, beta) if all(
                is_number(each) and 0 <= each < math.inf for each in (alpha, beta)
            ):
                continue
        raise ValueError(
            f"alpha_beta_dict={alpha_beta_dict!r}: give {{(first, second): (seconds, seconds per byte)}} for "
            "pairs of ranks"
        )


def _line_of_axis(mesh: DeviceMesh, axis: int, known: AlphaBetas) -> tuple[float, float]:
    """Return alpha and beta of the slowest neighbours along an axis.

    Raises:
        ValueError: `known` has none of them.
    """
    places = mesh.logical_mesh_id.movedim(axis, -1).flatten(0, -2) if len(mesh.shape) > 1 else None
    rows = mesh.logical_mesh_id[None] if places is None else places
    found = [
        known[pair]
        for row in rows.tolist()
        for first, second in pairwise(row)
        for pair in ((first, second), (second, first))
        if pair in known
    ]
    if not found and mesh.shape[axis] > 1:
        raise ValueError(
            f"alpha_beta_dict has no pair of ranks that are neighbours along axis {axis} of {mesh.shape}: "
            f"give {{(first, second): (seconds, seconds per byte)}}, as for {tuple(rows[0, :2].tolist())}"
        )
    return max((each[0] for each in found), default=0.0), max((each[1] for each in found), default=0.0)


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
    """Cut a model over the ranks of the job as is fastest, and return the module to train; all ranks call it.

    A normal training loop follows: the module's parameters are those of `model`, of some of which a rank has
    its slice, under the same names and with their `ShardingSpec`; any optimizer works, gradients are complete
    after `backward()`, and `torch.nn.utils.clip_grad_norm_` takes the norm of whole gradients.

    Args:
        model: The model, with the same values on all ranks or not; it is changed in place.
        meta_args: Arguments of its forward by name, for the whole batch; tensors may be on the meta device.
            What is not among them cannot be given to the module later.
        data_loader: Where there are no `meta_args`: yields the batches.
        data_process_func: Makes arguments of the forward of what the loader yields; default: it yields them.
        alpha_beta_dict: See `initialize_device_mesh`, as the next two.
        logical_mesh_shape: Extents of the grid of ranks.
        logical_mesh_id: The ranks at their places in it.
        solver_preference: "standard": what is fastest; "tp": tensor parallelism alone; "dp": data parallelism
            alone.
        dataloader_option: "replicated": the module takes the whole batch on every rank, and its outputs are
            those of the whole batch; "distributed": it takes this rank's part, of which the loss is a mean.
        shard_option: "standard": parameters are cut if that is faster; "shard": some are cut;
            "shard_last_axis": they are cut over the last axis of the grid; "full_shard": over all ranks.
        save_solver_solution: Write the plan to `solver_solution_path`, which `load_plan` reads.
        load_solver_solution: Take the plan of that file in the place of solving.
        solver_solution_path: The file.
        return_solution: Return (module, solution): one line for each operation, how it is cut.
        memory_budget: Bytes of a rank, the states of AdamW included; not above 0: any. A plan for a budget is
            run for a step with a copy of the model, and made again where it takes more, as by `make_plan`.

    Raises:
        ValueError: `meta_args` and `data_loader` are both missing or both given, `meta_args` does not fit the
            model, an option is unknown or contradicts another one, no plan fits into `memory_budget`, or
            `solver_solution_path` is missing, or the plan of another trace. Nothing has been changed then.
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
    """Return the arguments of a forward: those that are given, or those of the first batch of a loader.

    Raises:
        ValueError: `meta_args` and `data_loader` are both given or both missing, `data_process_func` is given
            without a loader, `data_loader` is empty or not iterable, or what it yields is not a mapping.
    """
    if meta_args is not None:
        if data_loader is not None:
            raise ValueError("meta_args and data_loader both say what the forward takes: give one of them")
        if data_process_func is not None:
            raise ValueError(
                "data_process_func makes arguments of what a data_loader yields, and meta_args are given: "
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
    """Do what `autoparallelize` does, over a grid of ranks that is given.

    Args:
        model: As of `autoparallelize`, like all that are not named here.
        meta_args: The arguments of its forward.
        device_mesh: All ranks of the job. Of a grid of several axes the first ones are for data, or the last
            ones for tensor parallelism, or all of them for one of both.
        memory_budget: Bytes of a rank; not above 0: any.
        overlap: Exchange gradients in buckets while the backward runs; otherwise all together behind it.
        solver_preference: "standard", "tp" or "dp".
        dataloader_option: "replicated" or "distributed".
        shard_option: "standard", "shard", "shard_last_axis" or "full_shard".
        save_solver_solution: Write the plan to `solution_path`.
        load_solver_solution: Read it from there.
        solution_path: The file.
        return_solution: Return (module, solution).

    Raises:
        ValueError: `device_mesh` is not that of all ranks of the job, or what `autoparallelize` refuses.
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
        _check_options(solver_preference, dataloader_option, shard_option)
        if (save_solver_solution or load_solver_solution) and solution_path is None:
            raise ValueError("a solution is to be saved or loaded, and no path says where: give its path")
        if not isinstance(solution_path, str | os.PathLike | None):
            raise ValueError(f"the path of the solution is {solution_path!r}: give a str or a Path")
        if not is_number(memory_budget) or math.isnan(memory_budget) or memory_budget == math.inf:
            raise ValueError(f"memory_budget={memory_budget!r}: give bytes above 0, or -1 for any")
        _check_mesh(device_mesh, num_ranks)
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
            profile=_profile_of(device_mesh),
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
            allowed = _allowed(problem, device_mesh.shape, solver_preference, shard_option)
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
            told_by_first(of_first) if dist.is_initialized() else of_first()
        )
        outputs[:] = map(WholeOutputs.from_list, known)
        return AutoPlan.from_json(text)

    is_run = budget is not None and dist.is_initialized() and not load_solver_solution
    plan = verified_plan(solve, model, meta_args, memory_budget=budget) if is_run else solve()
    if save_solver_solution:
        assert solution_path is not None, "it was checked"
        save = partial(plan.save, solution_path)
        told_by_first(save) if dist.is_initialized() else save()
    module = _carried_out(
        plan,
        model,
        device_mesh,
        data=Replicated(**how),
        names=[name for name, value in meta_args.items() if isinstance(value, torch.Tensor) and value.dim()],
        outputs=outputs,
    )
    return (module, solution) if return_solution else module


def _check_mesh(mesh: DeviceMesh, num_ranks: int) -> None:
    """Refuse a grid that is not that of the ranks of the job.

    Raises:
        ValueError: `mesh` is not a `DeviceMesh`, or one of another number of ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh is a {type(mesh).__name__}: give a colossalai.device.DeviceMesh, such as "
            "initialize_device_mesh() returns"
        )
    if mesh.num_devices != num_ranks:
        raise ValueError(
            f"device_mesh has {mesh.num_devices} ranks, and the job {num_ranks}: start it by "
            f"colossalai run --nproc_per_node {mesh.num_devices}"
        )


def _check_options(solver_preference: str, dataloader_option: str, shard_option: str) -> None:
    """Refuse options that are unknown or contradict each other.

    Raises:
        ValueError: `solver_preference`, `dataloader_option` or `shard_option` is unknown, or parameters
            are to be cut by data parallelism alone.
    """
    for name, value, known in (
        ("solver_preference", solver_preference, SOLVER_PREFERENCES),
        ("dataloader_option", dataloader_option, DATALOADER_OPTIONS),
        ("shard_option", shard_option, SHARD_OPTIONS),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(known)}")
    if solver_preference == "dp" and shard_option != "standard":
        raise ValueError(
            f"solver_preference='dp' cuts no parameters, and shard_option={shard_option!r} asks for it: "
            "leave one of them out"
        )


def _allowed(problem: PlanProblem, shape: Sequence[int], preference: str, shard: str) -> list[Setting]:
    """Return the layouts of a grid of ranks that have what the options ask for; at least one.

    Raises:
        ValueError: `shape` has none.
    """
    found = [each for each in problem.settings if _is_allowed(each, shape, preference, shard)]
    if not found:
        raise ValueError(
            f"no layout of {math.prod(shape)} ranks as {tuple(shape)} for a batch of {problem.batch} has "
            f"solver_preference={preference!r} and shard_option={shard!r}: choose others, or a batch that "
            "the ranks divide"
        )
    return found


def _is_allowed(setting: Setting, shape: Sequence[int], preference: str, shard: str) -> bool:
    """Whether a layout is one of a grid of ranks, and what the options ask for."""
    if setting.zero or setting.pipeline > 1 or setting.expert > 1:
        return False
    extents = [1]
    for extent in reversed(shape):
        extents.append(extents[-1] * extent)
    is_of_grid = len(shape) == 1 or setting.tensor in extents
    is_preferred = {
        "standard": True,
        "tp": setting.data == 1,
        "dp": setting.tensor == 1,
    }[preference]
    num_ranks = setting.world_size
    is_cut = {
        "standard": True,
        "shard": setting.tensor > 1 or num_ranks == 1,
        "shard_last_axis": setting.tensor == shape[-1],
        "full_shard": setting.data == 1,
    }[shard]
    return is_of_grid and is_preferred and is_cut


def _profile_of(mesh: DeviceMesh) -> MachineProfile:
    """Return the shipped profile, with the links that a grid knows."""
    profile = machine_of(None)
    if all(value == 1 for value in (*mesh.mesh_alpha, *mesh.mesh_beta)):
        return profile  # what stands for "not known"
    levels, within = [], 1
    for axis in reversed(range(len(mesh.shape))):
        within *= mesh.shape[axis]
        line = AlphaBeta(mesh.mesh_alpha[axis], mesh.mesh_beta[axis])
        levels.append(LinkLevel(num_ranks=within if axis else None, lines=dict.fromkeys(OPERATIONS, line)))
    return replace(profile, links=tuple(levels))


def _solved(
    problem: PlanProblem,
    allowed: Sequence[Setting],
    *,
    budget: float | None,
    scale: float,
    arguments: Mapping[str, Any] | None,
) -> tuple[AutoPlan, list[WholeOutputs]]:
    """Return the best plan, without replicas where their outputs do not make those of the whole batch."""
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
    """Return how outputs of parts of the batch make those of the whole; empty where no rank needs to know.

    Args:
        problem: The problem.
        plan: An answer.
        arguments: Those of the forward, if it takes the whole batch.

    Raises:
        ValueError: Outputs of the model are neither samples nor means nor sums over them.
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
        ValueError: The file at `path` is missing, or is of another trace, or of a layout that is not allowed,
            or its plan takes more than `budget`.
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
    """Return for each operation of a model's trace a line that says how it is cut.

    Args:
        plan: The plan.
        problem: What it answers.
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
    """Return the names of the layers of a rule whose results are parts of the features."""
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
    """Return the module that trains a model by a plan."""
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
    for each in outputs:  # one, if the module takes a batch that ranks share
        WholeBatch(model, mesh.axis("dp"), names, each).attach(module)
    return module
