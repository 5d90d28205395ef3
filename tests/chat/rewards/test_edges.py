"""Edges of learning from rewards: short and empty answers, two policies in a job, a frozen trunk."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import GRPO, PPO, SFT, ModelReward, RewardSum, chat_data, with_value_head
from colossalai.chat.data import ChatTemplateError, make_toy_data, make_toy_tokenizer
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.test_grpo import digits, prompts
from tests.chat.test_ppo import value_model
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

SAMPLING = SamplingParams(max_tokens=6)


def by_length(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    return len(answer) / 6 + len(prompt) / 50


def fit(method: Any, model: Any, optimizer: Any, booster: Booster, **options: Any) -> list[Any]:
    more: dict[str, Any] = {}
    if isinstance(method, PPO):
        critic = options.pop("critic", None) or value_model()
        trained = [param for param in critic.parameters() if param.requires_grad]
        more = {"critic": critic, "critic_optimizer": torch.optim.SGD(trained, lr=0.05, momentum=0.9)}
    if method.kl_coef > 0.0:
        more["reference"] = causal()
    given: dict[str, Any] = {"data": prompts(), "tokenizer": tokenizer(), "sampling": SAMPLING, "steps": 4}
    given |= {"batch_size": 4 // booster.mesh.axis_size("dp"), "rows_at_once": 3}
    result = method.fit(model, optimizer, booster=booster, **{**given, **more, **options})
    return list(result.records)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


METHODS: Mapping[str, Any] = {
    "grpo": GRPO(reward=by_length, group_size=3, max_length=32, kl_coef=0.1),
    "ppo": PPO(reward=by_length, max_length=32, iterations=2),
}


def answer_shortly(name: str, plan: str, way: str) -> Any:
    """Train where rank 1 draws the end of the answer at once, or where its answers have one token."""
    colossalai.launch_from_torch({}, verbose=False)
    sampling = SAMPLING
    if gpc.get_global_rank() == 1 or gpc.mesh.world_size == 1:
        ends_at_once = replace(SAMPLING, logit_bias={tokenizer().eos_token_id: 100.0})
        sampling = ends_at_once if way == "empty" else replace(SAMPLING, max_tokens=1)
    model = causal()
    records = fit(METHODS[name], model, sgd(model), Booster(plugin=PLUGINS[plan]()), sampling=sampling)
    values = [each for each in model.parameters() if plan == "ddp"]
    gpc.destroy()
    return records, [each.double().sum().item() for each in values]


@pytest.mark.parametrize(
    ("name", "plan", "way"),
    [
        further("grpo", "ddp", "empty"),
        ("ppo", "zero 2", "empty"),
        further("grpo", "zero 1", "short"),
        further("ppo", "ddp", "short"),
    ],
)
def test_a_rank_whose_answers_are_empty_or_short_is_no_hang(name: str, plan: str, way: str) -> None:
    (first, values), (second, others) = run_ranks(answer_shortly, 2, name, plan, way)
    assert values == others
    for own, other in zip(first, second, strict=True):
        for key in own.keys() - {"seconds", "seconds_generating", "value_loss"}:
            assert math.isfinite(own[key]), key
            assert key.startswith("tokens_per_second") or own[key] == other[key], key
    lengths = [each["length"] for each in first if "length" in each]
    assert 1.0 < lengths[0] < 5.0  # of both ranks; later ones may be of prompts of one rank alone


def answer_nothing() -> dict[str, Any]:
    return {name: answer_shortly(name, "ddp", "empty") for name in METHODS}


def test_empty_answers_alone_are_learned_from() -> None:
    (found,) = run_ranks(answer_nothing, 1)
    for name, (records, _) in found.items():
        assert [each["length"] for each in records if "length" in each] == [1.0] * (
            4 if name == "grpo" else 2
        )
        assert all(math.isfinite(value) for each in records for value in each.values())
        assert all(each["share_cut"] == 0.0 for each in records if "share_cut" in each)
        if name == "grpo":
            assert all(each["groups_alike"] == 1.0 for each in records)


def end_as_the_tokenizer_says() -> list[float]:
    """Answer with the end token of the tokenizer by a model whose config has another one."""
    colossalai.launch_from_torch({}, verbose=False)
    lengths = []
    for ignores in (False, True):
        model = causal()
        model.config.eos_token_id = model.generation_config.eos_token_id = 50
        bias = {tokenizer().eos_token_id: 100.0}
        sampling = replace(SAMPLING, logit_bias=bias, ignore_eos=ignores)
        (record,) = fit(METHODS["grpo"], model, sgd(model), Booster(), sampling=sampling, steps=1)
        lengths.append(record["length"])
    gpc.destroy()
    return lengths


def test_answers_end_with_the_end_token_of_the_tokenizer() -> None:
    assert run_ranks(end_as_the_tokenizer_says, 1) == [[1.0, SAMPLING.max_tokens]]


def take_turns(ways: tuple[str, ...]) -> Any:
    """Train two policies alone, step by step in turns, or one within the steps of the other."""
    found = []
    for way in ways:
        colossalai.launch_from_torch({}, verbose=False)
        booster = [Booster(plugin=PLUGINS[plan]()) for plan in ("zero 1", "ddp")]
        models: list[Any] = [causal("llama"), causal("gpt2")]
        boosted = [each.boost(model, sgd(model))[:2] for each, model in zip(booster, models, strict=True)]
        method = GRPO(reward=by_length, group_size=3, max_length=32)

        def learn(number: int, seed: int, made: Any = (method, boosted, booster), **more: Any) -> Any:
            policy, pairs, boosters = made
            more = {"steps": 1, "seed": seed, **more}
            return [each["loss"] for each in fit(policy, *pairs[number], boosters[number], **more)]

        if way == "alone":
            losses = [[learn(number, seed)[0] for seed in range(3)] for number in range(2)]
        elif way == "turns":
            turns = [[learn(number, seed)[0] for number in range(2)] for seed in range(3)]
            losses = [list(each) for each in zip(*turns, strict=True)]
        else:
            seeds, inner = iter(range(3)), []

            def on_step(record: Any, inner: Any = inner, seeds: Any = seeds, learn: Any = learn) -> None:
                inner += learn(1, next(seeds))

            losses = [learn(0, 0, steps=3, on_step=on_step), inner]
        found.append(losses)
        gpc.destroy()
    return found


def test_two_policies_in_one_job_do_not_disturb_each_other() -> None:
    for alone, turns in run_ranks(take_turns, 2, ("alone", "turns")):
        assert turns == alone


@pytest.mark.long
def test_a_policy_within_the_steps_of_another_does_not_disturb_it() -> None:
    for alone, nested in run_ranks(take_turns, 2, ("alone", "nested")):
        assert nested[1] == alone[1]
        assert nested[0][0] == alone[0][0]


def teach(_: Any = None) -> Any:
    """Let a student learn from what a teacher, which learns as well, says of its answers."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS["ddp"]())
    student, teacher = causal(), value_model("gpt2")
    teaching = booster.boost(teacher, sgd(teacher))
    judge = copy.deepcopy(teacher)
    pairs = chat_data(make_toy_data("sums", 7, 0, stage="preference"))
    from colossalai.chat import RewardModeling

    boosted = booster.boost(student, sgd(student))[:2]
    records = []
    for seed in range(3):
        RewardModeling(max_length=48).fit(
            *teaching[:2],
            booster=booster,
            data=pairs,
            tokenizer=tokenizer(),
            steps=1,
            batch_size=8 // gpc.mesh.world_size,
        )
        judge.load_state_dict(teacher.state_dict())
        method = GRPO(reward=RewardSum({"judge": (1.0, judge), "length": (0.1, by_length)}), group_size=3)
        records += fit(method, *boosted, booster, steps=1, seed=seed)
    gpc.destroy()
    return [(each["loss"], each["reward/judge"], each["reward"]) for each in records]


