"""Peak memory and step time of Colossal-Auto's plans within budgets, compared with other ways to save memory.

    colossalai run --nproc_per_node 1 benchmarks/auto_memory.py --json benchmarks/results/auto_memory.json
    colossalai run --nproc_per_node 2 benchmarks/auto_memory.py --only gpt2 --budgets 5

The models are a GPT-2 medium with a few layers and ResNet-50 of transformers. Budgets are equally spaced,
from the smallest that has a plan to the memory of the fastest plan. On one rank, the plans are compared with
other methods for the same budgets: rotor's segments, Chen's, no recomputation, and torch's compiled model
with `activation_memory_budget` (a fraction of the activations that it would save).

- `budget`, `predicted` and `peak` are MiB per rank. `peak` counts the bytes of all live tensors in the third
  step, as the verification of plans does, on the rank with the most. Parameters, states and buckets in memory
  shared by ranks are included. Memory inside compiled code is not. Goal: `peak` never exceeds the budget.
- `allocated` is the same figure by torch's allocator: the bytes before the step, plus the largest rise within
  it. It includes the temporary memory of kernels and compiled code. CPU only.
- `step_ms` is forward, loss, backward and update: the median over rounds in which all variants take turns.
  Goal: a larger budget is never slower by more than 5 %.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from harness.auto_plans import (
    NO_DROPOUT,
    PHASES,
    Case,
    Model,
    PlannedModel,
    Turns,
    largest,
    loss_of,
    make_optimizer,
    shown_progress,
)
from harness.memory import AllocatedPeak
from harness.rounds import report
from torch import nn

import colossalai
from colossalai.auto_parallel import AutoPlan
from colossalai.auto_parallel._make import PlanProblem, pose_problem
from colossalai.auto_parallel._search import Candidate, SearchLimits
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel._verify import LiveByteCounter
from colossalai.auto_parallel.checkpoint._chain import Chain, simulate
from colossalai.auto_parallel.checkpoint._chen import solve_chen
from colossalai.auto_parallel.checkpoint._rotor import solve_rotor
from colossalai.auto_parallel.prediction._prediction import Predictor
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.cluster import broadcast_value
from colossalai.model_zoo.gpt import GPT, GPT2_MEDIUM
from colossalai.runtime import RecomputeSegment

Row = dict[str, Any]
NOISE = 1.05  # largest ratio of times that count as equal
MIB = 2**20
PEERS: Mapping[str, Callable[[Chain, int], tuple[RecomputeSegment, ...]]] = {
    "rotor": solve_rotor,
    "chen": solve_chen,
}


def case_of(name: str, args: argparse.Namespace) -> Case:
    """Return the model and its batch."""
    generator = torch.Generator().manual_seed(0)
    if name == "gpt2":
        shape = replace(
            GPT2_MEDIUM,
            num_layers=args.layers,
            vocab_size=args.vocab,
            max_position_embeddings=args.seq,
            **NO_DROPOUT,
            **({} if args.hidden is None else {"hidden_size": args.hidden}),
        )
        tokens = torch.randint(args.vocab, (args.batch, args.seq), generator=generator)
        return Case(build=partial(GPT, shape), argument="input_ids", batch=(tokens, tokens))
    images = torch.randn(args.images, 3, args.size, args.size, generator=generator)
    classes = torch.randint(1000, (args.images,), generator=generator)
    build = partial(resnet50, args.depth)
    return Case(build=build, argument="pixel_values", batch=(images, classes), optimizer="momentum")


def resnet50(depth: int | None) -> nn.Module:
    """Return ResNet-50, or a ResNet with the given number of blocks in each stage."""
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = {} if depth is None else {"depths": [depth] * 4, "hidden_sizes": [32] * 4, "embedding_size": 16}
    return ResNetForImageClassification(ResNetConfig(num_labels=1000, **depths))


class CompiledModel:
    """A model compiled by torch that saves a fraction of its activations for the backward.

    Args:
        case: Model and batch.
        part: `activation_memory_budget`.
    """

    def __init__(self, case: Case, part: float) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._plain = case.build().train()
        self._model = torch.compile(self._plain)
        self._optimizer = make_optimizer(case.optimizer, self._plain, is_sharded=False)
        self._batch, self._part = case.batch, part

    def step(self) -> torch.Tensor:
        """Train on the batch once."""
        self.zero_grad()
        with torch._functorch.config.patch(activation_memory_budget=self._part):  # read at the first step
            loss = loss_of(self._model(self._batch[0]), self._batch[1])
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def zero_grad(self) -> None:
        """Release the gradients."""
        self._optimizer.zero_grad()

    def live(self) -> int:
        """Return the bytes of parameters, buffers and states."""
        states = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return sum(each.nbytes for each in (*self._plain.parameters(), *self._plain.buffers(), *states))


def plans_within(problem: PlanProblem, count: int) -> tuple[dict[float, AutoPlan], AutoPlan]:
    """Return rank 0's plans: one for each budget, ascending, and the fastest."""

    def make(budget: float | None) -> AutoPlan:
        plan = problem.plan_of(problem.search.run(problem.settings, budget=budget)[0], memory_budget=budget)
        return AutoPlan.from_json(broadcast_value(plan.to_json(), source=0))

    free = make(None)
    least = free.peak_bytes
    try:
        make(1.0)
    except BudgetError as error:
        least = error.least_bytes
    steps = max(count - 1, 1)
    budgets = [least + number * (free.peak_bytes - least) / steps for number in range(count)]
    return {budget: make(budget) for budget in budgets}, free


