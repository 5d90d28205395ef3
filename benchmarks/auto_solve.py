"""Planning time of Colossal-Auto: seconds for tracing, profiling, building the problem and solving it.

    python benchmarks/auto_solve.py --json benchmarks/results/auto_solve.json
    python benchmarks/auto_solve.py --only resnet random --rounds 3

The benchmark runs in one process without a process group. Models are on the meta device, and the machines are
profiles that the package includes.

- `resnet`: ResNet-50 of transformers on 2 x 2 ranks (data x tensor), two CPU cores. Published: 126 nodes,
  4.44 s with CBC. Goal: 1 s.
- `gpt3`: GPT-3 with 12 and with 96 layers on 8 x 8 ranks, an A100 each, in bf16 with masters. Goal for 96
  layers: 10 s, and 1.2 times the seconds of 12 layers.
- `random`: 126 nodes, 141 edges, 8 and 15 options: our solver, and HiGHS on the same problem as one integer
  program.

`pose_s` is the time from a traced model to the problem: the possible cuts and their costs. `solve_s` is the
time from the problem to its solution. The `cuts` rows solve one layout, without a budget and with one halfway
between the least bytes and the bytes of the fastest cuts; `nodes` are the solver's, where equal blocks share
nodes. The `search` rows cover all layouts with recomputation, as `make_plan` does after tracing; their time
is in `solve_s`. `gap` is an upper bound of the possible improvement. Goals apply to the sum of `pose_s` and
`solve_s`.
"""

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from harness.rounds import report
from rich.console import Console
from torch import nn

from colossalai.auto_parallel import _make
from colossalai.auto_parallel._make import PlanProblem
from colossalai.auto_parallel._search import Candidate, SearchLimits
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel.solver._choice import BudgetError, ChoiceProblem, problem_of
from colossalai.auto_parallel.solver._ilp import IntegerProgram, solve_choices
from colossalai.model_zoo.gpt import gpt3

T = TypeVar("T")
Row = dict[str, Any]
Build = Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]
GOALS = {"resnet": 1.0, "gpt3 96": 10.0}  # seconds to build and to solve the problem
MOST_TIMES = 1.2  # the seconds of 96 layers over those of 12
LIMIT_S = 120.0  # of the integer program


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call, and its seconds."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return ResNet-50 and its images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return model.train(), {"pixel_values": torch.zeros(32, 3, 224, 224, device="meta")}


