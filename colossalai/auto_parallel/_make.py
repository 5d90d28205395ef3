"""Construction of a plan from a model, its arguments and a budget: trace, profile, search, figures."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from colossalai.auto_parallel._agreement import broadcast_from_first, described, refuse_other_arguments
from colossalai.auto_parallel._costs import MASTERS, OPTIMIZER_STATES, PRECISIONS, OperationCosts
from colossalai.auto_parallel._inner import CutChoice, InnerProblem
from colossalai.auto_parallel._parts import ModelParts, parts_of_model, zero_stages_of
from colossalai.auto_parallel._plan import AutoPlan, ModuleFigures
from colossalai.auto_parallel._search import Candidate, Search, SearchLimits
from colossalai.auto_parallel._setting import Setting, settings_of
from colossalai.auto_parallel._verify import refuse_unrunnable, verified_plan
from colossalai.auto_parallel.cuts._strategies import Site
from colossalai.auto_parallel.machine._machine import MachineProfile, shipped_profile
from colossalai.auto_parallel.trace._fake_run import batch_of, check_model
from colossalai.auto_parallel.trace._profile_ops import profile_operations
from colossalai.auto_parallel.trace._trace import ModelTrace, repeated_blocks, trace_model
from colossalai.pipeline import can_cut_unseen
from colossalai.runtime import parameter_shapes
from colossalai.shardformer import Rule, check_shards

_MOST_TENSOR_RANKS = 64
_Plain = TypeVar("_Plain")
_NUM_COSTLIEST = 3


def make_plan(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    *,
    world_size: int | None = None,
    memory_budget: float | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    profile: MachineProfile | str | Path | None = None,
    time_limit: float = 10.0,
    gap: float = 1e-3,
    verify: bool | None = None,
) -> AutoPlan:
    """Find the fastest plan to train a model on a number of ranks within a budget of bytes.

    This needs neither a process group nor memory for the model, which is not changed. In a job, all ranks
    call it: rank 0 searches and broadcasts its plan. The plan is then run for a step on the real ranks,
    unless `verify` is False. If the counted bytes exceed the budget, the predicted sizes are scaled by the
    ratio and the plan is made again, up to three times. The run uses a copy of the model, which takes as much
    memory as the plan does; neither the model nor a random state changes.

    Args:
        model: The model, in the mode of its training. It can be on the meta device.
        meta_args: Arguments of its forward by name, for the whole batch: dimension 0 of tensors counts
            samples. Tensors can be on the meta device.
        world_size: Number of ranks. Default: the world size of the job.
        memory_budget: Bytes available on a rank. None: no limit.
        optimizer: "adamw", "adam", "momentum" (SGD with momentum) or "sgd".
        precision: "fp32" (the model's own type), "bf16", "fp16", "bf16_master" or "fp16_naive".
        profile: Profile of the machine, with the times of operations and communication: a profile, the path
            of one, or the name of a shipped one. Default: two CPU cores.
        time_limit: Seconds of the search for the cuts of each layout.
        gap: Gap at which the search for cuts stops, as a fraction of their seconds.
        verify: Whether to run the plan for a step and store the counted peak in its `counted_bytes`.
            Default: True in a job of `world_size` ranks with a budget.

    Raises:
        ValueError: `world_size` is not above 0, `meta_args` does not fit the model or has no batch that the
            ranks could share, an option is unknown, or no plan fits into `memory_budget`: the message has the
            smallest budget that was found to work. Or `verify` is True outside of a job of `world_size`
            ranks, the model cannot be run by itself, or the ranks of the job call it with other arguments.
    """
    is_job = torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if is_job else None
    num_ranks: Any = world_size if world_size is not None else ranks

    def checked() -> dict[str, str]:
        if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
            raise ValueError(
                f"world_size={num_ranks!r}: give the number of ranks that are to train the model"
            )
        if verify and ranks != num_ranks:
            raise ValueError(
                f"verify=True runs the plan on its {num_ranks} ranks, and "
                + ("this is no job" if ranks is None else f"the job has {ranks}")
                + ": call make_plan in a job of as many, or leave verify out"
            )
        _check_budget(memory_budget)
        return {
            **described(model, meta_args),
            **{name: repr(value) for name, value in options.items()},
            **{"world_size": repr(num_ranks), "memory_budget": repr(memory_budget), "verify": repr(verify)},
            "profile": profile.name if isinstance(profile, MachineProfile) else repr(profile),
        }

    options = {"optimizer": optimizer, "precision": precision, "time_limit": time_limit, "gap": gap}
    refuse_other_arguments("make_plan", checked)
    if verify is None:
        verify = ranks == num_ranks and memory_budget is not None
    posed = cache(
        lambda: pose_problem(
            model,
            meta_args,
            world_size=num_ranks,
            optimizer=optimizer,
            precision=precision,
            profile=profile,
            limits=SearchLimits(time_limit=time_limit, gap=gap),
        )
    )

    def make(scale: float = 1.0) -> AutoPlan:
        plan = partial(_make, posed, memory_budget, scale=scale, is_run=bool(verify))
        if not is_job:
            return plan()
        return AutoPlan.from_json(broadcast_from_first(lambda: plan().to_json()))

    return verified_plan(make, model, meta_args, memory_budget=memory_budget) if verify else make()


def _make(
    posed: "Callable[[], PlanProblem]", memory_budget: float | None, *, scale: float, is_run: bool
) -> AutoPlan:
    """Return a plan.

    Args:
        posed: Returns the problem.
        memory_budget: Bytes available on a rank. None: no limit.
        scale: Factor of predicted sizes.
        is_run: Whether the plan is run for a step afterwards.
    """
    problem = posed()
    if is_run:
        refuse_unrunnable(problem.trace)
    stages = zero_stages_of(problem.trace, problem.model, problem.parts)
    settings = [
        each
        for each in problem.settings
        if each.data == 1 or each.zero in stages or (each.pipeline > 1 and each.zero == 0)
    ]
    return problem.best_plan(settings or problem.settings, memory_budget=memory_budget, scale=scale)


def _check_budget(memory_budget: float | None) -> None:
    """Check that a budget is a number of bytes.

    Raises:
        ValueError: `memory_budget` is not a finite number above 0, or None.
    """
    if memory_budget is None:
        return
    if not (is_number(memory_budget) and 0 < memory_budget < math.inf):
        raise ValueError(f"memory_budget={memory_budget!r}: give bytes above 0, or None for any")


def is_number(value: object) -> bool:
    """Whether a value is an integer or a floating point number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """The choice of a plan for a model on a machine.

    Attributes:
        model: The model.
        trace: Its operations.
        parts: Its parts.
        machine: Profile of the machine.
        batch: Samples of the whole batch.
        precision: A key of `PRECISIONS`.
        optimizer: A key of `OPTIMIZER_STATES`.
        settings: The sizes that the runtime supports; at least one.
        search: The search over them.
    """

    model: nn.Module
    trace: ModelTrace
    parts: ModelParts
    machine: MachineProfile
    batch: int
    precision: str
    optimizer: str
    settings: Sequence[Setting]
    search: Search

    def best_plan(
        self, settings: Sequence[Setting], *, memory_budget: float | None, scale: float = 1.0
    ) -> AutoPlan:
        """Return the plan that takes the fewest seconds.

        Args:
            settings: The allowed settings.
            memory_budget: Bytes available on a rank. None: no limit.
            scale: Factor of predicted sizes.

        Raises:
            BudgetError: `memory_budget` is less than any plan needs.
        """
        budget = None if memory_budget is None else memory_budget / scale
        found = self.search.run(settings, budget=budget)
        plan = self.plan_of(found[0], memory_budget=memory_budget, second=_second(found))
        return replace(plan, bytes={name: scale * size for name, size in plan.bytes.items()})

    def plan_of(
        self, best: Candidate, *, memory_budget: float | None = None, second: Candidate | None = None
    ) -> AutoPlan:
        """Return the plan of an answer, either found by a search or requested by the user.

        Args:
            best: The answer.
            memory_budget: Bytes of a rank that limited the search. None: no limit.
            second: The best answer of other sizes. None: unknown.
        """
        inner = self.search.problem_of(best.setting)
        return AutoPlan(
            model=type(self.model).__name__,
            digest=self.trace.digest,
            parameters=parameter_shapes(self.model),
            batch=self.batch,
            setting=best.setting,
            precision=self.precision,
            optimizer=self.optimizer,
            memory_budget=memory_budget,
            profile=self.machine.name,
            rules=rules_of(best),
            modules=_modules(inner, best) | _modules_of_experts(inner, best, self.parts),
            segments=best.prediction.segments,
            blocks=self.parts.blocks if best.prediction.segments else (),
            sync_batch_norm=has_batch_norms(self.model) and best.setting.data > 1 and self.model.training,
            seconds=dict(best.prediction.seconds),
            bytes=dict(best.prediction.bytes),
            costliest=_costliest(inner, best.choice),
            second="" if second is None else str(second.setting),
            second_seconds=0.0 if second is None else second.prediction.step_seconds,
            gap=best.choice.gap,
        )


def pose_problem(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    *,
    world_size: int,
    optimizer: str,
    precision: str,
    profile: MachineProfile | str | Path | None,
    limits: SearchLimits,
) -> PlanProblem:
    """Trace and profile a model, and return the choice of its plan.

    Args:
        model: The model, as for `make_plan`; so are the other arguments.
        meta_args: The arguments of its forward.
        world_size: Number of ranks.
        optimizer: The optimizer.
        precision: The precision.
        profile: The machine.
        limits: Time and quality of the search.

    Raises:
        ValueError: `meta_args` does not fit the model or has no batch that the ranks could share, or an
            option is unknown.
    """
    check_model(model)
    if optimizer not in tuple(OPTIMIZER_STATES):
        raise ValueError(f"optimizer={optimizer!r}: choose one of {', '.join(OPTIMIZER_STATES)}")
    if precision not in tuple(PRECISIONS):
        raise ValueError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    if not (is_number(limits.time_limit) and limits.time_limit > 0):
        raise ValueError(f"time_limit={limits.time_limit!r}: give seconds above 0")
    if not (is_number(limits.gap) and limits.gap >= 0):
        raise ValueError(f"gap={limits.gap!r}: give a part of the seconds, of 0 or more")
    machine = machine_of(profile)
    batch = batch_of(meta_args)
    trace = trace_model(model, meta_args)
    costs = OperationCosts(trace, profile_operations(trace), machine, precision=precision)
    parts = parts_of_model(trace, model)
    refused = _tensor_refusal(model)
    settings = tuple(
        settings_of(
            world_size,
            batch=batch,
            num_blocks=len(parts.blocks),
            # Each microbatch would have its own batch norm statistics.
            can_pipeline=world_size > 1
            and parts.can_be_stages
            and not has_batch_norms(model)
            and can_cut_unseen(model, min(world_size, len(parts.blocks)), meta_args),
            largest_tensor=1 if refused else _MOST_TENSOR_RANKS,
            has_masters=precision in MASTERS,
            num_experts=math.gcd(*(trace.tensors[each.params[0]].shape[0] for each in parts.experts)) or 1,
        )
    )
    if not settings:
        raise ValueError(
            f"a batch of {batch} cannot be shared by {world_size} ranks, and the model "
            + (f"cannot ({refused})" if refused else f"can be shared by {_MOST_TENSOR_RANKS} at most")
            + ": give a batch that is a multiple of the ranks, or fewer ranks"
        )
    search = Search(costs, model, parts, repeated_blocks(trace, model), optimizer=optimizer, limits=limits)
    return PlanProblem(
        model=model,
        trace=trace,
        parts=parts,
        machine=machine,
        batch=batch,
        precision=precision,
        optimizer=optimizer,
        settings=settings,
        search=search,
    )


def _tensor_refusal(model: nn.Module) -> str:
    """Return the reason why tensor-parallel ranks cannot share the layers of a model; empty if they can."""
    try:
        check_shards(model, 1)
    except ValueError as error:
        return str(error)
    return ""


def has_batch_norms(model: nn.Module) -> bool:
    """Whether a model has layers that take statistics over the batch."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())


def machine_of(profile: MachineProfile | str | Path | None) -> MachineProfile:
    """Return a profile, given as it is, by the path of its file, or by the name of a shipped one.

    None is the shipped profile of two CPU cores.

    Raises:
        ValueError: `profile` has another type, or names neither a file nor a shipped profile.
    """
    if isinstance(profile, MachineProfile):
        return profile
    if profile is None:
        return shipped_profile()
    if not isinstance(profile, str | Path):
        raise ValueError(
            f"profile={profile!r}: give a MachineProfile, the path of one, or the name of a shipped one"
        )
    return MachineProfile.load(profile) if os.path.exists(profile) else shipped_profile(str(profile))


def _second(found: Sequence[Candidate]) -> Candidate | None:
    """Return the best answer with another layout of the ranks than the best one."""
    shape = found[0].setting.shape
    return next((each for each in found if each.setting.shape != shape), None)


def rules_of(candidate: Candidate) -> dict[str, Rule]:
    """Return the rules that implement the cuts of layers, by the full names of modules."""
    rules: dict[str, Rule] = {}
    named: dict[str, dict[str, list[str]]] = {}
    for site, strategy in zip(candidate.strategies.sites, candidate.choice.strategies, strict=True):
        if not strategy.is_cut:
            continue
        if site.rule is not None:
            rules[site.name] = site.rule
        else:
            parent, _, child = site.name.rpartition(".")
            assert strategy.field is not None, "a layer without a rule is named by a field of one"
            named.setdefault(parent, {}).setdefault(strategy.field, []).append(child)
    for parent, by_field in named.items():
        # A module whose class has a rule can have layers outside of the rule.
        rule = rules.get(parent, Rule())
        added = {field: (*getattr(rule, field), *names) for field, names in by_field.items()}
        rule = replace(rule, **added)  # type: ignore[arg-type]
        if rule.columns or rule.rows:  # the trace shows that no other layer receives a part
            rule = replace(rule, outside=("*",))
        rules[parent] = rule
    return rules


def _modules(inner: InnerProblem, best: Candidate) -> dict[str, ModuleFigures]:
    """Return the cut, the costs and the step times under other cuts of each layer that could be cut."""
    problem = inner.problem(keeps_activations=True)
    total = best.prediction.step_seconds
    found: dict[str, ModuleFigures] = {}
    for number, (site, strategy) in enumerate(
        zip(best.strategies.sites, best.choice.strategies, strict=True)
    ):
        chosen = site.strategies.index(strategy)
        others: dict[str, float] = {}
        for place, other in enumerate(site.strategies):
            if other.cut != strategy.cut:
                seconds = total + problem.costs[number][place] - problem.costs[number][chosen]
                others[other.cut] = min(seconds, others.get(other.cut, seconds))
        for layer, cut in site.layers.items():
            own = strategy.cut if site.rule is None else cut
            found[layer] = ModuleFigures(
                own if strategy.is_cut else "whole",
                problem.costs[number][chosen] / len(site.layers),
                _bytes_of(inner, site, is_cut=strategy.is_cut) / len(site.layers),
                others,
            )
    return found


def _modules_of_experts(inner: InnerProblem, best: Candidate, parts: ModelParts) -> dict[str, ModuleFigures]:
    """Return the cut of experts, which follows from the sizes, and their costs."""
    setting, found = inner.setting, {}
    costs = inner.params.of_experts
    for module in parts.experts:
        seconds = sum(
            inner.operation_seconds(each.name, best.choice).total
            for each in inner.trace.by_module(module.name)
        )
        sizes = inner.costs.param_sizes(dict.fromkeys(module.params, setting.expert))
        found[module.name] = ModuleFigures(
            "expert" if setting.expert > 1 else "whole",
            setting.microbatches * seconds,
            sum(costs.states(sizes).values()),
            {},
        )
    return found


def _bytes_of(inner: InnerProblem, site: Site, *, is_cut: bool) -> float:
    divisor = inner.setting.tensor if is_cut else 1
    return sum(inner.params.states(inner.costs.param_sizes(dict.fromkeys(site.params, divisor))).values())


def _costliest(inner: InnerProblem, choice: CutChoice) -> tuple[tuple[str, str, float], ...]:
    """Return the operations with the largest share of a step, the first of equal ones."""
    times = inner.setting.microbatches
    found = [
        (
            each.target.removeprefix("aten."),
            each.module,
            times * inner.operation_seconds(each.name, choice).total,
        )
        for each in inner.trace.operations
    ]
    found.sort(key=lambda each: -each[2])
    return tuple(found[:_NUM_COSTLIEST])
