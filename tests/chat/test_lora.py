"""Adapters train under every plan as in one process, are saved as peft does, and off are the reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster._lora import adapter_tensors
from colossalai.chat import (
    DPO,
    GRPO,
    PPO,
    adapters_off,
    has_adapters,
    merge,
    merged_tensors,
    save_pretrained,
    with_value_head,
)
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from colossalai.shardformer import shard_model
from tests.chat.cells import TOLERANCE, assert_same, beside_one_process, without_times
from tests.chat.test_grpo import SAMPLING, digits, prompts
from tests.chat.tiny import METHODS, PLUGINS, causal, model_for, rows_for, tokenizer
from tests.ranks import run_ranks
from tests.tiers import every_other, further, in_soak, pairwise

pytest.importorskip("peft")

NUM_ROWS, BATCH = 13, 4  # the last batch is ragged, and no number of ranks divides the rows
TARGETS: Mapping[str, Any] = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
}


def adapted(model: nn.Module, family: str = "llama", **options: Any) -> Any:
    """Return a model of peft whose adapters say something from the beginning."""
    from peft import LoraConfig, get_peft_model

    given = {"r": 3, "lora_alpha": 6, "target_modules": TARGETS[family], **options}
    torch.manual_seed(2)
    made = get_peft_model(model, LoraConfig(**given)).double()
    for name, param in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return made


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


# Cells of the matrix.


def train(name: str, plan: str, family: str, folder: str) -> dict[str, Any]:
    """Train over two passes, two batches a step; return records, and what is measured around it."""
    colossalai.launch_from_torch({}, verbose=False)
    method, data = METHODS[name], rows_for(name, NUM_ROWS)
    beside = {"modules_to_save": ["score"]} if name == "reward" else {}
    model: Any = adapted(model_for(name, family), family, **beside)
    booster = Booster(plugin=PLUGINS[plan]())
    optimizer: Any = torch.optim.SGD(trained(model), lr=0.3, momentum=0.9)
    held_out: Any = rows_for(name, 7, split="test")
    size = BATCH // booster.mesh.axis_size("dp")
    options = {"booster": booster, "tokenizer": tokenizer()}
    model, optimizer, *_ = booster.boost(model, optimizer)
    if isinstance(method, DPO):
        with adapters_off(model):
            held_out = method.with_reference(held_out, model, batch_size=size, **options)
    look = partial(method.evaluate, model, data=held_out, batch_size=size, **options)
    with adapters_off(model):
        before = look()
    result = method.fit(
        model, optimizer, data=data, epochs=2, batch_size=size, accumulation=2, max_norm=0.05, **options
    )
    after = look()
    with adapters_off(model):
        base = look()
    where = f"{folder}/{name}-{plan}-{family}-{gpc.mesh.world_size}"
    save_pretrained(model, where, tokenizer=tokenizer(), booster=booster)
    save_pretrained(model, f"{where}-merged", booster=booster, merges=True)
    records = without_times(result.records)
    return {"records": records, "before": before, "base": base, "after": after, "where": where}


def check(cells: list[tuple[str, str, str]], num_ranks: int, folder: Path) -> None:
    """Compare all ranks, and the adapters that they saved, with one process."""

    def is_left_out(place: int, key: str, other: Any) -> bool:
        # The signs of rounding: the model is its reference yet.
        return key == "accuracy" and abs(other["margin"]) < TOLERANCE

    of_folder = [(*cell, str(folder)) for cell in cells]
    for cell, found, wanted in beside_one_process(
        train, of_folder, num_ranks, lambda name, plan, family, folder: (name, "ddp", family, folder)
    ):
        assert len(found["records"]) == 4
        mine, theirs = ([*each["records"], each["base"], each["after"]] for each in (found, wanted))
        assert_same(mine, theirs, cell, is_left_out=is_left_out)
        # The base is frozen: with its adapters off the model is what it was, to the bit.
        assert found["base"]["loss"] == found["before"]["loss"]
        assert abs(found["after"]["loss"] - found["base"]["loss"]) > 1e-6
        for kind in ("", "-merged"):
            own, others = [tensors_in(Path(each["where"] + kind)) for each in (found, wanted)]
            tied = {"lm_head.weight"}  # stages have one each
            assert own.keys() - tied == others.keys() - tied, cell
            for key, tensor in others.items():
                torch.testing.assert_close(own[key], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the files of weights in a folder hold."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.dist
def test_on_two_ranks(tmp_path: Path) -> None:
    cells = [("reward", "pp 2", "opt"), ("dpo", "tp 2", "gpt2")]  # ZeRO is with a model as its own reference
    check(cells, 2, tmp_path)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("first", [0, in_soak(1)])
@pytest.mark.parametrize("names", [list(METHODS)[:2], list(METHODS)[2:]], ids=" ".join)
def test_further_plans_on_two_ranks(names: list[str], first: int, tmp_path: Path) -> None:
    """Every other plan for each method, those between for the next."""
    plans = [plan for plan in PLUGINS if plan != "tp 2, zero 1"]
    cells = [
        (name, plan, "llama") for turn, name in enumerate(names) for plan in plans[(turn + first) % 2 :: 2]
    ]
    check(cells, 2, tmp_path)


@pytest.mark.dist
@pytest.mark.long
def test_on_four_ranks(tmp_path: Path) -> None:
    cells = pairwise(list(METHODS), ("ddp", "pp 2", "tp 2, zero 1"), ("llama", "gpt2", "opt"))
    check(cells, 4, tmp_path)


# What peft and transformers read.


def answer_with(folder: str) -> None:
    """Compare what peft and transformers open with the model that was trained, and a checkpoint of tp 2."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS["tp 2" if gpc.mesh.world_size == 2 else "ddp"]())
    ids = torch.arange(24).reshape(2, 12) + 40
    optimizer: Any
    model: Any = adapted(causal())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(trained(model), lr=0.3))
    if gpc.mesh.world_size == 2:
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        optimizer.step()
        wanted = model(input_ids=ids).logits.detach()
        with pytest.raises(ValueError, match=r"in parts.*save_pretrained\(..., merges=True\)"):
            merge(model)
        save_pretrained(model, f"{folder}/adapters", booster=booster, tokenizer=tokenizer())
        save_pretrained(model, f"{folder}/merged", booster=booster, merges=True)
        booster.save_model(model, f"{folder}/all", shard=True)
        if gpc.mesh.rank == 0:
            torch.save(wanted, f"{folder}/logits")
    else:
        wanted = torch.load(f"{folder}/logits")
        assert (model(input_ids=ids).logits - wanted).abs().max() > 1e-3
        booster.load_model(model, f"{folder}/all")
        alone = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
        for each in (
            model,
            merge(model),
            alone,
            PeftModel.from_pretrained(causal(), f"{folder}/adapters").double(),
        ):
            torch.testing.assert_close(each(input_ids=ids).logits, wanted, rtol=1e-10, atol=1e-10)
    gpc.destroy()


