"""Rollouts: what the engine draws has the log-probabilities of the model in training, after each sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.booster import Booster
from colossalai.chat import RolloutEngine
from colossalai.chat._fit import forward_only, step_of
from colossalai.chat.rollout._sampler import LocalSampler
from colossalai.checkpoint_io import load_model
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import further, in_soak
from tests.turns import in_turn, run_each

pytestmark = pytest.mark.dist

WHOLE = ("ddp", "zero 1", "zero 2")
PARTS = ("fsdp", "gemini", "tp 2", "pp 2", "tp 2, zero 1")


def squares(output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a loss that moves all parameters."""
    logits = output if isinstance(output, Tensor) else output.logits
    return logits.square().sum(), torch.tensor(float(logits.numel()))


def model_of(family: str, rank: int) -> Any:
    """Return a model, with adapters of a rank if that is not 0."""
    if rank == 0:
        return causal(family)
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model = get_peft_model(causal(family), config)
    model.add_adapter("idle", LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear"))
    return model.double()


def rollouts_of(plan: str, family: str, rank: int, folder: str) -> Any:
    """Return log-probabilities of answers, and those that the model gives their tokens, after each step."""
    colossalai.launch_from_torch({}, verbose=False)
    raw, twin = model_of(family, rank), model_of(family, rank).eval()
    booster = Booster(plugin=PLUGINS[plan]())
    trained = [param for param in raw.parameters() if param.requires_grad]
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(trained, lr=0.01))
    engine = RolloutEngine(model, tokenizer(), max_length=60)
    assert (engine.copy_bytes == 0) == (plan in WHOLE)
    ids = tokenizer()("3+4=" * 12).input_ids  # some blocks of the cache, which the next step must not find
    batch = {"input_ids": torch.tensor([ids, ids])}, {"counts": torch.ones(2)}
    found = []
    for step in range(4):
        (group,) = engine.generate([ids], [SamplingParams(n=3, seed=5, max_tokens=6)])
        booster.save_model(model, f"{folder}/{step}")
        load_model(twin, f"{folder}/{step}")
        for each in group:
            whole = torch.tensor([[*ids, *each.token_ids]])
            with torch.no_grad():
                logp = twin(whole).logits.log_softmax(2)[0, len(ids) - 1 : -1]
            found.append((each.logprobs, logp.gather(1, whole[0, len(ids) :, None])[:, 0].tolist()))
        if step == 2 and plan in WHOLE and not rank:
            for param in raw.parameters():
                param.data.mul_(1.1)  # which no version tells
        else:
            step_of([batch], model, optimizer, booster=booster, criterion=squares)
        engine.sync()
        assert engine.version == step + 1
    gpc.destroy()
    return found


def check(plans: Sequence[str], family: str, rank: int, folder: Path) -> None:
    num_ranks = 4 if "tp 2, zero 1" in plans else 2
    cells = [(plan, family, rank, f"{folder}/{plan}") for plan in plans]
    for plan, of_ranks in zip(plans, run_each(num_ranks, rollouts_of, cells), strict=True):
        for found in of_ranks:
            assert len({each for each, _ in found}) > 3, plan
            for engine, trainer in found:
                assert engine == pytest.approx(trainer, abs=1e-5), plan


def test_log_probabilities_are_those_of_what_was_drawn(tmp_path: Path) -> None:
    check(("zero 2", "fsdp", "tp 2"), "llama", 0, tmp_path)  # stages answer in test_grpo.py and test_ppo.py


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "plans"),
    [
        ("llama", ["ddp", "zero 1", "gemini", "pp 2"]),
        ("llama", ["tp 2, zero 1"]),
        ("gpt2", ["zero 1", "fsdp", "tp 2"]),
        ("gpt2", ["tp 2, zero 1"]),
        ("opt", ["ddp", "zero 2", "gemini", "pp 2"]),
        in_soak("gpt2", ["ddp", "zero 2", "gemini", "pp 2"]),
        in_soak("opt", ["zero 1", "fsdp", "tp 2"]),
        in_soak("opt", ["tp 2, zero 1"]),
    ],
)
def test_further_families(plans: Sequence[str], family: str, tmp_path: Path) -> None:
    check(plans, family, 0, tmp_path)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("zero 2", "gpt2"),
        pytest.param("tp 2", "llama", marks=pytest.mark.long),
        pytest.param("pp 2", "llama", marks=pytest.mark.long),
        pytest.param("ddp", "opt", marks=pytest.mark.long),
    ],
)
def test_an_engine_answers_with_adapters(plan: str, family: str, tmp_path: Path) -> None:
    check([plan], family, 3, tmp_path)


def syncs(plan: str) -> tuple[dict[str, float], int, int]:
    """Return the bytes that a sync sends along each axis, those of the model, and of tensors in slices."""
    colossalai.launch_from_torch({}, verbose=False)
    raw = causal()
    whole = dict(causal().named_parameters())
    model, *_ = Booster(plugin=PLUGINS[plan]()).boost(raw, torch.optim.SGD(raw.parameters(), lr=1.0))
    engine = RolloutEngine(model, tokenizer(), max_length=60)
    with ledger() as book:
        engine.sync()
    sent = {axis: book.num_bytes(axis=axis) for axis in {each.axis for each in book.entries}}
    sliced = [
        whole[name].nbytes
        for name, param in model.unwrap().named_parameters()
        if name in whole and param.shape != whole[name].shape
    ]
    gpc.destroy()
    return sent, sum(param.nbytes for param in whole.values()), sum(sliced)


