"""Cuts and recomputation under one budget, as the search finds them together, against all that there are."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel._inner import CutChoice, InnerProblem, _NodeCost
from colossalai.auto_parallel._make import PlanProblem, pose_problem
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel.cuts._strategies import Strategy
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.runtime import RecomputeSegment
from tests.auto_parallel.checkpoint.chains import segmentations
from tests.auto_parallel.plan.models import RATES, arguments_of, resnet, slow_machine
from tests.auto_parallel.solver.problems import every_choice
from tests.tiers import further

pytestmark = pytest.mark.unit

SETTING = Setting(tensor=2)
WIDTH, BATCH, LENGTH = 16, 8, 6
FAST, EVEN, SLOW = 1e7, 1e6, 1e5  # bytes a second of links: cuts pay, or nearly, or only for their memory


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def mlp(num_blocks: int, *, batch: int = 32) -> tuple[nn.Module, dict[str, Tensor]]:
    blocks = nn.Sequential(*(Mlp() for _ in range(num_blocks)))
    return nn.Sequential(nn.Linear(8, WIDTH), blocks, nn.Linear(WIDTH, 4)), {"input": torch.rand(batch, 8)}


def gpt(num_blocks: int, *, vocab: int = 24) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"vocab_size": vocab, "hidden_size": WIDTH, "max_position_embeddings": LENGTH}
    model = GPT(GPTConfig(num_layers=num_blocks, num_attention_heads=4, **sizes, **RATES))
    return model, {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}


Build = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


def posed(build: Build, links: float) -> PlanProblem:
    return pose_problem(
        *build(),
        world_size=SETTING.world_size,
        optimizer="momentum",
        precision="fp32",
        profile=slow_machine(link_bytes_per_s=links),
        limits=SearchLimits(gap=0.0),
    )


def every_cut(inner: InnerProblem) -> Iterator[CutChoice]:
    """Yield all cuts that fit together, equal blocks cut alike."""
    merged = inner.merged(keeps_activations=True)
    num_sites = len(inner.strategies.sites)
    for options in every_choice(merged.problem):
        if math.isfinite(merged.problem.cost_of(options)):
            places = merged.expand(options)
            of_sites = zip(inner.strategies.sites, places[:num_sites], strict=True)
            yield CutChoice(
                strategies=tuple(site.strategies[place] for site, place in of_sites),
                are_cut=tuple(place == 1 for place in places[num_sites:]),
            )


@dataclass(frozen=True)
class Point:
    """What some cuts and segments take."""

    peak_bytes: float
    seconds: float


def every_point(problem: PlanProblem, setting: Setting) -> dict[tuple[Strategy, ...], list[Point]]:
    """Return by the cuts of all sites what they take, for all segments."""
    found = {}
    for choice in every_cut(problem.search.problem_of(setting)):
        predictor = problem.search.predictor(problem.search.problem_of(setting), choice)
        predictions = map(predictor.predict, segmentations(len(problem.parts.blocks), end_in_segments=True))
        found[choice.strategies] = [Point(each.peak_bytes, each.step_seconds) for each in predictions]
    return found


def every_front(problem: PlanProblem, setting: Setting) -> list[Point]:
    """Return, by ascending peaks, what is faster than all that is no larger: of all cuts and segments."""
    points = chain.from_iterable(every_point(problem, setting).values())
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak_bytes, each.seconds)):
        if not front or point.seconds < front[-1].seconds * (1 - 1e-9):
            front.append(point)
    return front


def ratios_of(problem: PlanProblem, setting: Setting, front: list[Point]) -> list[float]:
    """Return how much longer an answer takes than the best, where a budget just lets it."""
    ratios = []
    for point in front:
        best, *_ = problem.search.run([setting], budget=point.peak_bytes)
        assert best.prediction.peak_bytes <= point.peak_bytes
        assert best.choice.gap == 0.0  # none that could be faster was left out
        ratios.append(best.prediction.step_seconds / point.seconds)
    return ratios


@pytest.mark.parametrize(
    ("build", "links", "setting"),
    [
        (partial(mlp, 2), FAST, SETTING),
        further(partial(mlp, 2), SLOW, SETTING),
        further(partial(gpt, 2), EVEN, SETTING),
        further(partial(gpt, 2), SLOW, SETTING),
        (partial(mlp, 2), EVEN, replace(SETTING, microbatches=2)),
        further(partial(gpt, 2), SLOW, replace(SETTING, microbatches=2)),
        further(partial(gpt, 2, vocab=512), SLOW, SETTING),
        further(partial(mlp, 3), SLOW, SETTING),
        further(partial(gpt, 2), FAST, SETTING),
        further(partial(gpt, 3), SLOW, SETTING),
        further(partial(gpt, 3), SLOW, replace(SETTING, microbatches=2)),
    ],
)
def test_the_search_finds_what_trying_everything_finds(build: Build, links: float, setting: Setting) -> None:
    """Under each budget at which the best answer changes."""
    problem = posed(build, links)
    front = every_front(problem, setting)
    ratios = ratios_of(problem, setting, front)
    assert len(front) >= 2
    assert ratios == pytest.approx([1.0] * len(front), rel=1e-6)


@pytest.mark.parametrize("num_tried", [further(0), 5])
def test_what_is_left_out_is_in_the_gap(num_tried: int) -> None:
    """Where there is no time for all choices, the answer says how much faster one of the rest may be."""
    problem = posed(partial(gpt, 2, vocab=512), SLOW)
    gaps = []
    front = every_front(problem, SETTING)
    problem.search.num_tried = num_tried
    for point in front:
        with suppress(BudgetError):
            best, *_ = problem.search.run([SETTING], budget=point.peak_bytes)
            assert best.prediction.step_seconds * (1 - best.choice.gap) <= point.seconds * (1 + 1e-9)
            gaps.append(best.choice.gap)
    assert max(gaps) > 0.01
    assert all(0 <= gap < 1 for gap in gaps)


# See [Note: the bound of a choice].
@pytest.mark.parametrize(
    ("build", "links"),
    [(partial(mlp, 2), 1e3), further(partial(mlp, 3), 1e3), further(partial(gpt, 2, vocab=512), EVEN)],
)
@pytest.mark.parametrize("microbatches", [further(1), 2])
def test_no_answer_is_faster_than_the_bound_of_its_cuts(
    build: Build, links: float, microbatches: int
) -> None:
    """And choices come in the order of their bounds, each of them once."""
    setting = replace(SETTING, microbatches=microbatches)
    problem = posed(build, links)
    inner = problem.search.problem_of(setting)
    free = problem.search._free(setting)
    floors = problem.search.predictor(inner, free.choice).least_bytes
    points = every_point(problem, setting)
    cuts = [choice.strategies for choice in every_cut(inner)]
    for front in every_front(problem, setting):
        seconds = free.prediction.step_seconds
        found = list(inner.by_bound(free.choice, seconds=seconds, floors=floors, budget=front.peak_bytes))
        assert [bound for bound, _ in found] == sorted(bound for bound, _ in found)
        assert sorted(map(str, cuts)) == sorted(str(choice.strategies) for _, choice in found)
        for bound, choice in found:
            within = [
                each.seconds for each in points[choice.strategies] if each.peak_bytes <= front.peak_bytes
            ]
            assert bound <= min(within, default=math.inf) * (1 + 1e-9)
        assert max(bound for bound, _ in found) > front.seconds, "a bound that leaves nothing out"


# See [Note: the bound of a choice].
@pytest.mark.parametrize(
    ("build", "links"),
    [further(partial(mlp, 3), 1e3), (partial(mlp, 2, batch=512), 1e3), further(partial(gpt, 2), SLOW)],
)
def test_bytes_of_a_bound_are_those_of_predictions(build: Build, links: float) -> None:
    """And where they just fit, whether all is kept, half or nothing, the bound is not above the seconds."""
    problem = posed(build, links)
    inner = problem.search.problem_of(SETTING)
    free = problem.search._free(SETTING)
    floors = problem.search.predictor(inner, free.choice).least_bytes
    seconds = free.prediction.step_seconds
    nodes = inner._node_costs
    everything = tuple(RecomputeSegment(place, place + 1) for place in range(len(problem.parts.blocks)))

    def taken(choice: CutChoice) -> list[_NodeCost]:
        return [node[option] for node, option in zip(nodes, inner.options_of(choice), strict=True)]

    def more(size: Callable[[_NodeCost], float], choice: CutChoice) -> float:
        return sum(map(size, taken(choice))) - sum(map(size, taken(free.choice)))

    for choice in list(every_cut(inner))[::7]:
        predictor = problem.search.predictor(inner, choice)
        begin, update = predictor.least_bytes
        outside = more(lambda node: node.held + node.kept * math.isinf(node.again), choice)
        assert begin - floors[0] == pytest.approx(outside)
        assert update - floors[1] == pytest.approx(more(lambda node: node.complete, choice))
        inside = [node for node in taken(choice) if math.isfinite(node.again)]
        kept, again = sum(node.kept for node in inside), sum(node.again for node in inside)
        plain, recomputed = predictor.predict(), predictor.predict(everything)
        assert max(begin + kept, update) <= plain.peak_bytes * (1 + 1e-9)
        assert max(begin, update) <= recomputed.peak_bytes * (1 + 1e-9)
        assert 0 < again <= (recomputed.step_seconds - plain.step_seconds) * (1 + 1e-9)
        inside.sort(key=lambda node: node.kept / max(node.again, 1e-12))  # best kept come first
        for num_kept in (len(inside), len(inside) // 2, 0):
            budget = max(begin + sum(node.kept for node in inside[:num_kept]), update)
            fewest = plain.step_seconds + sum(node.again for node in inside[num_kept:])
            found = inner.by_bound(free.choice, seconds=seconds, floors=floors, budget=budget)
            bounds = {each.strategies: bound for bound, each in found}
            assert bounds[choice.strategies] <= fewest * (1 + 1e-9)


def residual_net() -> tuple[nn.Module, dict[str, Tensor]]:
    return resnet(), arguments_of(resnet, BATCH)


@pytest.mark.parametrize("build", [residual_net, further(partial(gpt, 2)), further(partial(mlp, 3))])
def test_the_smallest_budget_that_a_refusal_names_works(build: Build) -> None:
    """And a little more, too: with shortcuts and counts of batches the search ended before it got there."""
    model, given = build()
    problem = pose_problem(
        model,
        given,
        world_size=4,
        optimizer="momentum",
        precision="fp32",
        profile=slow_machine(link_bytes_per_s=SLOW),
        limits=SearchLimits(),
    )
    with pytest.raises(BudgetError) as refused:
        problem.search.run(problem.settings, budget=1.0)
    for more in (1.0, 1.001, 1.01, 1.05):
        budget = more * refused.value.least_bytes
        best, *_ = problem.search.run(problem.settings, budget=budget)
        assert best.prediction.peak_bytes <= budget


def test_what_no_layer_makes_or_takes_follows_none() -> None:
    """The count of batches that a batch norm has is a tensor of one element, which no rank cuts."""
    problem = pose_problem(
        *residual_net(),
        world_size=2,
        optimizer="momentum",
        precision="fp32",
        profile=slow_machine(link_bytes_per_s=SLOW),
        limits=SearchLimits(),
    )
    strategies = problem.search.problem_of(SETTING).strategies
    numbers = {each for site in strategies.sites for each in (site.takes, site.gives) if each is not None}
    assert numbers == set(range(len(strategies.followers)))
