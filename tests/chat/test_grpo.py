"""GRPO: answers of the engine are those of the trainer, on any number of ranks, and rewards rise."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import GRPO, RewardError, chat_data
from colossalai.chat.data import make_toy_data
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.cells import assert_same, beside_one_process, sorting_model, without_times
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import every_other, of_soak, pairwise

pytestmark = pytest.mark.dist

SAMPLING = SamplingParams(max_tokens=6)


def prompts(count: int = 5) -> Any:
    return chat_data(make_toy_data("sums", count, 0, stage="prompts"), "prompts")


def digits(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """Reward digits, and the right ones more."""
    return sum(each.isdigit() for each in answer) / 6 + (row["answer"] in answer)


def train(plan: str, family: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """Train four steps; two passes over prompts that no number of ranks divides."""
    colossalai.launch_from_torch({}, verbose=False)
    model = causal(family)
    booster = Booster(plugin=PLUGINS[plan]())
    options = dict(options)
    given: dict[str, Any] = {"reference": causal(family)} if options.get("kl_coef") else {}
    if "tokens_at_once" in options:
        given |= {"tokens_at_once": options.pop("tokens_at_once")}
    result = GRPO(reward=digits, group_size=4, max_length=32, **options).fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        booster=booster,
        data=prompts(),
        tokenizer=tokenizer(),
        sampling=SAMPLING,
        epochs=2,
        batch_size=4 // booster.mesh.axis_size("dp"),
        rows_at_once=3,
        **given,
    )
    return without_times(result.records)


WAYS: list[dict[str, Any]] = [
    {"tokens_at_once": 23},  # ranks have answers of other lengths, and would have other numbers of batches
    {"normalize": "sequence", "epsilon_high": 0.28, "kl_coef": 0.05},
    {"normalize": "constant", "scale": "none", "iterations": 2},
    {"level": "sequence", "normalize": "sequence", "epsilon": 3e-4, "iterations": 2},
]


def alone(plan: str, family: str, way: dict[str, Any]) -> tuple[Any, ...]:
    """How answers are divided into batches changes nothing."""
    return "ddp", family, {key: value for key, value in way.items() if key != "tokens_at_once"}


def check(cells: list[tuple[str, str, dict[str, Any]]], num_ranks: int) -> None:
    for cell, found, wanted in beside_one_process(train, cells, num_ranks, alone):
        assert len(found) == 4 * cell[2].get("iterations", 1)
        assert_same(found, wanted, cell)


def test_on_two_ranks() -> None:
    check([("zero 2", "gpt2", WAYS[1]), ("pp 2", "gpt2", WAYS[2] | WAYS[0])], 2)


PLANS = ("ddp", "zero 1", "zero 2", "fsdp", "gemini", "tp 2", "pp 2", "tp 2, zero 1")
CELLS = pairwise(PLANS, ("llama", "gpt2", "opt"), WAYS)


@pytest.mark.parametrize("plan", every_other(PLANS))  # test_ppo.py has those between
def test_further_ways(plan: str) -> None:
    check([cell for cell in CELLS if cell[0] == plan], 4 if "," in plan else 2)


def fail_on_rank_1(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    if gpc.get_global_rank() == 1:
        raise KeyError("no key")
    return 1.0


def not_a_number(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    return float("nan")


def leave_on_rank_1(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    if gpc.get_global_rank() == 1:
        sys.exit("no key")
    return 1.0


def fail(reward: Any) -> str:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(RewardError) as caught:
        GRPO(reward=reward, group_size=2).fit(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            booster=Booster(),
            data=prompts(),
            tokenizer=tokenizer(),
            sampling=SAMPLING,
            steps=1,
            batch_size=1,
        )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    gpc.destroy()
    return str(caught.value)


def fail_in_all_ways() -> list[str]:
    return [fail(each) for each in (fail_on_rank_1, leave_on_rank_1, not_a_number)]


def test_a_reward_that_fails_on_one_rank_is_heard_of_on_all() -> None:
    for text, left, odd in run_ranks(fail_in_all_ways, 2):
        assert text == "the reward failed on rank 1, and no step was made: KeyError: 'no key'"
        assert left == "the reward failed on rank 1, and no step was made: SystemExit: no key"
        assert "failed on rank 0, 1" in odd
        assert "rewards are not finite numbers, the first is nan" in odd


def mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    plain: dict[str, Any] = {"booster": Booster(), "tokenizer": tokenizer(), "data": prompts(), "steps": 1}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
    for options, method, words in (
        ({}, GRPO(reward=digits, kl_coef=0.1), "kl_coef=0.1 and reference=NoneType"),
        ({"reference": causal()}, GRPO(reward=digits), "kl_coef=0.0 and reference=Llama"),
        ({"sampling": SamplingParams(temperature=0)}, GRPO(reward=digits), "give a temperature above 0"),
        ({"data": chat_data(make_toy_data("sums", 3, 0))}, GRPO(reward=digits), "learns from prompts"),
        (
            {"sampling": SamplingParams(max_tokens=2046)},
            GRPO(reward=digits, max_length=4000),
            r"do not fit into the 2048 tokens that the model sees: give max_length=2 \(--max_len 2 .*, or m",
        ),
        ({"data": "rows.json"}, GRPO(reward=digits), r"data is of type str: give chat_data\("),
        ({"sampling": {"max_tokens": 4}}, GRPO(reward=digits), "sampling is a dict: give SamplingParams"),
        ({"lr_scheduler": plateau}, GRPO(reward=digits), "lr_scheduler is a ReduceLROnPlateau, which waits"),
    ):
        with pytest.raises(ValueError, match=words):
            method.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), **{**plain, **options})
    for options, words in (
        ({"group_size": 1}, "group_size is 1"),
        ({"iterations": 0}, "iterations=0"),
        ({"normalize": "other"}, "normalize is 'other'"),
        ({"level": "other"}, "level is 'other'"),
        ({"scale": "batch"}, "scale is 'batch'"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"kl_coef": math.inf}, "kl_coef is inf; it must be a finite number"),
        ({"group_size": 2.0}, "group_size=2.0: give an integer"),
        ({"reward": None}, "the reward is a NoneType: give a function"),
        ({"reward": model}, "the reward is a LlamaForCausalLM: of models give one of with_value_head"),
    ):
        with pytest.raises(ValueError, match=words):
            GRPO(**{"reward": digits, **options})
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(mistakes, 1)


def resume(plan: str, folder: str) -> Any:
    """Train four steps at once; and two, then all four from the training state of the second."""
    results = []
    for name, times in (("whole", (4,)), ("parts", (2, 4))):
        for steps in times:
            colossalai.launch_from_torch({}, verbose=False)
            model = causal()
            result = GRPO(reward=digits, group_size=3, iterations=2).fit(
                model,
                torch.optim.AdamW(model.parameters(), lr=0.01),
                booster=Booster(plugin=PLUGINS[plan]()),
                data=prompts(),
                tokenizer=tokenizer(),
                sampling=SAMPLING,
                steps=steps,
                batch_size=1,
                save=f"{folder}/{name}",
                resume=f"{folder}/{name}",
            )
            gpc.destroy()
        results.append(result.records)
    return results


@pytest.mark.long  # `make test` resumes a run with a critic beside it: tests/chat/test_ppo.py
@pytest.mark.parametrize("plan", ["zero 1", "fsdp", "gemini", "tp 2", "pp 2"])
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(plan: str, tmp_path: Path) -> None:
    for whole, parts in run_ranks(resume, 2, plan, str(tmp_path)):
        assert [each["step"] for each in parts] == [3, 4]
        for own, other in zip(parts, whole[2:], strict=True):
            for key, value in own.items():
                assert key.startswith(("seconds", "tokens_per_second")) or value == other[key], key


def improve() -> tuple[float, float]:
    """Learn to sort a little from texts, then more from rewards; return the first and last rewards."""
    colossalai.launch_from_torch({}, verbose=False)
    model, optimizer, given = sorting_model()
    for group in optimizer.param_groups:
        group["lr"] = 5e-4
    result = GRPO(reward=lambda prompt, answer, row: float(answer == row["answer"]), group_size=8).fit(
        model,
        optimizer,
        data=chat_data(make_toy_data("sort", 400, 1, stage="prompts"), "prompts"),
        sampling=SamplingParams(max_tokens=12),
        steps=60,
        batch_size=4,
        **given,
    )
    rewards = [each["reward"] for each in result.records]
    gpc.destroy()
    return sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10


@of_soak  # docs/chat/grpo.md, which make long runs, says that they rise
def test_rewards_rise() -> None:
    first, last = run_ranks(improve, 2)[0]
    assert 0.2 < first < 0.8
    assert last > first + 0.1


def share_of_digits(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    return sum(each.isdigit() for each in answer) / SAMPLING.max_tokens


def write_digits() -> list[float]:
    """Let a model that knows nothing find out that digits are rewarded; return the reward of each step."""
    colossalai.launch_from_torch({}, verbose=False)
    model = causal().float()
    result = GRPO(reward=share_of_digits, group_size=16).fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.03),
        booster=Booster(),
        data=prompts(),
        tokenizer=tokenizer(),
        sampling=SAMPLING,
        steps=16,
        batch_size=4,
    )
    gpc.destroy()
    return [each["reward"] for each in result.records]


def test_rewards_of_a_model_that_knows_nothing_rise() -> None:
    (rewards,) = run_ranks(write_digits, 1)
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.6
