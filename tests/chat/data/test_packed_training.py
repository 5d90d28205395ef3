"""Packed texts: a step on them is that on the same texts one by one, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.chat import SFT
from colossalai.chat.data import encode_all, pack
from colossalai.core import global_context as gpc
from tests.chat.cells import TOLERANCE, beside_one_process
from tests.chat.tiny import PLUGINS, causal, rows_for, tokenizer
from tests.ranks import run_ranks
from tests.tiers import in_soak

NUM_ROWS, LENGTH = 13, 48


def packed_rows() -> int:
    encoded = encode_all(rows_for("sft", NUM_ROWS), tokenizer(), LENGTH)
    return len(pack(encoded.texts, LENGTH))


def train(plan: str, family: str, is_packed: bool) -> Any:
    """Make three steps, each on all texts; return losses, and that of held-out texts."""
    colossalai.launch_from_torch({}, verbose=False)
    booster, model = Booster(plugin=PLUGINS[plan]()), causal(family)
    method = SFT(max_length=LENGTH, pack=is_packed)
    given: Any = {"booster": booster, "tokenizer": tokenizer()}
    replicas = booster.mesh.axis_size("dp")
    num_rows = packed_rows() if is_packed else NUM_ROWS
    result = method.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        data=rows_for("sft", NUM_ROWS),
        epochs=3,
        batch_size=2,
        accumulation=-(-num_rows // (2 * replicas)),
        **given,
    )
    held_out = rows_for("sft", 7, split="test")
    after = method.evaluate(result.model, data=held_out, batch_size=2, **given)
    return [each["loss"] for each in result.records], after["loss"]


def check(cells: list[tuple[str, str]], num_ranks: int = 2) -> None:
    packed = [(plan, family, True) for plan, family in cells]
    for cell, (losses, after), wanted in beside_one_process(
        train, packed, num_ranks, lambda plan, family, is_packed: ("ddp", family, False)
    ):
        assert losses == pytest.approx(wanted[0], abs=TOLERANCE), cell
        assert after == pytest.approx(wanted[1], abs=TOLERANCE), cell
        assert losses[-1] < losses[0] - 0.01


@pytest.mark.dist
def test_on_two_ranks() -> None:
    assert packed_rows() < NUM_ROWS / 2
    assert packed_rows() % 2 == 1  # no number of ranks divides them
    check([("zero 2", "gpt2"), ("tp 2", "opt")])


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("first", [0, in_soak(1)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_further_plans(family: str, first: int) -> None:
    """Every other plan for each of them, those between for the next."""
    plans = [plan for plan in PLUGINS if plan != "tp 2, zero 1"]
    check([(plan, family) for plan in plans[first ^ (family == "gpt2") :: 2]])
    check([("tp 2, zero 1", family), ("pp 2", family)], 4)


def small(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def mistakes() -> None:
    from transformers import BambaConfig, BloomConfig, LlamaConfig, MistralConfig

    colossalai.launch_from_torch({}, verbose=False)
    shape: dict[str, Any] = {"vocab_size": len(tokenizer()), "hidden_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
    eager = LlamaConfig(**shape)
    eager._attn_implementation = "eager"
    bloom = BloomConfig(vocab_size=len(tokenizer()), hidden_size=32, n_layer=1, n_head=4)
    for config, words in (
        (eager, "the attention 'eager' of LlamaForCausalLM.*attn_implementation='sdpa'"),
        (bloom, "the attention 'eager' of BloomForCausalLM"),
        (MistralConfig(**shape, sliding_window=16), "a sliding window of 16 tokens.*give max_length=16"),
        (
            BambaConfig(**shape, attn_layer_indices=[], mamba_n_heads=4, mamba_expand=2, mamba_d_head=16),
            "BambaForCausalLM, whose layers carry a state",
        ),
    ):
        model = small(config)
        given: Any = {"booster": Booster(), "tokenizer": tokenizer(), "data": rows_for("sft", 4)}
        with pytest.raises(ValueError, match=words):
            SFT(max_length=LENGTH, pack=True).fit(
                model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1, **given
            )
        with pytest.raises(ValueError, match=words):
            SFT(max_length=LENGTH, pack=True).evaluate(model, **given)
    model = small(MistralConfig(**shape, sliding_window=LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SFT(max_length=LENGTH, pack=True).fit(model, optimizer, steps=1, **given)
    gpc.destroy()


@pytest.mark.dist
def test_models_in_which_texts_would_see_each_other_are_refused() -> None:
    run_ranks(mistakes, 1)


def cut_sequences() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    given: Any = {"booster": Booster(plugin=HybridParallelPlugin(sp_size=2)), "tokenizer": tokenizer()}
    with pytest.raises(ValueError, match="pack=True under sequence parallelism"):
        SFT(pack=True).fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data=rows_for("sft", 4),
            steps=1,
            **given,
        )
    gpc.destroy()


@pytest.mark.dist
def test_sequences_that_ranks_share_are_refused() -> None:
    run_ranks(cut_sequences, 2)
