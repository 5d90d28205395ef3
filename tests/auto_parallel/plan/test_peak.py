"""The predicted peak of a rank beside the one that is counted, under each setting of the runtime."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel import AutoPlan
from colossalai.auto_parallel._make import pose_problem
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel._verify import counted_peak
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.resnet import ResNet
from colossalai.runtime import RecomputeSegment
from tests.auto_parallel.plan.models import RATES
from tests.ranks import run_ranks
from tests.tiers import further, in_soak

pytestmark = pytest.mark.dist

BATCH, VOCAB, LENGTH = 8, 512, 64
MOST_ABOVE, MOST_BELOW = 1.02, 1.25


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 128, "num_layers": 4, "num_attention_heads": 2}
    model = GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes, **RATES))
    return model, {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}


def gpt_of_few() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a GPT whose parameters take more than its activations."""
    model, _ = gpt()
    return model, {"input_ids": torch.zeros(2, LENGTH // 4, dtype=torch.long)}


def gpt_of_biases() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a GPT of which biases and norms are trained, and all matrices frozen."""
    model, arguments = gpt_of_few()
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1)
    return model, arguments


def gpt_of_a_frozen_half() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a GPT whose embedding and first two blocks are frozen."""
    model, arguments = gpt_of_few()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("embedding", "blocks.0.", "blocks.1.")))
    return model, arguments


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    return ResNet((2, 2, 2, 2), small_input=True, width=8), {"images": torch.zeros(BATCH, 3, 16, 16)}


def mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    from tests.shardformer.models import mixtral_of_eight

    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return mixtral_of_eight(**sizes), {"input_ids": ids}


