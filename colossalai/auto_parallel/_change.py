"""A plan with a different cut of one layer: its neighbours follow where they must, the rest stays.

The requested cut is fixed, and so is every other layer. If no choice is feasible, the adjacent layers are
freed, then their neighbours, until one is: the fewest layers change. Of the feasible choices, the fastest is
taken.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from colossalai.auto_parallel._inner import CutChoice, InnerProblem
from colossalai.auto_parallel._make import PlanProblem, pose_problem
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel.cuts._strategies import CUT_OF_FIELD, CUTS, Site
from colossalai.auto_parallel.machine._machine import MachineProfile, shipped_profile
from colossalai.auto_parallel.solver._choice import BudgetError, ChoiceProblem, Options, restrict
from colossalai.auto_parallel.solver._ilp import solve_choices
from colossalai.auto_parallel.trace._fake_run import check_model
from colossalai.runtime import refuse_other_model

if TYPE_CHECKING:
    from colossalai.auto_parallel._plan import AutoPlan


def change_cut(
    plan: "AutoPlan",
    name: str,
    cut: str,
    *,
    model: nn.Module | None,
    meta_args: Mapping[str, Any] | None,
    profile: MachineProfile | str | Path | None,
) -> "AutoPlan":
    """Return a plan with a different cut of one layer; see `AutoPlan.with_choice`."""
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r}: choose one of {', '.join(CUTS)}")
    if not isinstance(name, str):
        raise ValueError(
            f"name={name!r}: give the full name of a layer, such as {next(iter(plan.cuts), '')!r}"
        )
    if plan.cuts.get(name) == "expert":
        raise ValueError(
            f"{name!r} are experts, whose cut follows from the sizes of the plan ({plan.setting}): only the "
            "cut of a layer over tensor-parallel ranks can be changed"
        )
    if plan.setting.tensor == 1:
        raise ValueError(
            f"the plan has tp 1 ({plan.setting}), so no layer is cut: give one with tensor-parallel ranks"
        )
    if model is None or meta_args is None:
        raise ValueError(
            "a plan does not hold the model, which it takes to compute the rest again: give model=... and "
            "meta_args=..., as to make_plan"
        )
    problem = _problem_of(plan, model, meta_args, profile)
    inner = problem.search.problem_of(plan.setting)
    current = [_chosen(plan, site) for site in inner.strategies.sites]
    number = _site_of(inner.strategies.sites, name)
    site = inner.strategies.sites[number]
    possible = _options_by_cut(site, name)
    if cut not in possible:
        raise ValueError(f"cut={cut!r}: {name!r} cannot be cut so, choose one of {', '.join(possible)}")
    if current[number] in possible[cut]:
        return plan
    choice = _solve(inner, current, {number: possible[cut]})
    best = problem.search.answer(plan.setting, choice, plan.segments)
    needed = best.prediction.peak_bytes
    if plan.memory_budget is not None and needed > plan.memory_budget:
        raise ValueError(
            f"with cut={cut!r} of {name!r} a rank needs {needed:,.0f} bytes, and the plan has a budget of "
            f"{plan.memory_budget:,.0f}: make a plan for a larger one, and change that"
        )
    made = problem.plan_of(best, memory_budget=plan.memory_budget)
    least = plan.step_seconds * (1 - plan.gap)  # lower bound for all cuts under these sizes
    return replace(
        made,
        second=plan.second,
        second_seconds=plan.second_seconds,
        gap=max(0.0, 1 - least / made.step_seconds),
    )


def _problem_of(
    plan: "AutoPlan",
    model: nn.Module,
    meta_args: Mapping[str, Any],
    profile: MachineProfile | str | Path | None,
) -> PlanProblem:
    """Return the problem that a plan solves.

    Raises:
        ValueError: `model`, `meta_args` or `profile` is not the one of the plan.
    """
    check_model(model)
    refuse_other_model(plan.parameters, model)
    if profile is None:
        try:
            profile = shipped_profile(plan.profile)
        except ValueError as error:
            raise ValueError(
                f"the plan was made by the profile {plan.profile!r}, which is not shipped: give it by "
                "profile=..., as to make_plan"
            ) from error
    problem = pose_problem(
        model,
        meta_args,
        world_size=plan.world_size,
        optimizer=plan.optimizer,
        precision=plan.precision,
        profile=profile,
        limits=SearchLimits(),
    )
    if problem.machine.name != plan.profile:
        raise ValueError(
            f"the plan was made by the profile {plan.profile!r}, and this is {problem.machine.name!r}: its "
            "figures could not be compared with those of the plan"
        )
    if problem.trace.digest != plan.digest:
        raise ValueError(
            f"the plan was made for another trace: of {plan.model}, for a batch of {plan.batch}, in the mode "
            f"that it was in; give that model, and the meta_args that make_plan was given (this is "
            f"{type(model).__name__}, for a batch of {problem.batch})"
        )
    return problem


def _site_of(sites: Sequence[Site], name: str) -> int:
    """Return the number of the site that contains a layer, or that is a module with a rule.

    Raises:
        ValueError: `name` is neither a layer of a site nor a module with a rule.
    """
    for number, site in enumerate(sites):
        if name in site.layers or (name == site.name and site.rule is not None):
            return number
    known = [layer for site in sites for layer in site.layers]
    inside = [layer for layer in known if layer.startswith(f"{name}.")]
    if inside:
        raise ValueError(f"{name!r} has several layers: choose one of {', '.join(map(repr, inside))}")
    near = get_close_matches(name, known, n=3) or known[:5]
    raise ValueError(f"the plan has no layer {name!r} that could be cut: it has {', '.join(map(repr, near))}")


def _options_by_cut(site: Site, name: str) -> dict[str, Options]:
    """Return the possible cuts of a layer, each with the numbers of the strategies of its site."""
    found: dict[str, Options] = {}
    for number, strategy in enumerate(site.strategies):
        cut = site.layers.get(name, strategy.cut) if site.rule is not None else strategy.cut
        cut = cut if strategy.is_cut else "whole"
        found[cut] = (*found.get(cut, ()), number)
    return found


def _chosen(plan: "AutoPlan", site: Site) -> int:
    """Return the number of the strategy of a site in a plan."""
    if all(plan.cuts[layer] == "whole" for layer in site.layers):
        return 0
    if site.rule is not None:
        return 1
    parent, _, child = site.name.rpartition(".")
    rule = plan.rules[parent]
    (field,) = (each for each in CUT_OF_FIELD if child in getattr(rule, each))
    return next(number for number, each in enumerate(site.strategies) if each.field == field)


def _solve(inner: InnerProblem, current: Sequence[int], wanted: Mapping[int, Options]) -> CutChoice:
    """Return the best choice with the wanted options that differs from the current one only near them.

    Raises:
        ValueError: `wanted` is infeasible with every choice for the layers around it.
    """
    problem, num_sites = inner.problem(keeps_activations=True), len(inner.strategies.sites)
    free = set(wanted)
    while True:
        kept: list[Sequence[int]] = [
            wanted.get(node, range(count) if node in free or node >= num_sites else (current[node],))
            for node, count in enumerate(problem.num_options)
        ]
        try:
            options = solve_choices(restrict(problem, kept)).options
        except BudgetError:  # infeasible under any memory
            around = _next_to(problem, free, num_sites)
            if around <= free:
                names = ", ".join(repr(problem.names[node]) for node in wanted)
                raise ValueError(f"{names} cannot be cut so, however the layers around are cut") from None
            free |= around
            continue
        found = [numbers[option] for numbers, option in zip(kept, options, strict=True)]
        return inner.choice_of(found)


def _next_to(problem: ChoiceProblem, nodes: Collection[int], num_sites: int) -> set[int]:
    """Return the sites that share tensors or parameters with some given nodes."""
    around = {other for node in nodes for other in problem.tables_of[node]}
    behind = {other for each in around if each >= num_sites for other in problem.tables_of[each]}
    return {node for node in around | behind if node < num_sites}
