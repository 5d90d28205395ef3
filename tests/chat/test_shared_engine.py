"""Engines that ranks of the job share: log-probabilities and answers are those of engines of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import GRPO, RolloutEngine, RolloutOptions
from colossalai.chat._fit import step_of
from colossalai.core import global_context as gpc
from colossalai.inference import EngineStopped, RequestRefused, SamplingParams
from tests.chat.cells import assert_same, beside_one_process, without_times
from tests.chat.test_grpo import SAMPLING, digits, prompts
from tests.chat.test_rollout import model_of, squares
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import in_soak
from tests.turns import each_in_turn

pytestmark = pytest.mark.dist

PROMPTS = ["3+4=" * 12, "1+2+3+4+5+6=", "9="]  # the first has blocks that the next step must not find


def answers(plan: str, family: str, rank: int, tp: int, pp: int) -> list[Any]:
    """Return what this rank's engine answers to its prompts before each of three steps."""
    colossalai.launch_from_torch({}, verbose=False)
    raw = model_of(family, rank)
    for module in raw.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3  # of the step alone: answers are drawn without
    booster = Booster(plugin=PLUGINS[plan]())
    trained = [param for param in raw.parameters() if param.requires_grad]
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(trained, lr=0.01))
    engine = RolloutEngine(model, tokenizer(), max_length=60, tp_size=tp, pp_size=pp)
    alone = RolloutEngine(model, tokenizer(), max_length=60, has_copy=True)
    assert engine.num_ranks == tp * pp
    is_shared = plan.startswith("tp 2") and (tp, pp) == (2, 1)  # the parts in training themselves
    assert engine.copy_bytes == 0 if is_shared else 0 < engine.copy_bytes < 0.75 * alone.copy_bytes
    own = [tokenizer()(each).input_ids for each in PROMPTS[gpc.get_global_rank() % 4 :]]  # rank 3: none
    params = [SamplingParams(n=2, seed=5 + len(each), max_tokens=6) for each in own]
    whole = torch.tensor([tokenizer()(PROMPTS[0]).input_ids])
    batch = {"input_ids": whole}, {"counts": torch.ones(1)}
    found = []
    for turn in range(3):
        of_all, of_one = engine.generate(own, params), alone.generate(own, params)
        for group, expected in zip(of_all, of_one, strict=True):
            for each, other in zip(group, expected, strict=True):
                assert (each.token_ids, each.text, each.is_cut) == (other.token_ids, other.text, other.is_cut)
                assert each.logprobs == pytest.approx(other.logprobs, abs=1e-9)
        found += [each.token_ids for group in of_all for each in group]
        if is_shared and turn == 1:
            for param in raw.parameters():
                param.data.mul_(1.1)  # which no version tells
        else:
            step_of([batch], model, optimizer, booster=booster, criterion=squares)
        engine.sync()
        alone.sync()
    gpc.destroy()
    return found


def check(cells: Sequence[tuple[str, str, int, int, int]], num_ranks: int) -> None:
    of_ranks = run_ranks(each_in_turn, num_ranks, answers, cells)
    assert len({answer for found in of_ranks[0] for answer in found}) > 3


def test_answers_are_those_of_engines_of_one_rank() -> None:
    check([("zero 2", "llama", 0, 2, 1), ("tp 2", "gpt2", 0, 1, 2)], 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cells", "num_ranks"),
    [
        ([("pp 2", "llama", 3, 2, 1), ("fsdp", "opt", 0, 1, 2), ("gemini", "gpt2", 0, 2, 1)], 2),
        ([("tp 2, zero 1", "llama", 0, 2, 2), ("tp 2, zero 1", "gpt2", 0, 2, 1)], 4),
        in_soak([("ddp", "opt", 3, 1, 2), ("pp 2", "gpt2", 0, 1, 2), ("tp 2", "llama", 3, 2, 1)], 2),
        in_soak([("fsdp", "llama", 0, 2, 2), ("tp 2, zero 1", "opt", 0, 1, 2)], 4),
    ],
)
def test_further_plans(cells: Sequence[tuple[str, str, int, int, int]], num_ranks: int) -> None:
    check(cells, num_ranks)


def fit(plan: str, tp: int, pp: int) -> list[dict[str, float]]:
    """Train, and return the records, without times."""
    colossalai.launch_from_torch({}, verbose=False)
    model, booster = causal(), Booster(plugin=PLUGINS[plan]())
    result = GRPO(reward=digits, group_size=4, max_length=32).fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        booster=booster,
        data=prompts(),
        tokenizer=tokenizer(),
        sampling=SAMPLING,
        epochs=1,
        batch_size=4 // booster.mesh.axis_size("dp"),
        rollouts=RolloutOptions(tp_size=tp, pp_size=pp),
    )
    return without_times(result.records)


@pytest.mark.long
def test_a_run_is_that_of_engines_of_one_rank() -> None:
    cells = [("zero 2", 1, 2), ("tp 2", 2, 1)]
    for cell, found, expected in beside_one_process(fit, cells, 2, lambda *cell: ("ddp", 1, 1)):
        assert_same(found, expected, cell)


def refuses() -> list[str]:
    """Return what is said of prompts of one rank that the engine refuses, then of one that has failed."""
    colossalai.launch_from_torch({}, verbose=False)
    rank, said = gpc.get_global_rank(), []
    with pytest.raises(ValueError, match="engines of 3 ranks, of which the job has 2"):
        RolloutEngine(causal(), tokenizer(), max_length=60, tp_size=3)
    with pytest.raises(ValueError, match="tp_size=0; it must be an integer"):
        RolloutEngine(causal(), tokenizer(), max_length=60, tp_size=0)
    engine = RolloutEngine(causal(), tokenizer(), max_length=20, tp_size=2)
    params = [SamplingParams(max_tokens=2, ignore_eos=True)]  # else one answer in hundreds has one token
    with pytest.raises(RequestRefused) as refused:
        engine.generate([[3] * (30 if rank == 1 else 3)], params)
    said.append(str(refused.value))
    ((answer,),) = engine.generate([[3, 4]], params)  # nothing is left of the call before
    assert len(answer.token_ids) == 2
    shared: Any = engine._sampler._engine  # type: ignore[attr-defined]
    if shared._engine is not None:
        shared._engine.scheduler.schedule = lambda *_: 1 / 0
    for _ in range(2):
        with pytest.raises(EngineStopped) as stopped:
            engine.generate([[3, 4]], params)
        said.append(str(stopped.value))
    gpc.destroy()
    return said


def test_what_one_rank_is_refused_all_are() -> None:
    first, second = run_ranks(refuses, 2)
    assert first == second
    assert "the prompt has 30 tokens" in first[0]
    assert first[1] == first[2] == "the engine has failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_size": 2, "ahead": 1}, "communicates, and so does the concurrent step"),
        ({"pp_size": 2, "placement": "ray"}, "an actor has a whole model"),
        ({"pp_size": True}, "pp_size=True; it must be an integer"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RolloutOptions(**options)