@pytest.mark.dist
def test_others_open_what_two_ranks_have_saved(tmp_path: Path) -> None:
    run_ranks(answer_with, 2, str(tmp_path))
    run_ranks(answer_with, 1, str(tmp_path))
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.unit
def test_files_have_the_names_of_peft() -> None:
    from peft import get_peft_model_state_dict

    for family, options in (
        ("llama", {"use_dora": True}),
        ("gpt2", {"bias": "all"}),
        ("gpt2", {"bias": "lora_only", "lora_bias": True}),
        ("opt", {"target_modules": ["fc1", "embed_tokens"], "modules_to_save": ["final_layer_norm"]}),
    ):
        model = adapted(causal(family), family, **options)
        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
        found = dict(adapter_tensors(model, "default"))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


# Answers.


def learn_from_answers(plan: str, kind: str) -> list[dict[str, float]]:
    """Make steps of GRPO or PPO; "twin" has a copy of the base as the reference, "off" has none."""
    colossalai.launch_from_torch({}, verbose=False)
    base, booster = causal(), Booster(plugin=PLUGINS[plan]())
    base.config.use_cache = True  # the default of transformers; a pipeline cannot put caches together
    model = adapted(base)
    method, _, reference = kind.partition(" ")
    size = 4 // booster.mesh.axis_size("dp")
    given: dict[str, Any] = {
        "booster": booster,
        "data": prompts(),
        "tokenizer": tokenizer(),
        "sampling": SAMPLING,
        "reference": causal() if reference == "twin" else None,
        "epochs": 2,
        "batch_size": size,
        "rows_at_once": 3,
    }
    optimizer = torch.optim.SGD(trained(model), lr=0.5, momentum=0.9)
    if method == "grpo":
        way = GRPO(reward=digits, group_size=4, max_length=32, kl_coef=0.2)
        result = way.fit(model, optimizer, **given)
    else:
        critic = adapted(with_value_head(causal()), modules_to_save=["score"])
        result = PPO(reward=digits, iterations=1, max_length=32, kl_coef=0.2).fit(
            model,
            optimizer,
            critic=critic,
            critic_optimizer=torch.optim.SGD(trained(critic), lr=0.1),
            **given,
        )
    gpc.destroy()
    drop = ("seconds", "tokens_per_second", "logprob_gap")
    return [{key: each[key] for key in each if not key.startswith(drop)} for each in result.records]