def mixtral_of_products() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the same whose experts are computed at once, which is the default of transformers."""
    model, arguments = mixtral()
    cast(Any, model).set_experts_implementation("grouped_mm")
    return model, arguments


MODELS = {
    "gpt": gpt,
    "gpt of few": gpt_of_few,
    "gpt of biases": gpt_of_biases,
    "gpt of a frozen half": gpt_of_a_frozen_half,
    "resnet": resnet,
    "mixtral": mixtral,
    "mixtral of products": mixtral_of_products,
}


NONE, HALF, ALL = 0, 2, 4
Cell = tuple[Setting, int]  # how many blocks are recomputed, the first ones, each by itself


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    # What has no values is counted with random ones, with which all tokens choose the same experts.
    with torch.device("cpu" if name.startswith("mixtral") else "meta"):
        return MODELS[name]()


def plans_of(name: str, cells: list[Cell], precision: str) -> list[AutoPlan]:
    """Return the plan of each cell, with the predicted peak of the rank that needs most."""
    model, arguments = built(name)
    problem = pose_problem(
        model,
        arguments,
        world_size=cells[0][0].world_size,
        optimizer="adamw",
        precision=precision,
        profile=None,
        limits=SearchLimits(),
    )
    plans = []
    for setting, recomputed in cells:
        segments = tuple(RecomputeSegment(place, place + 1) for place in range(recomputed))
        inner = problem.search.problem_of(setting)
        choice = inner.solve(budget=None, keeps_activations=True, time_limit=10.0, gap=1e-3)
        found = problem.search.candidate(inner, problem.search.predictor(inner, choice), choice, segments)
        plans.append(problem.plan_of(found))
    return plans


def counted_peaks(name: str, plans: list[AutoPlan]) -> list[float]:
    """Return the counted peak of each plan."""
    colossalai.launch_from_torch({}, verbose=False)
    model, arguments = built(name)
    return [counted_peak(plan, model, arguments) for plan in plans]


FIRST = [(Setting(data=2, zero=3), ALL)]
OF_TWO = [
    *((Setting(data=2, zero=zero), blocks) for zero in range(4) for blocks in (NONE, HALF, ALL)),
    *((Setting(tensor=2), blocks) for blocks in (NONE, HALF, ALL)),
    *((Setting(pipeline=2, microbatches=number), blocks) for number in (2, 4, 8) for blocks in (NONE, ALL)),
]
OF_FOUR = [
    *((Setting(data=4, zero=zero), blocks) for zero in range(4) for blocks in (NONE, ALL)),
    (Setting(data=2, pipeline=2, microbatches=4), NONE),
    (Setting(data=2, pipeline=2, microbatches=2, zero=1), ALL),
    (Setting(data=2, tensor=2), NONE),
    (Setting(data=2, tensor=2, zero=3), ALL),
    (Setting(pipeline=2, tensor=2, microbatches=4), NONE),
    (Setting(pipeline=4, microbatches=4), NONE),
    (Setting(pipeline=4, microbatches=8), ALL),
]
OF_RESNET = [(Setting(data=2, zero=zero), (NONE, ALL)[zero % 2]) for zero in range(4)]
OTHERS_OF_RESNET = [(Setting(data=2, zero=zero), (ALL, NONE)[zero % 2]) for zero in range(4)]
OF_MIXTRAL = [
    *((Setting(data=2, zero=zero, expert=expert), NONE) for zero in (0, 1) for expert in (1, 2)),
    (Setting(data=2, zero=1, expert=2), ALL),
]


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        further("gpt", FIRST),  # `test_verify.py` has a smaller one
        further("gpt", [each for each in OF_TWO if each not in FIRST][::2]),
        in_soak("gpt", [each for each in OF_TWO if each not in FIRST][1::2]),
        in_soak("gpt", OF_FOUR),
        further("resnet", OF_RESNET),
        in_soak("resnet", OTHERS_OF_RESNET),
        further("mixtral", OF_MIXTRAL),
        further("mixtral of products", OF_MIXTRAL[::2]),
    ],
    ids=["gpt", "two", "two more", "four", "resnet", "resnet too", "mixtral", "mixtral of products"],
)
def test_no_rank_takes_more_than_predicted_and_none_is_predicted_much_more(
    name: str, cells: list[Cell]
) -> None:
    check(name, cells)


def check(name: str, cells: list[Cell], precision: str = "fp32") -> None:
    plans = plans_of(name, cells, precision)  # a rank would make the same, and take as long
    found = run_ranks(counted_peaks, cells[0][0].world_size, name, plans)
    assert len(set(map(tuple, found))) == 1, "the ranks have counted for themselves"
    wrong = []
    for (setting, recomputed), plan, counted in zip(cells, plans, found[0], strict=True):
        predicted = plan.peak_bytes
        said = f"{name} in {precision} {setting}, {recomputed} recomputed: {predicted / counted:.3f}"
        print(said)
        if not (counted <= MOST_ABOVE * predicted and predicted <= MOST_BELOW * counted):
            wrong.append(said)
    assert not wrong, wrong


OF_16_BITS = [
    *((Setting(data=2, zero=zero), blocks) for zero in (0, 1) for blocks in (NONE, ALL)),
    (Setting(tensor=2), NONE),
    (Setting(pipeline=2, microbatches=4), NONE),
]
OF_AUTOCAST = [(Setting(data=2, zero=3), blocks) for blocks in (NONE, ALL)]  # slices are masters already


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "bf16_master"])
def test_peaks_in_16_bits(precision: str) -> None:
    cells = OF_16_BITS + (OF_AUTOCAST if precision == "bf16" else [])
    check("gpt", cells, precision)


OF_FEW = [
    *((Setting(data=2, zero=zero), NONE) for zero in (0, 1, 2)),
    (Setting(tensor=2), NONE),
    (Setting(pipeline=2, microbatches=2), NONE),
]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_peaks_where_parameters_take_most(precision: str) -> None:
    check("gpt of few", OF_FEW, precision)


OF_REPLICAS = [(Setting(data=2, zero=zero), NONE) for zero in range(4)]
OF_LAYERS = [(Setting(tensor=2), NONE), (Setting(pipeline=2, microbatches=2), ALL)]


@pytest.mark.parametrize(
    ("name", "cells", "precision"),
    [
        ("gpt of biases", OF_REPLICAS[1:2], "fp32"),
        further("gpt of biases", OF_REPLICAS + OF_LAYERS, "fp32"),
        further("gpt of biases", OF_REPLICAS[:3], "bf16_master"),
        further("gpt of a frozen half", OF_REPLICAS + OF_LAYERS, "fp32"),
        further("gpt of a frozen half", OF_REPLICAS[:3], "bf16_master"),
    ],
)
def test_frozen_parameters_have_no_gradients_and_no_states(
    name: str, cells: list[Cell], precision: str
) -> None:
    check(name, cells, precision)
