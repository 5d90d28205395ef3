"""Adapters that peft has made and saved, the models it makes of them, and what a step of ours computes."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from colossalai.inference import LLM, EngineOptions, load_model
from colossalai.inference.paging import StepArrays
from tests.inference.models import tiny

POOL = 2**22
LLAMA = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": r"lm_head|.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {r"1\.self_attn\.k_proj": 12},
    },
    "blocks": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["gate_proj", "o_proj"],
        "layers_to_transform": [1, 3],
        "exclude_modules": ["3.self_attn.o_proj"],
    },
}
OTHERS = {
    "GPT2": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "OPT": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "out_proj", "fc1", "fc2"]},
    "Qwen3": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "gate_proj"]},
    "Bloom": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "dense_4h_to_h"]},
}


def save_adapter(folder: Path, model: nn.Module, seed: int, **config: Any) -> Any:
    """Save an adapter with random values on a model; return peft's model, not merged."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an adapted head, which it saves itself, too
        made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, param in made.named_parameters():
            if "lora_" in name:
                values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.data.copy_(values * 0.3)
        made.save_pretrained(str(folder))
    return made


def merged(folder: Path, family: str, seed: int, *, sizes: Any = (), **config: Any) -> nn.Module:
    """Save an adapter on a tiny model; return the model with it merged."""
    model = tiny(family, **dict(sizes))
    whole: nn.Module = save_adapter(folder, model, seed, **config).merge_and_unload().eval()
    return whole


def in_codes(base: Path, way: str, plain: nn.Module, adapted: nn.Module) -> nn.Module:
    """Return a quantized model that computes with whole matrices beside its layers.

    Args:
        base: Folder of the model.
        way: How it is quantized.
        plain: The model.
        adapted: The model with an adapter merged.
    """
    found = load_model(str(base), EngineOptions(quantize=way))
    before = dict(plain.named_modules())
    for path, layer in adapted.named_modules():
        if isinstance(layer, nn.Linear):
            change = (layer.weight - before[path].weight).detach()
            found.get_submodule(path).register_forward_hook(
                lambda _, args, made, change=change: made + args[0] @ change.t()
            )
    return found


def logits_of(llm: LLM, chunks: list[tuple[list[int], int]]) -> torch.Tensor:
    """Return the logits of all tokens of one step, (tokens, vocabulary).

    Args:
        llm: An engine in this process; its cache is overwritten.
        chunks: Prompts, each with the number of its adapter.
    """
    runner = llm.engine.executor.runner
    counts = np.array([len(tokens) for tokens, _ in chunks])
    sizes = -(-counts // runner.block_size)
    return runner.run(
        StepArrays(
            token_ids=np.concatenate([np.array(tokens) for tokens, _ in chunks]),
            starts=np.zeros(len(chunks), np.int64),
            counts=counts,
            table_sizes=sizes,
            tables=np.arange(int(sizes.sum())),
            copies=np.empty((0, 2), np.int64),
            rows=np.arange(int(counts.sum())),
            adapters=np.array([number for _, number in chunks]),
        )
    ).clone()
