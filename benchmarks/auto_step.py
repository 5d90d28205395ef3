"""Step time of the plan that Colossal-Auto produces, compared with all plans that can be written by hand.

    colossalai run --nproc_per_node 2 benchmarks/auto_step.py --json benchmarks/results/auto_step_2.json
    colossalai run --nproc_per_node 4 benchmarks/auto_step.py --only gpt --rounds 3

The same ranks measure the machine first. The hand-written plans are all sizes (data x tensor x pipeline, ZeRO
stage, microbatches) that the runtime supports for the ranks, with and without recomputation of all blocks.
Their layers are cut in the way that is predicted to be fastest, and as many as possible ("all cut"). Plans
whose tensor ranks share nothing are left out. The produced plan is the result of the search. All plans run
through the same code (`harness/auto_plans.py`). The losses of a first step are compared before the timing.

- A round builds each plan once, runs some steps and times the last ones; plans take turns. A step is forward,
  loss, backward and update, and ends when its slowest rank ends. Figures are medians over rounds of medians.
- `error` is predicted over measured seconds, less 1. Goal: a median absolute error below 0.2.
- `vs_best` is the measured time relative to the plan with the smallest median. Goal for the produced plan:
  1.05.
- `order` is true if the three fastest plans are predicted in the right order; seconds that differ by less
  than 2 % count as equal. `order_beyond_noise` also counts two plans as equal unless one is slower in every
  round: plans that differ by 9 % change places from round to round.
- `forward`, `backward` and `update` are milliseconds, predicted and measured. A pipeline counts all of its
  backward as forward. Predictions count the communication of tensors there, and that of gradients in the
  update, although some of it runs in the backward.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness.auto_plans import (
    PHASES,
    Case,
    PlannedModel,
    Turns,
    add_sizes,
    cases_of,
    largest,
    shown_progress,
)
from harness.rounds import report

import colossalai
from colossalai.auto_parallel._inner import CutChoice, InnerProblem
from colossalai.auto_parallel._make import PlanProblem, pose_problem
from colossalai.auto_parallel._search import Candidate, SearchLimits
from colossalai.auto_parallel.machine._machine import MachineProfile, measure_machine, shipped_profile
from colossalai.auto_parallel.prediction._prediction import Predictor
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.runtime import RecomputeSegment

Row = dict[str, Any]
MOST_TIMES, MOST_ERROR = 1.05, 0.2  # the goals
EQUAL = 0.02  # largest relative difference of times that count as equal
# Phase of each part of a prediction.
PARTS = {
    "forward": ("forward", "tensor communication", "pipeline bubble and messages"),
    "backward": ("backward", "recomputation"),
    "update": ("data communication", "optimizer"),
}


def hand_plans(problem: PlanProblem) -> dict[str, Candidate]:
    """Return every plan of the ranks, by name."""
    found: dict[str, Candidate] = {}
    for setting in problem.settings:
        inner = problem.search.problem_of(setting)
        for how, choice in cuts_of(inner).items():
            predictor = Predictor(inner, choice, problem.parts)
            blocks = problem.parts.blocks if predictor.chain is not None else ()
            everything = tuple(RecomputeSegment(place, place + 1) for place in range(len(blocks)))
            for segments in dict.fromkeys(((), everything)):
                each = Candidate(
                    setting=setting,
                    strategies=inner.strategies,
                    choice=choice,
                    prediction=predictor.predict(segments),
                )
                if not each.is_redundant:
                    found[f"{setting}{how}{', recomputed' if segments else ''}"] = each
    return found


def cuts_of(inner: InnerProblem) -> dict[str, CutChoice]:
    """Return the fastest cut of the layers and, if it differs, the cut with the least bytes."""
    solve = partial(inner.solve, keeps_activations=True, time_limit=10.0, gap=1e-3)
    found = {"": solve(budget=None)}
    if inner.setting.tensor > 1 and inner.strategies.sites:
        try:
            least = 0.0
            solve(budget=least)
        except BudgetError as error:
            least = error.least_bytes
        smallest = solve(budget=least)
        if smallest.strategies != found[""].strategies:
            found[", all cut"] = smallest
    return found


def name_of_produced(problem: PlanProblem, plans: dict[str, Candidate]) -> str:
    """Return the name of the plan that the search returns; a new plan is added."""
    best = problem.search.run(problem.settings, budget=None)[0]
    for name, each in plans.items():
        is_same = each.setting == best.setting and each.choice.strategies == best.choice.strategies
        if is_same and each.prediction.segments == best.prediction.segments:
            return name
    plans["produced"] = best
    return "produced"


def measure(
    name: str, case: Case, machine: MachineProfile, args: argparse.Namespace, show: Callable[[str], None]
) -> tuple[list[Row], Row]:
    """Return a row for each plan of a model, and their summary."""
    problem = pose_problem(
        case.build_on_meta(),
        case.meta_args(),
        world_size=dist.get_world_size(),
        optimizer=case.optimizer,
        precision="fp32",
        profile=machine,
        limits=SearchLimits(),
    )
    plans = hand_plans(problem)
    produced = name_of_produced(problem, plans)
    if args.most_plans is not None:
        ordered = sorted(plans, key=lambda each: plans[each].prediction.step_seconds)
        plans = {each: plans[each] for each in {*ordered[: args.most_plans], produced}}
        plans = dict(sorted(plans.items()))  # the order of a set differs between ranks
    turns = Turns(
        {each: partial(PlannedModel, problem.plan_of(plan), case) for each, plan in plans.items()},
        lambda plan: show(f"{name}: {plan}"),
    )
    turns.check_same()
    times = turns.time(rounds=args.rounds, repeats=args.repeats, timed=args.timed)
    measured = {each: statistics.median(seconds) for each, seconds in times.items()}
    phases = {
        each: {
            phase: largest([statistics.median(one[phase] for one in turns.phases[each])])[0]
            for phase in PHASES
        }
        for each in plans
    }
    predicted = {each: plan.prediction.step_seconds for each, plan in plans.items()}
    best = min(measured.values())
    rows = [
        {
            "model": name,
            "plan": each + (" (produced)" if each == produced else ""),
            "predicted_ms": round(1e3 * predicted[each], 1),
            "measured_ms": round(1e3 * measured[each], 1),
            "range_ms": [round(1e3 * min(times[each]), 1), round(1e3 * max(times[each]), 1)],
            "error": round(predicted[each] / measured[each] - 1, 3),
            "vs_best": round(measured[each] / best, 3),
        }
        | {
            f"{phase}_{kind}": round(1e3 * value, 1)
            for phase in PHASES
            for kind, value in (
                ("predicted", sum(plans[each].prediction.seconds.get(part, 0.0) for part in PARTS[phase])),
                ("measured", phases[each][phase]),
            )
        }
        for each in sorted(plans, key=lambda each: measured[each])
    ]
    return rows, summary_of(name, produced, predicted=predicted, times=times)


def summary_of(
    name: str, produced: str, *, predicted: Mapping[str, float], times: Mapping[str, Sequence[float]]
) -> Row:
    """Return the summary of a model: the produced plan, and the accuracy of the predictions.

    Args:
        name: The model.
        produced: Plan that the search returns.
        predicted: Seconds by plan.
        times: Measured seconds of each round, by plan.
    """
    measured = {each: statistics.median(seconds) for each, seconds in times.items()}
    errors = [abs(predicted[each] / measured[each] - 1) for each in measured]
    ratio = measured[produced] / min(measured.values())
    error = statistics.median(errors)
    return {
        "model": name,
        "plans": len(measured),
        "produced_vs_best": round(ratio, 3),
        "at_most_1.05": "met" if ratio <= MOST_TIMES else "MISSED",
        "median_error": round(error, 3),
        "largest_error": round(max(errors), 3),
        "at_most_0.2": "met" if error <= MOST_ERROR else "MISSED",
        "order": "right" if is_order_right(predicted, times, in_each_round=False) else "WRONG",
        "order_beyond_noise": "right" if is_order_right(predicted, times, in_each_round=True) else "WRONG",
    }


def is_order_right(
    predicted: Mapping[str, float], times: Mapping[str, Sequence[float]], *, in_each_round: bool
) -> bool:
    """Return whether the three fastest plans are predicted in order; times within the noise are equal.

    Args:
        predicted: Seconds by plan.
        times: Measured seconds of each round, by plan.
        in_each_round: Whether a plan counts as slower only if it is slower in each round, not just in the
            median.
    """
    measured = {each: statistics.median(seconds) for each, seconds in times.items()}
    by_measure = sorted(measured, key=lambda each: measured[each])
    for place, each in enumerate(by_measure[:3]):
        for other in by_measure[place + 1 :]:
            is_slower = measured[other] > (1 + EQUAL) * measured[each]
            if in_each_round:
                is_slower &= all(one > two for one, two in zip(times[other], times[each], strict=True))
            if is_slower and predicted[other] < (1 - EQUAL) * predicted[each]:
                return False
    return True


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("gpt", "bert", "vit", "resnet")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="default: all models")
    parser.add_argument("--rounds", type=int, default=5, help="builds of each plan (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="steps of a build (default: %(default)s)")
    parser.add_argument(
        "--timed", type=int, default=5, help="timed steps at the end of a turn (default: %(default)s)"
    )
    parser.add_argument("--most-plans", type=int, help="only so many, the fastest as predicted; default: all")
    parser.add_argument("--profile", help="a shipped one of a machine; default: the machine is measured")
    parser.add_argument(
        "--profile-s", type=float, default=10.0, help="seconds to measure it (default: %(default)s)"
    )
    add_sizes(parser)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)
    if args.profile is None:
        machine = measure_machine(dtypes=(torch.float32,), seconds=args.profile_s)
    else:
        machine = shipped_profile(args.profile)
    rows: list[Row] = []
    summary: list[Row] = []
    try:
        with shown_progress() as show:
            for name in args.only:
                found, of_all = measure(name, cases_of(args)[name], machine, args, show)
                rows += found
                summary.append(of_all)
    finally:  # keep the measurements before a failure, which took minutes
        report(
            f"Plans of Colossal-Auto on {dist.get_world_size()} ranks",
            rows,
            settings=vars(args),
            json_file=args.json,
            more={"summary": summary},
        )


if __name__ == "__main__":
    main()