@pytest.mark.parametrize(
    ("plans", "num_ranks"), [(["tp 2, zero 1"], 4), further(["pp 2", "fsdp"], 2)], ids=["tensors", "others"]
)
def test_a_sync_moves_each_byte_once(plans: list[str], num_ranks: int) -> None:
    for plan, found in zip(plans, run_each(num_ranks, syncs, [(plan,) for plan in plans]), strict=True):
        for sent, total, sliced in found:
            assert 0 < sliced < total or "tp" not in plan
            # Each rank lacks half of what is cut, and replicas do not tell each other what both have.
            assert sum(sent.values()) == {"tp": sliced, "pp": total, "fs": total}[plan[:2]] / 2
            assert not any("dp" in axis for axis in sent) or plan == "fsdp"


def refuses() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    from peft import LoraConfig, get_peft_model

    for options, words in (
        ({"lora_bias": True}, "lora_B.default.bias"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.modules_to_save.default.weight"),
    ):
        model = get_peft_model(causal(), LoraConfig(target_modules=["q_proj"], **options))
        with pytest.raises(ValueError, match=f"cannot serve this model: .*{words}"):
            RolloutEngine(model, tokenizer(), max_length=60, has_copy=True)
    model = get_peft_model(causal(), LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="has 2 adapters at work"):
        RolloutEngine(model, tokenizer(), max_length=60, has_copy=True)
    tied = get_peft_model(causal("gpt2"), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight and lm_head\.weight are one weight"):
        RolloutEngine(tied, tokenizer(), max_length=60, has_copy=True)
    whole, state = causal(), torch.get_rng_state()
    RolloutEngine(whole, tokenizer(), max_length=60, has_copy=True)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="placement is 'there'"):
        RolloutEngine(causal(), tokenizer(), max_length=60, placement="there")
    with pytest.raises(ValueError, match="give placement='ray', too"):
        RolloutEngine(causal(), tokenizer(), max_length=60, resources={"num_gpus": 1})
    gpc.destroy()


def test_adapters_that_an_engine_would_leave_out_are_refused() -> None:
    run_ranks(refuses, 1)


ADAPTERS: list[dict[str, Any]] = [
    {"lora_bias": True, "target_modules": ["c_attn"]},
    {"use_dora": True, "target_modules": ["c_fc"]},
    {"target_modules": ["lm_head"]},  # whose weight is that of the embedding, too
]


def shared_with_adapters(number: int) -> None:
    """Compare an engine that reads layers with adapters with the model, before and after a step."""
    colossalai.launch_from_torch({}, verbose=False)
    from peft import LoraConfig, get_peft_model

    raw = get_peft_model(causal("gpt2"), LoraConfig(init_lora_weights=False, **ADAPTERS[number])).double()
    if number == 0:
        raw.add_adapter("other", LoraConfig(init_lora_weights=False, target_modules=["c_attn"]))
        raw.base_model.set_adapter(["default", "other"])
    booster = Booster(plugin=PLUGINS["zero 2"]())
    trained = [param for param in raw.double().parameters() if param.requires_grad]
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(trained, lr=0.1))
    engine = RolloutEngine(model, tokenizer(), max_length=60)
    assert engine.copy_bytes == 0
    ids = tokenizer()("3+4=" * 8).input_ids
    batch = {"input_ids": torch.tensor([ids])}, {"counts": torch.ones(1)}
    for _ in range(2):
        ((answer,),) = engine.generate([ids], [SamplingParams(seed=5, max_tokens=6)])
        whole = torch.tensor([[*ids, *answer.token_ids]])
        logp = forward_only(
            model, {"input_ids": whole}, lambda output: output.logits.log_softmax(2), booster=booster
        )
        trainer = logp[0, len(ids) - 1 : -1].gather(1, whole[0, len(ids) :, None])[:, 0]
        assert answer.logprobs == pytest.approx(trainer.tolist(), abs=1e-6)
        step_of([batch], model, optimizer, booster=booster, criterion=squares)
        engine.sync()
    gpc.destroy()


def test_an_engine_reads_layers_with_any_adapters() -> None:
    run_ranks(in_turn, 1, [(shared_with_adapters, number) for number in range(len(ADAPTERS))])


def refuses_on_one_stage() -> str:
    colossalai.launch_from_torch({}, verbose=False)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], layers_to_transform=[0])  # of the first stage
    raw = get_peft_model(causal(), config)
    raw.add_adapter("other", config)
    raw.base_model.set_adapter(["default", "other"])
    trained = [param for param in raw.parameters() if param.requires_grad]
    model, *_ = Booster(plugin=PLUGINS["pp 2"]()).boost(raw, torch.optim.SGD(trained, lr=1.0))
    with pytest.raises(ValueError, match="has 2 adapters at work") as caught:
        RolloutEngine(model, tokenizer(), max_length=60)
    gpc.destroy()
    return str(caught.value)


def test_what_one_stage_has_is_refused_on_all() -> None:
    first, second = run_ranks(refuses_on_one_stage, 2)
    assert first == second


def test_layers_that_are_frozen_stay_so_after_answers_and_losses() -> None:
    """A model in training, of which a layer is in evaluation mode, is sampled from and measured."""
    model = causal().train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    ids = tokenizer()("3+4=").input_ids
    LocalSampler(model, tokenizer(), kv_memory=2**20).generate([ids], [SamplingParams(max_tokens=1)])
    no_booster: Any = None
    batch = {"input_ids": torch.tensor([ids])}
    logits = forward_only(model, batch, lambda output: output.logits, booster=no_booster)
    assert logits.shape[:2] == (1, len(ids))
    assert {name: module.training for name, module in model.named_modules()} == before