def by_segments(
    problem: PlanProblem,
    budgets: Sequence[float],
    solve: Callable[[Chain, int], tuple[RecomputeSegment, ...]],
) -> dict[float, AutoPlan]:
    """Return plans of one rank that recompute some segments, for the budgets that they fit into."""
    inner = problem.search.problem_of(Setting())
    choice = inner.whole()
    predictor = Predictor(inner, choice, problem.parts)
    chain = predictor.chain
    if chain is None:
        return {}
    # Memory outside the chain does not depend on the recomputation.
    outside = predictor.predict().peak_bytes - simulate(chain, ()).peak_bytes
    found = {}
    for budget in budgets:
        try:
            segments = solve(chain, int(budget - outside))
        except ValueError:
            continue
        best = Candidate(
            setting=Setting(),
            strategies=inner.strategies,
            choice=choice,
            prediction=predictor.predict(segments),
        )
        found[budget] = problem.plan_of(best, memory_budget=budget)
    return found


def peak_of(build: Callable[[], Model], case: Case) -> tuple[float, float]:
    """Return the largest rank's peak in the third step: by counted bytes, and by the allocator."""
    with LiveByteCounter(outside=case.batch) as memory:
        model = build()
        model.step()
        model.step()
        model.zero_grad()  # a profile does not record the release of memory that existed before it
        gc.collect()
        held, memory.peak = memory.live(), 0
        model.step()
        peak = memory.peak
    model.zero_grad()
    allocated = AllocatedPeak()
    with allocated:
        model.step()
    found = largest([float(peak), float(held + allocated.rise)])
    return found[0], found[1]


def compiled_rows(case: Case, args: argparse.Namespace) -> tuple[dict[str, CompiledModel], dict[str, Row]]:
    """Return the compiled models that run here, and a row for each requested fraction."""
    models, rows = {}, {}
    for part in args.parts:
        name = f"torch compiled, {part:g}"
        rows[name] = row_of("torch compiled", f"{part:g} of activations")
        try:
            model = CompiledModel(case, part)
            for _ in range(2):
                model.step()
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            rows[name]["verdict"] = f"skipped: {reason[0][:40]}"
            continue
        model.zero_grad()
        allocated, held = AllocatedPeak(), model.live()
        with allocated:
            model.step()
        rows[name]["allocated"] = round((held + allocated.rise) / MIB, 1)
        models[name] = model
    return models, rows


def row_of(way: str, what: str, plan: AutoPlan | None = None, budget: float | None = None) -> Row:
    """Return a row without measured figures."""
    return {
        "way": way,
        "what": what,
        "budget": None if budget is None else round(budget / MIB, 1),
        "predicted": None if plan is None else round(plan.peak_bytes / MIB, 1),
        "peak": None,
        "allocated": None,
        "predicted_ms": None if plan is None else round(1e3 * plan.step_seconds, 1),
        "step_ms": None,
        "verdict": "-",
    }


def describe(plan: AutoPlan) -> str:
    """Return a short description of a plan's layout and recomputation."""
    number = sum(each.last - each.first for each in plan.segments)
    return f"{plan.setting}, {number} recomputed" if number else str(plan.setting)