@pytest.mark.long  # `make test` has two policies that learn by turns, above
def test_a_student_and_its_teacher_learn_by_turns_as_in_one_process() -> None:
    (alone,) = run_ranks(teach, 1)
    assert len({judged for _, judged, _ in alone}) == 3
    for found in run_ranks(teach, 2):
        for own, other in zip(found, alone, strict=True):
            assert own == pytest.approx(other, abs=1e-10)


WHOLE = ("ddp", "zero 2")  # ranks have all parameters, as they are


def freeze(plan: str) -> Any:
    """Train a policy with a critic of which only the head is trained; return its changes, and records."""
    colossalai.launch_from_torch({}, verbose=False)
    model, critic = causal(), value_model()
    critic.requires_grad_(False)
    critic.score.requires_grad_(True)
    before = [each.clone() for each in critic.parameters()]
    method = PPO(reward=digits, max_length=32, iterations=2)
    records = fit(method, model, sgd(model), Booster(plugin=PLUGINS[plan]()), critic=critic)
    names = [
        name
        for (name, now), then in zip(critic.named_parameters(), before, strict=False)  # a stage has fewer
        if plan in WHOLE and not torch.equal(then, now)
    ]
    gpc.destroy()
    return names, [
        {key: value for key, value in each.items() if not key.startswith(("seconds", "tokens_per_second"))}
        for each in records
    ]


