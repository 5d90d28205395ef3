"""Models learn what the methods are there for, and tell it apart on questions that they have not seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import DPO, SFT, RewardModeling, chat_data, with_value_head
from colossalai.chat.data import make_toy_data, make_toy_tokenizer
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def learn(name: str) -> tuple[Any, Any]:
    """Train on sorting; return what is measured before and after on questions of another split."""
    from transformers import LlamaConfig, LlamaForCausalLM

    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    tokenizer = make_toy_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    method = {"sft": SFT(max_length=32), "reward": RewardModeling(max_length=32), "dpo": DPO(max_length=32)}[
        name
    ]
    if name == "reward":
        model = with_value_head(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3)
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, optimizer)
    stage: Any = "sft" if name == "sft" else "preference"
    data = chat_data(make_toy_data("sort", 400, 0, stage=stage))
    held_out: Any = chat_data(make_toy_data("sort", 100, 0, stage=stage, split="test"))
    given: Any = {"booster": booster, "tokenizer": tokenizer}
    if isinstance(method, DPO):
        held_out = method.with_reference(held_out, model, **given)
    before = method.evaluate(model, data=held_out, **given)
    method.fit(model, optimizer, data=data, epochs=3, batch_size=16, **given)
    after = method.evaluate(model, data=held_out, **given)
    gpc.destroy()
    return before, after


@pytest.mark.long  # `make test` has what is learned from comparisons, below
def test_answers_are_learned() -> None:
    before, after = run_ranks(learn, 1, "sft")[0]
    assert after["loss"] < 0.5 * before["loss"]


@pytest.mark.parametrize("name", [further("reward"), "dpo"])
def test_comparisons_are_learned(name: str) -> None:
    before, after = run_ranks(learn, 1, name)[0]
    assert after["accuracy"] >= 0.95
    assert after["margin"] > before["margin"] + 0.5