def gpt(num_layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return GPT-3 of some layers, and tokens."""
    with torch.device("meta"):
        model = gpt3(num_layers=num_layers, attention_dropout=0.0)
    return model.train(), {"input_ids": torch.zeros(512, 2048, dtype=torch.long, device="meta")}


def pose(build: Build, setting: Setting, machine: Row) -> tuple[PlanProblem, Row]:
    """Trace a new model, and return its choice problem with the seconds of each part."""
    model, given = build()
    seconds: Row = {}

    def in_time(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            result, seconds[name] = timed(lambda: call(*given))
            return result

        return run

    with (
        mock.patch.object(_make, "trace_model", in_time("trace_s", _make.trace_model)),
        mock.patch.object(_make, "profile_operations", in_time("profile_s", _make.profile_operations)),
    ):
        problem, total = timed(
            lambda: _make.pose_problem(
                model, given, world_size=setting.world_size, limits=SearchLimits(), **machine
            )
        )
    return problem, seconds | {"pose_s": total - seconds["trace_s"] - seconds["profile_s"]}


def of_model(
    name: str, build: Build, setting: Setting, machine: Row, budgets: tuple[float, ...]
) -> Iterator[Row]:
    """Yield rows of a model: the cuts of one layout, then the whole search.

    Args:
        name: Name of the model.
        build: Function that returns the model and the arguments of its forward.
        setting: Layout of the `cuts` rows.
        machine: Optimizer, precision and profile.
        budgets: Budgets of the whole search in bytes; a further search has no budget.
    """
    problem, seconds = pose(build, setting, machine)
    merged, merged_s = timed(
        lambda: problem.search.problem_of(setting).merged(keeps_activations=True).problem
    )
    seconds["pose_s"] += merged_s
    free, solve_s = timed(lambda: solve_choices(merged))
    yield row(name, "cuts, free", merged) | seconds | {"solve_s": solve_s, "gap": free.gap}
    budget = 0.5 * (least_bytes(merged) + free.memory)
    found, solve_s = timed(lambda: solve_choices(merged, budget=budget))
    yield row(name, "cuts, budget", merged) | seconds | {"solve_s": solve_s, "gap": found.gap}
    for limit in (None, *budgets):
        # A new search for each budget: it must not reuse results of the previous one.
        problem, seconds = pose(build, setting, machine)
        best, solve_s = timed(partial(run_search, problem, limit))
        how = "free" if limit is None else f"{limit / 1e9:g} GB"
        yield row(name, f"search, {how}", None) | seconds | {"solve_s": solve_s, "gap": best.choice.gap}


def run_search(problem: PlanProblem, budget: float | None) -> Candidate:
    """Return the best solution."""
    return problem.search.run(problem.settings, budget=budget)[0]


def row(name: str, what: str, problem: ChoiceProblem | None) -> Row:
    """Return the columns that describe the problem."""
    return {
        "problem": name,
        "what": what,
        "nodes": None if problem is None else len(problem.names),
        "edges": None if problem is None else len(problem.edges),
        "options": None if problem is None else max(problem.num_options),
    }


def least_bytes(problem: ChoiceProblem) -> float:
    """Return the smallest number of bytes of any choice."""
    try:
        return solve_choices(problem, budget=0.0).memory
    except BudgetError as error:
        return error.least_bytes


def random_problem(num_nodes: int, num_edges: int, num_options: int) -> ChoiceProblem:
    """Return a chain with some longer edges; equal options, and a fifth of the others, have no cost."""
    rng = np.random.default_rng(0)
    pairs = [(node, node + 1) for node in range(num_nodes - 1)]
    while len(pairs) < num_edges:
        first = int(rng.integers(0, num_nodes - 6))
        pair = first, first + int(rng.integers(2, 6))
        if pair not in pairs:
            pairs.append(pair)
    shape = (num_options, num_options)
    tables = {}
    for pair in sorted(pairs):
        tables[pair] = np.where(rng.random(shape) > 0.2, 2 * rng.random(shape), 0.0)
        np.fill_diagonal(tables[pair], 0.0)
    return problem_of(
        [f"node{number}" for number in range(num_nodes)],
        list(rng.random((num_nodes, num_options))),
        list(rng.random((num_nodes, num_options))),
        tables,
    )


def of_random(args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of random problems."""
    for num_options in args.options:
        problem = random_problem(args.nodes, args.edges, num_options)
        seconds_apart = {"trace_s": None, "profile_s": None, "pose_s": None}
        for budget in (None, 0.35 * args.nodes):
            how = "free" if budget is None else "budget"
            found, solve_s = timed(
                lambda problem=problem, budget=budget: solve_choices(problem, budget=budget)
            )
            yield (
                row("random", f"{found.method}, {how}", problem)
                | seconds_apart
                | {"solve_s": solve_s, "gap": found.gap}
            )
            cost, gap, solve_s = by_program(problem, math.inf if budget is None else budget)
            assert gap > 1e-3 or abs(found.cost - cost) <= 2e-3 * cost, "both are within their gaps"
            yield (
                row("random", f"HiGHS alone, {how}", problem)
                | seconds_apart
                | {"solve_s": solve_s, "gap": gap}
            )


def by_program(problem: ChoiceProblem, budget: float) -> tuple[float, float, float]:
    """Solve the whole problem as one integer program, and return its cost, gap and seconds."""
    start = time.perf_counter()
    program = IntegerProgram(problem, unit=None)
    x, bound = program.solve(budget, gap=1e-3, seconds=LIMIT_S)
    seconds = time.perf_counter() - start
    if x is None:
        return math.inf, math.inf, seconds
    cost = problem.cost_of(program.options_of(x))
    return cost, (cost - bound) / cost, seconds


def with_goals(rows: list[Row]) -> list[Row]:
    """Add to each row its goal and whether it is met; for 96 layers, also the ratio to 12 layers."""
    seconds = {(each["problem"], each["what"]): (each["pose_s"] or 0.0) + each["solve_s"] for each in rows}
    for each in rows:
        key = each["problem"], each["what"]
        goal = GOALS.get(each["problem"])
        fewer = seconds.get(("gpt3 12", each["what"])) if each["problem"] == "gpt3 96" else None
        each["goal_s"] = goal
        each["times_12"] = None if fewer is None else seconds[key] / fewer
        is_met = goal is None or (seconds[key] <= goal and (each["times_12"] or 0.0) <= MOST_TIMES)
        each["verdict"] = "-" if goal is None else "met" if is_met else "MISSED"
    return rows


def measure(args: argparse.Namespace, console: Console) -> list[Row]:
    """Return the rows: medians over rounds in which all problems take turns."""
    cpu = {"optimizer": "momentum", "precision": "fp32", "profile": "cpu-2-cores"}
    a100 = {"optimizer": "adamw", "precision": "bf16_master", "profile": "a100-80gb"}
    budgets = tuple(1e9 * each for each in args.budgets)
    jobs: dict[str, Callable[[], Iterator[Row]]] = {}
    if "resnet" in args.only:
        jobs["resnet"] = lambda: of_model("resnet", resnet, Setting(data=2, tensor=2), cpu, (0.7e9,))
    if "gpt3" in args.only:
        for layers in args.layers:
            jobs[f"gpt3 {layers}"] = lambda layers=layers: of_model(
                f"gpt3 {layers}", partial(gpt, layers), Setting(data=8, tensor=8), a100, budgets
            )
    if "random" in args.only:
        jobs["random"] = lambda: of_random(args)
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    with console.status("measuring") as status:
        for number in range(args.rounds):
            for name, job in jobs.items():
                for each in job():
                    status.update(f"round {number + 1} of {args.rounds}: {name}, {each['what']}")
                    found[each["problem"], each["what"]].append(each)
    return with_goals([median_of(rows) for rows in found.values()])


def median_of(rows: list[Row]) -> Row:
    """Return a row with the medians of its seconds."""
    times = [key for key in rows[0] if key.endswith("_s")]
    medians = {
        key: None if rows[0][key] is None else round(statistics.median(each[key] for each in rows), 5)
        for key in times
    }
    return rows[0] | medians


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("resnet", "gpt3", "random")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[12, 96], help="of GPT-3 (default: %(default)s)"
    )
    parser.add_argument(
        "--budgets", type=float, nargs="*", default=[80.0], help="GB of the search of GPT-3 (default: 80)"
    )
    parser.add_argument("--nodes", type=int, default=126, help="of random problems (default: %(default)s)")
    parser.add_argument("--edges", type=int, default=141, help="of random problems (default: %(default)s)")
    parser.add_argument(
        "--options", type=int, nargs="+", default=[8, 15], help="of random problems (default: %(default)s)"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    rows = measure(args, Console(stderr=True))
    report("Seconds of Colossal-Auto for a plan", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