@pytest.mark.parametrize("plan", ["zero 2", *map(further, ("ddp", "fsdp", "gemini", "tp 2", "pp 2"))])
def test_a_critic_with_a_frozen_trunk_learns_as_in_one_process(plan: str) -> None:
    ((names, alone),) = run_ranks(freeze, 1, "ddp")
    assert names == ["score.weight"]
    assert alone[0]["value_loss"] != alone[-1]["value_loss"]
    for own_names, found in run_ranks(freeze, 2, plan):
        assert own_names == (names if plan in WHOLE else [])
        for own, other in zip(found, alone, strict=True):
            for key, value in own.items():
                tolerance = 1e-6 if key.startswith("logprob_gap") else 1e-10
                assert value == pytest.approx(other[key], rel=1e-10, abs=tolerance), key


def mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model, method = causal(), GRPO(reward=digits, group_size=2)
    before = [each.clone() for each in model.parameters()]
    endless, many, plain = (copy.deepcopy(tokenizer()) for _ in range(3))
    endless.eos_token = None
    many.add_tokens(["<a>", "<b>"])
    plain.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chats = chat_data([{"messages": [{"role": "user", "content": "3+4="}]}] * 2, "prompts")
    for options, error, words in (
        ({"tokenizer": endless}, ValueError, "no end-of-sequence token, so an answer could never end"),
        ({"tokenizer": many}, ValueError, r"the tokenizer has \d+ tokens, and the model has \d+"),
        ({"tokenizer": plain, "data": chats}, ChatTemplateError, "has no generation prompt"),
    ):
        with pytest.raises(error, match=words):
            fit(method, model, sgd(model), Booster(), **options)
    own, wide = make_toy_tokenizer(), causal()
    other = with_value_head(wide)
    other.config.vocab_size += 1
    with pytest.raises(ValueError, match="or as reward a ModelReward, which has a tokenizer of its own"):
        fit(GRPO(reward=RewardSum({"model": (1.0, other)})), model, sgd(model), Booster())
    mine = ModelReward(model=with_value_head(model), tokenizer=tokenizer())
    with pytest.raises(ValueError, match="the reward 'model' shares parameters with the model"):
        fit(GRPO(reward=RewardSum({"model": (1.0, mine)})), model, sgd(model), Booster())
    reward = ModelReward(model=other, tokenizer=own)  # of another vocabulary, which it has a tokenizer for
    fit(GRPO(reward=reward, group_size=2, max_length=32), another := causal(), sgd(another), Booster())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    sft = SFT(max_length=32)
    data = chat_data(make_toy_data("sums", 3, 0))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        sft.fit(model, sgd(model), booster=Booster(), data=data, tokenizer=endless, steps=1)
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(mistakes, 1)
