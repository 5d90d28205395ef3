"""PPO: policy and critic train on any number of ranks as in one process, and rewards rise."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import PPO, chat_data, with_value_head
from colossalai.chat._fit import forward_only
from colossalai.chat.data import encode_all, make_toy_data
from colossalai.chat.losses import token_logprobs
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.cells import assert_same, beside_one_process, sorting_model, without_times
from tests.chat.test_grpo import PLANS, SAMPLING, digits, prompts
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import every_other, of_soak, pairwise

pytestmark = pytest.mark.dist


def value_model(family: str = "llama", seed: int = 1) -> Any:
    model = causal(family)
    torch.manual_seed(seed)
    return with_value_head(model)


def train(plan: str, family: str, options: dict[str, Any], **more: Any) -> list[dict[str, float]]:
    """Train for two passes over prompts that no number of ranks divides."""
    colossalai.launch_from_torch({}, verbose=False)
    options = dict(options)
    model, critic = causal(family), value_model(family)
    booster = Booster(plugin=PLUGINS[plan]())
    reward = value_model(family, seed=2) if options.pop("has_reward_model", False) else digits
    texts = chat_data(make_toy_data("sums", 7, 0)) if options.get("ptx_coef") else None
    result = PPO(reward=reward, max_length=32, **options).fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        critic=critic,
        critic_optimizer=torch.optim.SGD(critic.parameters(), lr=0.05),
        reference=causal(family) if options.get("kl_coef", 0.1) else None,
        pretrain=texts,
        booster=booster,
        data=prompts(),
        tokenizer=tokenizer(),
        sampling=SAMPLING,
        batch_size=4 // booster.mesh.axis_size("dp"),
        ptx_batch_size=2 // booster.mesh.axis_size("dp"),
        rows_at_once=2,
        **(more or {"epochs": 2}),
    )
    return without_times(result.records)


WAYS: list[dict[str, Any]] = [
    {"iterations": 2},
    {"iterations": 1, "kl_coef": 0.0, "has_reward_model": True},
    {"iterations": 2, "minibatches": 3, "ptx_coef": 0.9, "gamma": 0.99, "value_clip": math.inf},
]  # 4 answers, or one, in 3 steps


def check(cells: list[tuple[str, str, dict[str, Any]]], num_ranks: int) -> None:
    for cell, found, wanted in beside_one_process(
        train, cells, num_ranks, lambda plan, family, way: ("ddp", family, way)
    ):
        assert len(found) == 4 * cell[2]["iterations"] * cell[2].get("minibatches", 1)
        assert_same(found, wanted, cell)


def test_on_two_ranks() -> None:
    odd = {"iterations": 1, "minibatches": 3, "kl_coef": 0.0}  # which divides no number of answers
    check([("pp 2", "gpt2", {**WAYS[2], "has_reward_model": True}), ("zero 2", "llama", odd)], 2)


CELLS = pairwise(PLANS, ("llama", "gpt2", "opt"), WAYS)


@pytest.mark.parametrize("plan", every_other(PLANS, first=1))  # test_grpo.py has those between
def test_further_ways(plan: str) -> None:
    check([cell for cell in CELLS if cell[0] == plan], 4 if "," in plan else 2)


def look_at_all() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each rank reads off policy and critic: under a plan, and with the whole models."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(3)
    ids = torch.randint(2, 40, (4, 9))  # two microbatches
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    booster, found = Booster(plugin=PLUGINS["pp 2"]()), []
    reads: tuple[tuple[Any, Any], ...] = (
        (causal, lambda output: token_logprobs(output.logits[:, :-1], ids[:, 1:])),
        (value_model, lambda output: output[:, :-1]),
    )
    for make, read in reads:
        model = make()
        wanted = read(make()(**data)).detach()
        wrapped, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found.append((forward_only(wrapped, data, read, booster=booster), wanted))
    gpc.destroy()
    return found


def test_all_stages_know_what_is_read_off_the_last_one() -> None:
    for found in run_ranks(look_at_all, 2):
        for own, wanted in found:
            torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-10)


def resume(folder: str) -> Any:
    """Train four steps at once; and two, then all four from the training state of the second."""
    results = []
    for name, times in (("whole", (4,)), ("parts", (2, 4))):
        for steps in times:
            more = {"save": f"{folder}/{name}", "resume": f"{folder}/{name}", "steps": steps}
            found = train("zero 1", "llama", {"iterations": 2}, **more)
            gpc.destroy()
        results.append(found)
    return results


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    for whole, parts in run_ranks(resume, 2, str(tmp_path)):
        assert [each["step"] for each in parts] == [3, 4]
        assert parts == whole[2:]


def resume_without_critic(folder: str) -> str:
    train("ddp", "llama", {}, save=folder, resume=folder, steps=1)
    gpc.destroy()
    shutil.rmtree(f"{folder}/critic")
    with pytest.raises(FileNotFoundError, match="no such training state") as caught:
        train("ddp", "llama", {}, resume=folder, steps=2)
    gpc.destroy()
    return str(caught.value)


def test_a_state_without_its_critic_is_refused(tmp_path: Path) -> None:
    assert "critic/step-00000001" in run_ranks(resume_without_critic, 1, str(tmp_path))[0]


def sft_of(length: int) -> Any:
    return chat_data([{"prompt": "q", "completion": "y" * (length - 1)}], "sft")


def short() -> Any:
    """Return a value model that sees 20 tokens."""
    model = value_model()
    model.config.max_position_embeddings = 20
    return model


def mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    plain: dict[str, Any] = {"booster": Booster(), "tokenizer": tokenizer(), "data": prompts(), "steps": 1}
    sft, with_texts = chat_data(make_toy_data("sums", 3, 0)), PPO(reward=digits, kl_coef=0.0, ptx_coef=0.5)
    model, wide = causal(), causal()
    before = [each.clone() for each in model.parameters()]
    wide.config.vocab_size += 1
    texts = chat_data([{"prompt": "3+4=" * 3000, "completion": "7"}])
    for options, method, words in (
        ({}, PPO(reward=digits), "kl_coef=0.1 and reference=NoneType"),
        ({"pretrain": sft}, PPO(reward=digits, kl_coef=0.0), r"ptx_coef=0.0 and pretrain=ChatData"),
        ({"data": sft}, PPO(reward=digits, kl_coef=0.0), "PPO learns from prompts"),
        ({"pretrain": prompts()}, PPO(reward=digits, kl_coef=0.0, ptx_coef=0.5), "rows of stage 'prompts'"),
        ({}, PPO(reward=with_value_head(wide), kl_coef=0.0), "has a vocabulary of"),
        (
            {"pretrain": texts},
            PPO(reward=digits, max_length=4096, kl_coef=0.0, ptx_coef=0.5),
            r"a text of 4096 tokens, and the model sees 2048: give max_length=2048",
        ),
        ({"pretrain": encode_all(sft_of(2100), tokenizer(), 3000)}, with_texts, "a text of 2101 tokens"),
        ({"rows_at_once": 0}, PPO(reward=digits, kl_coef=0.0), "rows_at_once=0"),
        ({"tokens_at_once": 8}, PPO(reward=digits, kl_coef=0.0), "tokens_at_once=8: give an integer of at l"),
        ({"ptx_batch_size": 0}, PPO(reward=digits, kl_coef=0.0), "ptx_batch_size=0"),
        ({"critic": with_value_head(model)}, PPO(reward=digits, kl_coef=0.0), "the critic shares parameters"),
        ({"reference": model}, PPO(reward=digits), "the reference shares parameters with the model"),
        ({"reference": value_model()}, PPO(reward=digits), "the reference has a value head, and no probab"),
        ({"critic": causal()}, PPO(reward=digits, kl_coef=0.0), "the critic is a LlamaForCausalLM without a"),
        ({"critic": short()}, PPO(reward=digits, kl_coef=0.0), "fit into the 20 tokens that the critic sees"),
        ({}, PPO(reward=short(), kl_coef=0.0), "20 tokens that the reward sees: give max_tokens=14"),
        ({}, PPO(reward=with_value_head(model), kl_coef=0.0), "the reward shares parameters with the model"),
    ):
        critic = value_model()
        given = {
            "critic": critic,
            "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1),
            **plain,
            **options,
        }
        with pytest.raises(ValueError, match=words):
            method.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    # Nothing has been boosted: the same model could be given again and again.
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for options, words in (
        ({"clip": 0.0}, "clip is 0.0"),
        ({"iterations": 0}, "iterations=0"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"ptx_coef": -1.0}, "ptx_coef is -1.0"),
        ({"ptx_coef": math.inf}, "ptx_coef is inf"),
        ({"gamma": 2.0}, "gamma"),
        ({"value_clip": -1.0}, "clip"),
    ):
        with pytest.raises(ValueError, match=words):
            PPO(reward=digits, **options)
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(mistakes, 1)


def spoil() -> list[bool]:
    """Train with a critic that diverges on rank 1; return which parameters of the policy are finite."""
    colossalai.launch_from_torch({}, verbose=False)
    model, critic = causal(), value_model()
    with pytest.raises(FloatingPointError, match="the values of the critic have grown without bounds"):
        PPO(reward=digits, max_length=32, iterations=1, kl_coef=0.0).fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            critic=critic,
            critic_optimizer=torch.optim.SGD(critic.parameters(), lr=1e300 * (gpc.get_global_rank() == 1)),
            booster=Booster(),
            data=prompts(),
            tokenizer=tokenizer(),
            sampling=SAMPLING,
            steps=3,
            batch_size=2,
        )
    gpc.destroy()
    return [bool(each.isfinite().all()) for each in model.parameters()]


def test_a_critic_that_diverges_ends_the_run_before_the_policy_does() -> None:
    for found in run_ranks(spoil, 2):
        assert all(found)


def improve() -> tuple[float, float]:
    """Learn to sort a little from texts, then more from rewards; return the first and last rewards."""
    colossalai.launch_from_torch({}, verbose=False)
    model, optimizer, given = sorting_model()
    raw = model.unwrap()
    copies = [type(raw)(raw.config) for _ in range(2)]
    for each in copies:
        each.load_state_dict(model.state_dict())
    critic = with_value_head(copies[0])
    for group in optimizer.param_groups:
        group["lr"] = 3e-4
    exact: Any = lambda prompt, answer, row: float(answer == row["answer"])  # noqa: E731
    result = PPO(reward=exact, kl_coef=0.01, iterations=2).fit(
        model,
        optimizer,
        critic=critic,
        critic_optimizer=torch.optim.AdamW(critic.parameters(), lr=1e-3),
        reference=copies[1],
        data=chat_data(make_toy_data("sort", 400, 1, stage="prompts"), "prompts"),
        sampling=SamplingParams(max_tokens=12),
        steps=120,
        batch_size=32,
        **given,
    )
    rewards = [each["reward"] for each in result.records if "reward" in each]
    gpc.destroy()
    return sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10


@of_soak  # docs/chat/ppo.md, which make long runs, says that they rise
def test_rewards_rise() -> None:
    first, last = run_ranks(improve, 2)[0]
    assert 0.2 < first < 0.85
    assert last > first + 0.1


def with_dropout() -> list[dict[str, float]]:
    """Train a step of a model that leaves features out in training."""
    colossalai.launch_from_torch({}, verbose=False)
    model, critic = causal("gpt2"), value_model("gpt2")
    for part in (*model.modules(), *critic.modules()):
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.3
    # Prompts of a few tokens fit into a window of 64 with their answers, whatever max_length is.
    result = PPO(reward=digits, max_length=512, iterations=1, kl_coef=0.0).fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        critic=critic,
        critic_optimizer=torch.optim.SGD(critic.parameters(), lr=0.1),
        booster=Booster(),
        data=prompts(),
        tokenizer=tokenizer(),
        sampling=SAMPLING,
        steps=1,
        batch_size=4,
    )
    gpc.destroy()
    return list(result.records)


def test_what_answers_are_compared_with_leaves_nothing_out() -> None:
    ((record,),) = run_ranks(with_dropout, 1)
    assert record["logprob_gap_largest"] < 1e-5
    assert record["kl"] > 1e-6  # of the step, which leaves features out