def measure(name: str, args: argparse.Namespace, show: Callable[[str], None]) -> tuple[list[Row], Row]:
    """Return the rows of a model, and its summary."""
    case = case_of(name, args)
    num_ranks = dist.get_world_size()
    show(f"{name}: plans")
    problem = pose_problem(
        case.build_on_meta(),
        case.meta_args(),
        world_size=num_ranks,
        optimizer=case.optimizer,
        precision="fp32",
        profile=args.profile,
        limits=SearchLimits(),
    )
    made, free = plans_within(problem, args.budgets)
    plans: dict[tuple[str, float | None], AutoPlan] = {
        ("plan", budget): each for budget, each in made.items()
    }
    plans["none", None] = free
    if num_ranks == 1:
        for peer, solve in PEERS.items():
            plans |= {(peer, each): plan for each, plan in by_segments(problem, list(made), solve).items()}
    # Budgets that have the same plan share its figures.
    names = {key: f"{plan.setting} {plan.rules} {plan.segments}" for key, plan in plans.items()}
    builds: dict[str, Callable[[], Model]] = {
        names[key]: partial(PlannedModel, plan, case) for key, plan in plans.items()
    }
    peaks = {}
    for number, (key, build) in enumerate(builds.items()):
        show(f"{name}: peak of plan {number + 1} of {len(builds)}")
        peaks[key] = peak_of(build, case)
    show(f"{name}: torch compiled")
    compiled, others = compiled_rows(case, args) if num_ranks == 1 else ({}, {})
    builds |= {key: partial(_same, model) for key, model in compiled.items()}
    turns = Turns(builds, lambda each: show(f"{name}: step of {each[:60]}"))
    times = {
        key: statistics.median(seconds)
        for key, seconds in turns.time(rounds=args.rounds, repeats=args.repeats).items()
    }
    rows = []
    for (way, budget), plan in plans.items():
        peak, allocated = peaks[names[way, budget]]
        rows.append(
            row_of(way, describe(plan), plan, budget)
            | {
                "peak": round(peak / MIB, 1),
                "allocated": round(allocated / MIB, 1),
                "step_ms": round(1e3 * times[names[way, budget]], 1),
                "verdict": "-" if budget is None else "kept" if peak <= budget else "EXCEEDED",
            }
        )
    for key, row in others.items():
        rows.append(row | {"step_ms": round(1e3 * times[key], 1)} if key in times else row)
    peaks_of_plans = {budget: peaks[names["plan", budget]][0] for budget in made}
    times_of_plans = {budget: times[names["plan", budget]] for budget in made}
    return [{"model": name} | row for row in rows], summary_of(name, peaks_of_plans, times_of_plans)


def _same(model: Model) -> Model:
    return model


def summary_of(name: str, peaks: Mapping[float, float], times: Mapping[float, float]) -> Row:
    """Return the summary of the plans of a model."""
    rises = [times[larger] / times[smaller] for smaller, larger in combinations(sorted(times), 2)]
    rise = max(rises, default=1.0)
    exceeded = sum(peak > budget for budget, peak in peaks.items())
    return {
        "model": name,
        "budgets": len(peaks),
        "exceeded": exceeded,
        "peak_over_budget": [
            round(each(peak / budget for budget, peak in peaks.items()), 4) for each in (min, max)
        ],
        "never_exceeded": "met" if not exceeded else "MISSED",
        "slower_with_more": round(rise, 3),
        "never_slower": "met" if rise <= NOISE else "MISSED",
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ("gpt2", "resnet50")
    add = partial(parser.add_argument, type=int)
    parser.add_argument("--only", nargs="+", choices=models, default=models, help="default: both")
    add("--budgets", default=14, help="for each model (default: %(default)s)")
    add("--rounds", default=5, help="rounds of step times (default: %(default)s)")
    add("--repeats", default=2, help="steps of a turn; the last is timed (default: %(default)s)")
    add("--layers", default=6, help="of GPT-2 (default: %(default)s)")
    add("--hidden", help="features of a token of GPT-2 (default: 1024, as in medium)")
    add("--vocab", default=8192, help="tokens that there are (default: %(default)s)")
    add("--batch", default=8, help="sequences of all ranks (default: %(default)s)")
    add("--seq", default=128, help="tokens in a sequence (default: %(default)s)")
    add("--images", default=16, help="of all ranks (default: %(default)s)")
    add("--size", default=96, help="pixels of a side of an image (default: %(default)s)")
    add("--depth", help="blocks in each stage of ResNet, which is then a thin one (default: ResNet-50)")
    parser.add_argument(
        "--parts",
        nargs="*",
        type=float,
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="of activations that torch's compiler may keep; none: it is left out (default: 0 .25 .5 .75 1)",
    )
    parser.add_argument("--profile", default="cpu-2-cores", help="of the machine (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)
    rows: list[Row] = []
    summary: list[Row] = []
    with shown_progress() as show:
        for name in args.only:
            found, of_all = measure(name, args, show)
            rows += found
            summary.append(of_all)
    report(
        f"Budgets of Colossal-Auto on {dist.get_world_size()} ranks",
        rows,
        settings=vars(args),
        json_file=args.json,
        more={"summary": summary},
    )


if __name__ == "__main__":
    main()
