"""A step of each method is that of a loop in plain torch: tokens, masks and rewards in their places."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.booster import Booster
from colossalai.chat import DPO, GRPO, PPO, SFT, RewardModeling, Rollout, RolloutEngine
from colossalai.chat.data import encode_all
from colossalai.core import global_context as gpc
from tests.chat.test_grpo import SAMPLING, prompts
from tests.chat.tiny import causal, model_for, rows_for, tokenizer
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

LR = 0.5  # of GPT-2: norms of Llama are in float32 in transformers, whatever the model is
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def logp_of(model: Any, ids: list[int]) -> Tensor:
    """Return the log-probability of each token but the first, computed for this text alone."""
    table = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(1)
    return torch.stack([row[token] for row, token in zip(table, ids[1:], strict=True)])


def answer_logp(model: Any, text: Any) -> Tensor:
    learned = torch.tensor(text.loss_mask[1:])
    return logp_of(model, text.input_ids)[learned]


def compare(model: Any, found: float, twin: Any, loss: Tensor) -> None:
    """Compare a step of a model with one of its twin by the loss."""
    assert found == pytest.approx(loss.item(), rel=1e-9)
    params = list(twin.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.data -= LR * grad
    for (name, param), other in zip(model.named_parameters(), params, strict=True):
        torch.testing.assert_close(param, other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def learn_texts(name: str) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    rows = rows_for(name, 5)
    encoded = encode_all(rows, tokenizer(), 64)
    model, twin = model_for(name, "gpt2"), model_for(name, "gpt2")
    methods: dict[str, Any] = {
        "sft": SFT(max_length=64),
        "reward": RewardModeling(max_length=64),
        "dpo": DPO(max_length=64),
    }
    reference = causal("gpt2")
    with torch.no_grad():
        for each in reference.parameters():
            each.mul_(1.1)
    given: dict[str, Any] = {"booster": Booster(), "tokenizer": tokenizer()}
    data: Any = rows
    if name == "dpo":
        data = methods[name].with_reference(rows, reference, **given)
    result = methods[name].fit(
        model, torch.optim.SGD(model.parameters(), lr=LR), data=data, steps=1, batch_size=5, **given
    )
    if name == "sft":
        logps = [answer_logp(twin, text) for text in encoded.texts]
        loss = -torch.cat(logps).mean()
    elif name == "reward":
        values = [[twin(torch.tensor([text.input_ids]))[0, -1] for text in pair] for pair in encoded.pairs]
        loss = torch.stack([(1 + (rejected - chosen).exp()).log() for chosen, rejected in values]).mean()
    else:
        margins = []
        for pair in encoded.pairs:
            own, theirs = ([answer_logp(each, text).sum() for text in pair] for each in (twin, reference))
            margins.append(0.1 * ((own[0] - theirs[0]) - (own[1] - theirs[1])))
        loss = torch.stack([(1 + (-each).exp()).log() for each in margins]).mean()
    compare(model, result.records[0]["loss"], twin, loss)
    gpc.destroy()


@pytest.mark.parametrize("name", ["sft", "reward", "dpo"])
def test_a_step_on_texts(name: str) -> None:
    run_ranks(learn_texts, 1, name)


ANSWERS = {0: [(5, 9, 1), (7, 1)], 1: [(8, 8, 8, 8), (6, 1)], 2: [(1,), (4, 3, 1)]}
REWARDS = {"a": 1.0, "b": 0.25}


def reward(prompt: str, answer: str, row: Any) -> float:
    return REWARDS[answer]


def fixed(self: RolloutEngine, asked: Any, params: Any) -> list[list[Rollout]]:
    """Answer prompts as written above, whatever the model says."""
    texts = [each.input_ids for each in encode_all(prompts(3), tokenizer(), 32).texts]
    return [
        [
            Rollout(token_ids=ids, logprobs=(0.0,) * len(ids), text=text, is_cut=False)
            for ids, text in zip(ANSWERS[texts.index(list(ids_of_prompt))], REWARDS, strict=True)
        ][: given.n]
        for ids_of_prompt, given in zip(asked, params, strict=True)
    ]


def learn_groups() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model, twin, reference = causal("gpt2"), causal("gpt2"), causal("gpt2")
    with torch.no_grad():
        for each in reference.parameters():
            each.mul_(1.05)
    with mock.patch.object(RolloutEngine, "generate", fixed):
        result = GRPO(reward=reward, group_size=2, max_length=32, kl_coef=0.2, normalize="sequence").fit(
            model,
            torch.optim.SGD(model.parameters(), lr=LR),
            booster=Booster(),
            data=prompts(3),
            tokenizer=tokenizer(),
            sampling=SAMPLING,
            reference=reference,
            steps=1,
            batch_size=3,
            rows_at_once=4,
        )
    losses = []
    for number, text in enumerate(encode_all(prompts(3), tokenizer(), 32).texts):
        deviation = torch.tensor([1.0, 0.25], dtype=torch.float64).std() + 1e-4
        for ids, advantage in zip(ANSWERS[number], (0.375 / deviation, -0.375 / deviation), strict=True):
            whole = [*text.input_ids, *ids]
            own = logp_of(twin, whole)[-len(ids) :]
            with torch.no_grad():
                other = logp_of(reference, whole)[-len(ids) :]
            ratio = (own - own.detach()).exp()
            k3 = (other - own).exp() - (other - own) - 1
            losses.append((-ratio * advantage + 0.2 * k3).mean())
    compare(model, result.records[0]["loss"], twin, torch.stack(losses).mean())
    assert result.records[0]["reward"] == pytest.approx(0.625)
    assert result.records[0]["length"] == pytest.approx(15 / 6)
    gpc.destroy()


def test_a_step_on_groups_of_answers() -> None:
    run_ranks(learn_groups, 1)


def learn_with_a_critic() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model, twin, reference = causal("gpt2"), causal("gpt2"), causal("gpt2")
    critic, critic_twin = model_for("reward", "gpt2"), model_for("reward", "gpt2")
    with torch.no_grad():
        for each in reference.parameters():
            each.mul_(1.05)
    with mock.patch.object(RolloutEngine, "generate", fixed):
        result = PPO(reward=reward, iterations=1, max_length=32, kl_coef=0.3, gamma=0.9, lam=0.8).fit(
            model,
            torch.optim.SGD(model.parameters(), lr=LR),
            critic=critic,
            critic_optimizer=torch.optim.SGD(critic.parameters(), lr=LR),
            reference=reference,
            booster=Booster(),
            data=prompts(3),
            tokenizer=tokenizer(),
            sampling=SAMPLING,
            steps=1,
            batch_size=3,
            rows_at_once=2,
        )
    own, values, advantages, returns = [], [], [], []
    for number, text in enumerate(encode_all(prompts(3), tokenizer(), 32).texts):
        ids = ANSWERS[number][0]  # of which the reward is 1
        whole = [*text.input_ids, *ids]
        own.append(logp_of(twin, whole)[-len(ids) :])
        values.append(critic_twin(torch.tensor([whole]))[0, -len(ids) - 1 : -1])
        with torch.no_grad():
            paid = -0.3 * (own[-1] - logp_of(reference, whole)[-len(ids) :])
        paid[-1] += 1.0
        known, later = [*values[-1].tolist(), 0.0], 0.0
        found = []
        for place in reversed(range(len(ids))):
            later = paid[place].item() + 0.9 * known[place + 1] - known[place] + 0.9 * 0.8 * later
            found.insert(0, later)
        advantages.append(torch.tensor(found, dtype=torch.float64))
        returns.append(advantages[-1] + values[-1].detach())
    given = torch.cat(advantages)
    white = (given - given.mean()) / (given.var() + 1e-8).sqrt()
    logp = torch.cat(own)
    loss = -((logp - logp.detach()).exp() * white).mean()
    assert result.records[0]["loss"] == pytest.approx(loss.item(), abs=1e-9)
    critic_loss = 0.5 * (torch.cat(values) - torch.cat(returns)).square().mean()
    compare(critic, result.records[0]["value_loss"], critic_twin, critic_loss)
    params = list(twin.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.data -= LR * grad
    for (name, param), other in zip(model.named_parameters(), params, strict=True):
        torch.testing.assert_close(param, other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    gpc.destroy()


def test_a_step_with_a_critic() -> None:
    run_ranks(learn_with_a_critic, 1)