def check_answers(kind: str, plan: str, num_ranks: int) -> None:
    expected = run_ranks(learn_from_answers, 1, "ddp", f"{kind} twin")[0]
    assert any(each["kl_to_reference"] > 1e-3 for each in expected)
    for found in run_ranks(learn_from_answers, num_ranks, plan, f"{kind} off"):
        for own, other in zip(found, expected, strict=True):
            assert own == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE), (kind, plan)


@pytest.mark.dist
def test_without_its_adapters_a_model_is_the_reference() -> None:
    check_answers("grpo", "zero 2", 2)


FURTHER_PLANS = ("ddp", "zero 1", "fsdp", "gemini", "tp 2", "pp 2", "tp 2, zero 1")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *every_other(("ppo", plan) for plan in FURTHER_PLANS),
        *every_other((("grpo", plan) for plan in FURTHER_PLANS), first=1),
        further("ppo", "zero 2"),  # GRPO is above
    ],
)
def test_the_reference_under_further_plans(kind: str, plan: str) -> None:
    check_answers(kind, plan, 4 if "," in plan else 2)


# One process.


@pytest.mark.unit
def test_a_reference_of_adapters_takes_no_memory() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4000))

    def num_bytes(*models: nn.Module) -> int:
        return sum(param.numel() * param.element_size() for each in models for param in each.parameters())

    two = num_bytes(base, copy.deepcopy(base))
    one = num_bytes(adapted(base, r=8, target_modules="all-linear").float())
    print(
        f"parameters: two models {two / 1e6:.1f} MB, adapters of rank 8 {one / 1e6:.1f} MB: {one / two:.3f}"
    )
    assert one / two <= 0.52


