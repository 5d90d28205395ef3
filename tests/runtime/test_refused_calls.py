"""What transformers and peft would do to a model under a plan: right, or refused with what to do instead."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.chat import save_pretrained
from colossalai.core import global_context as gpc
from tests.chat.tiny import PLUGINS, causal
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

WHOLE = ("ddp", "zero 1")
IN_PARTS = ("fsdp", "gemini", "tp 2", "pp 2")
FIRSTS = ("ddp", "fsdp", "tp 2")
BEFORE_BOOST = r"resize_token_embeddings: .* before boost \(or colossalai\.initialize\)"
INSTEAD = r"a part of the model: .*colossalai\.chat\.save_pretrained\(model, folder, booster=booster\)"


def boosted(plan: str, raw: Any) -> Any:
    booster = Booster(plugin=PLUGINS[plan]())
    trained = [param for param in raw.parameters() if param.requires_grad]
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(trained))
    return booster, model, optimizer


def resizes(plan: str) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    raw = causal()
    before = {name: param.shape for name, param in raw.named_parameters()}
    _, model, _ = boosted(plan, raw)
    for call in (model.resize_token_embeddings, raw.resize_token_embeddings):
        with pytest.raises(ValueError, match=f"LlamaForCausalLM.{BEFORE_BOOST}"):
            call(300)
    with pytest.raises(ValueError, match=f"LlamaModel.{BEFORE_BOOST}"):
        raw.model.resize_token_embeddings(300)
    if plan in WHOLE:
        assert {name: param.shape for name, param in raw.named_parameters()} == before
        for made in (copy.deepcopy(raw), pickle.loads(pickle.dumps(raw)), copy.deepcopy(copy.deepcopy(raw))):
            made.resize_token_embeddings(300)
            assert made.get_input_embeddings().weight.shape[0] == 300
    if plan == "ddp":
        engine, *_ = colossalai.initialize(causal(), None, verbose=False)
        with pytest.raises(ValueError, match=BEFORE_BOOST):
            engine.model.resize_token_embeddings(300)
    gpc.destroy()
    if plan in WHOLE:
        raw.resize_token_embeddings(300)
        assert raw.get_input_embeddings().weight.shape[0] == 300


@pytest.mark.parametrize("plan", [plan if plan in FIRSTS else further(plan) for plan in (*WHOLE, *IN_PARTS)])
def test_parameters_in_use_are_not_replaced(plan: str) -> None:
    run_ranks(resizes, 2, plan)


def resizes_where_nothing_depends_on_it() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model, *_ = Booster(plugin=TorchDDPPlugin()).boost(causal())
    model.resize_token_embeddings(300)
    ids = torch.full((1, 4), 299)
    assert model(input_ids=ids).logits.shape == (1, 4, 300)
    model = causal()
    engine, *_ = colossalai.initialize(model, torch.optim.AdamW(model.parameters()), verbose=False)
    engine.model.resize_token_embeddings(300)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    assert engine.step()
    gpc.destroy()


def test_one_process_is_as_without_a_plan() -> None:
    run_ranks(resizes_where_nothing_depends_on_it, 1)


def exports(plan: str, folder: Path) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    raw = get_peft_model(causal(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    wanted = {name: value.clone() for name, value in get_peft_model_state_dict(raw).items()}
    booster, model, _ = boosted(plan, raw)
    with pytest.raises(ValueError, match=r"add_adapter: .* before boost"):
        model.add_adapter("other", LoraConfig(target_modules=["k_proj"]))
    if plan in WHOLE:
        got = get_peft_model_state_dict(model)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in got)
        assert type(copy.deepcopy(raw).merge_and_unload()) is type(causal())
        if gpc.get_global_rank() == 0:
            model.save_pretrained(folder)
        torch.distributed.barrier()
    else:
        for call in (
            lambda: model.save_pretrained(folder),
            lambda: raw.save_pretrained(folder),
            model.merge_and_unload,
            raw.merge_and_unload,
            model.unload,
        ):
            with pytest.raises(ValueError, match=INSTEAD):
                call()
        assert not [*folder.iterdir()]
        if plan == "fsdp":  # DTensors, as in the state dict
            got = get_peft_model_state_dict(model)
            assert all(torch.equal(got[name].full_tensor(), wanted[name]) for name in wanted)
        save_pretrained(model, folder, booster=booster)
    written = load_file(folder / "adapter_model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in written)
    gpc.destroy()
    assert PeftModel.from_pretrained(causal(), folder).peft_config


@pytest.mark.parametrize("plan", [plan if plan in FIRSTS else further(plan) for plan in (*WHOLE, *IN_PARTS)])
def test_adapters_are_exported_whole(plan: str, tmp_path: Path) -> None:
    run_ranks(exports, 2, plan, tmp_path)
