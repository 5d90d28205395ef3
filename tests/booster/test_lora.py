"""`save_lora` and `load_lora`: folders of peft under every plan, and whole models with merged weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from tests.chat.tiny import PLUGINS, causal
from tests.ranks import run_ranks
from tests.tiers import further

pytest.importorskip("peft")
pytestmark = pytest.mark.dist

PLANS = {
    **PLUGINS,
    "zero 1, bf16": lambda: LowLevelZeroPlugin(stage=1, precision="bf16"),
    "tp 2, pp 2": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2),
}
FIRSTS = ("fsdp", "tp 2", "zero 1, bf16")
FILE = "adapter_model.safetensors"
IDS = torch.arange(24).reshape(2, 12) + 40


def adapted(seed: int, **options: Any) -> Any:
    """Return a model of peft whose adapters have values of a seed."""
    from peft import LoraConfig, get_peft_model

    given = {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"],
        **options,
    }
    made = get_peft_model(causal(), LoraConfig(**given))
    generator = torch.Generator().manual_seed(seed)
    for name, param in made.named_parameters():
        if "lora_" in name:
            param.data = 0.1 * torch.randn(param.shape, generator=generator).to(param)
    return made


def saves_and_loads(plan: str, folder: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    colossalai.launch_from_torch({}, verbose=False)
    tolerance = {"rtol": 0.01, "atol": 0.01} if "bf16" in plan else {"rtol": 0, "atol": 0}

    def is_written(name: str, expected: Any) -> None:
        written = load_file(folder / name / FILE)
        wanted = get_peft_model_state_dict(expected)
        assert written.keys() == wanted.keys()
        for each, tensor in written.items():
            torch.testing.assert_close(tensor.to(wanted[each]), wanted[each], **tolerance)

    if gpc.mesh.rank == 0:
        adapted(2).save_pretrained(folder / "second")
        adapted(2, lora_alpha=5).save_pretrained(folder / "scaled")
        adapted(2, r=4).save_pretrained(folder / "wide")
    model = adapted(1)
    trained = [param for param in model.parameters() if param.requires_grad]
    booster = Booster(plugin=PLANS[plan]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(trained, lr=0.0))
    booster.save_lora(boosted, folder / "saved")
    is_written("saved", adapted(1))
    for other, words in {
        "scaled": "lora_alpha is 5 ",
        "wide": "r is 4 ",
        "nowhere": "nowhere has no adapter_",
    }.items():
        with pytest.raises(ValueError, match=words):
            booster.load_lora(boosted, folder / other)
    booster.load_lora(boosted, folder / "second")
    if "pp" not in plan:  # a step writes masters into parameters
        booster.backward(boosted(input_ids=IDS).logits.sum(), optimizer)
        optimizer.step()
    booster.save_lora(boosted, folder / "again")
    is_written("again", adapted(2))
    booster.save_lora(boosted, folder / "merged", merges=True)
    booster.save_model(boosted, folder / "all", shard=True, use_safetensors=True)
    gpc.destroy()
    assert not (folder / "all" / "config.json").exists()
    opened = PeftModel.from_pretrained(causal(), folder / "again").double()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").double()
    wanted = adapted(2).double()(input_ids=IDS).logits
    tolerance = {"rtol": 0.05, "atol": 0.05} if "bf16" in plan else {"rtol": 1e-6, "atol": 1e-6}
    for each in (opened, merged):
        torch.testing.assert_close(each(input_ids=IDS).logits, wanted, **tolerance)
    assert json.loads((folder / "merged" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


@pytest.mark.parametrize("plan", [plan if plan in FIRSTS else further(plan) for plan in PLANS])
def test_folders_are_those_of_peft(plan: str, tmp_path: Path) -> None:
    run_ranks(saves_and_loads, 4 if "," in plan and "bf16" not in plan else 2, plan, tmp_path)


def without_adapters(folder: Path) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin())
    model, *_ = booster.boost(causal())
    for call in (booster.save_lora, booster.load_lora):
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM has no adapters: give a model of peft's get_peft_m"
        ):
            call(model, folder)
    gpc.destroy()


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    run_ranks(without_adapters, 1, tmp_path)
    assert not [*tmp_path.iterdir()]


def of_other_kinds(folder: Path) -> None:
    from peft import IA3Config, VeraConfig, get_peft_model

    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin())
    layers = {"target_modules": ["q_proj", "embed_tokens"]}
    wanted, model = adapted(2, **layers), adapted(1, **layers)
    with torch.no_grad():
        wanted.get_input_embeddings().weight.add_(1.0)
    wanted.save_pretrained(folder)  # with the embedding, which has an adapter
    booster.load_lora(booster.boost(model)[0], folder)
    torch.testing.assert_close(model(input_ids=IDS).logits, wanted(input_ids=IDS).logits, rtol=0, atol=0)
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    for config, kind in ((ia3, "IA3"), (VeraConfig(r=2, target_modules=["q_proj"]), "VERA")):
        boosted, *_ = booster.boost(get_peft_model(causal(), config))
        for call in (booster.save_lora, booster.load_lora):
            with pytest.raises(ValueError, match=rf"default is of the kind {kind}, and those w"):
                call(boosted, folder / kind)
    gpc.destroy()


def test_embeddings_are_loaded_and_other_kinds_of_adapters_refused(tmp_path: Path) -> None:
    run_ranks(of_other_kinds, 1, tmp_path)