@pytest.mark.unit
def test_merged_is_the_same_model_without_adapters() -> None:
    ids = torch.arange(24).reshape(2, 12) + 40
    for family in ("llama", "gpt2"):
        model = adapted(causal(family), family, use_rslora=True)
        wanted, off = model(input_ids=ids).logits, causal(family)(input_ids=ids).logits
        made = merge(model)
        assert type(made) is type(causal(family))
        assert all(param.requires_grad for param in made.parameters())
        assert has_adapters(model)
        assert not has_adapters(made)
        torch.testing.assert_close(made(input_ids=ids).logits, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(model(input_ids=ids).logits, wanted)  # it has stayed as it was
        with adapters_off(model):
            assert torch.equal(model(input_ids=ids).logits, off)
            assert {name for name, _ in merged_tensors(model)} == set(causal(family).state_dict())
        tensors = dict(merged_tensors(model))
        for name, value in made.state_dict().items():
            torch.testing.assert_close(tensors[name].detach(), value, rtol=1e-14, atol=1e-14)
        inner = model.get_base_model()
        assert merge(model, in_place=True) is inner
    reward = adapted(with_value_head(causal()), modules_to_save=["score"])
    nn.init.normal_(reward.get_base_model().score.modules_to_save["default"].weight)
    torch.testing.assert_close(merge(reward)(ids), reward(ids), rtol=1e-12, atol=1e-12)


@pytest.mark.unit
def test_off_is_off_in_the_block_only() -> None:
    ids = torch.arange(12).reshape(1, 12) + 40
    model = adapted(causal())
    before = [param.requires_grad for param in model.parameters()]
    wanted = model(input_ids=ids).logits
    with adapters_off(model):
        assert [param.requires_grad for param in model.parameters()] == before
        assert not torch.equal(model(input_ids=ids).logits, wanted)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(model(input_ids=ids).logits, wanted)


@pytest.mark.unit
def test_what_cannot_be_merged_is_told() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters"):
        merge(causal())
    with pytest.raises(ValueError, match=r"h.0.attn.c_attn has an adapter of Linear, and only plain LoRA"):
        merge(adapted(causal("gpt2"), "gpt2", use_dora=True, target_modules=["c_attn"]))
    with pytest.raises(ValueError, match="q_proj has no bias to which"):
        next(merged_tensors(adapted(causal(), lora_bias=True)))
    tied = adapted(causal("opt"), "opt", target_modules=["lm_head"])
    with pytest.raises(ValueError, match=r"lm_head is that of another layer, too"):
        merge(tied)


# Tensor parallelism.


def cut_alone() -> None:
    from peft import IA3Config, get_peft_model

    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    refused = {
        "DoraLinearVariant, which needs more": adapted(causal(), use_dora=True, target_modules=["q_proj"]),
        "lora.layer.Embedding, and of adapters only": adapted(causal(), target_modules=["embed_tokens"]),
        "ia3.layer.Linear, and of adapters only LoRA": get_peft_model(
            causal(), IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
        ),
    }
    for words, model in refused.items():
        before = [tuple(param.shape) for param in model.parameters()]
        with pytest.raises(ValueError, match=words):
            shard_model(model, gpc.mesh)
        assert [tuple(param.shape) for param in model.parameters()] == before
    gpc.destroy()


@pytest.mark.dist
def test_adapters_that_cannot_be_cut_are_named() -> None:
    run_ranks(cut_alone, 2)


def masks() -> dict[str, Any]:
    """Return which features the dropout of each adapter has left out, and specs of its factors."""
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    model = adapted(causal(), lora_dropout=0.5, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])
    shard_model(model, gpc.mesh)
    found: dict[str, Any] = {}
    for name, part in model.named_modules():
        if name.endswith("lora_dropout.default"):
            place = name.removeprefix("base_model.model.model.layers.")
            part.register_forward_hook(lambda _, __, output, at=place: found.update({at: output == 0}))
    model.train()(input_ids=torch.arange(64).reshape(2, 32) + 40)
    gpc.destroy()
    return found


@pytest.mark.dist
def test_ranks_leave_out_the_same_features_where_they_see_the_same() -> None:
    one, other = run_ranks(masks, 2)
    assert len(one) == 8
    for name, mask in one.items():
        assert 0.4 < mask.double().mean() < 0.6
        sees_all = "q_proj" in name or "up_proj" in name
        assert torch.equal(mask, other[name]) == sees_all, name


@pytest.mark.dist
def test_a_penalty_without_a_reference_is_refused() -> None:
    run_ranks(no_reference, 1)


def no_reference() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    with pytest.raises(ValueError, match=r"reference=NoneType: .* A model with adapters \(LoRA of peft"):
        GRPO(reward=digits, kl_coef=0.1).fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            booster=Booster(),
            data=prompts(),
            tokenizer=tokenizer(),
            sampling=SamplingParams(max_tokens=4),
            steps=1,
        )
    with pytest.raises(ValueError, match="merges=True, and the model has no adapters"):
        save_pretrained(model, "nowhere", booster=Booster(), merges=True)
    gpc.destroy()
