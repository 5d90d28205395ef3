"""Tiny models, a tokenizer and rows for the tests of methods."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.chat import DPO, SFT, ChatData, RewardModeling, TextMethod, chat_data, with_value_head
from colossalai.chat.data import make_toy_data
from tests.serving.fake import make_tokenizer

METHODS: Mapping[str, TextMethod] = {
    "sft": SFT(max_length=64),
    "reward": RewardModeling(max_length=64),
    "dpo": DPO(max_length=64),
    "ipo": DPO(max_length=64, kind="ipo", beta=0.5),
}
PLUGINS: Mapping[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "zero 1": partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero 2": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "fsdp": TorchFSDPPlugin,
    "gemini": partial(GeminiPlugin, precision="fp32"),
    "tp 2": partial(HybridParallelPlugin, tp_size=2),
    "pp 2": partial(HybridParallelPlugin, pp_size=2, num_microbatches=2),
    "tp 2, zero 1": partial(HybridParallelPlugin, tp_size=2, zero_stage=1, precision="fp32"),
}


@cache
def tokenizer() -> Any:
    """Return a byte-level tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        return make_tokenizer(Path(folder))


def causal(family: str = "llama") -> Any:
    """Return a tiny causal language model in float64."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
    )

    torch.manual_seed(0)
    vocab = {"vocab_size": len(tokenizer()), "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    if family == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **none, **vocab)
        ).double()
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family in ("opt", "narrow opt"):
        width = 16 if family == "narrow opt" else 32  # of embeddings, as those of OPT-350M
        own = {"ffn_dim": 64, "word_embed_proj_dim": width, "max_position_embeddings": 64, "dropout": 0.0}
        return OPTForCausalLM(OPTConfig(**shape, **own, **vocab)).double()
    return LlamaForCausalLM(
        LlamaConfig(intermediate_size=64, num_key_value_heads=2, **shape, **vocab)
    ).double()


def model_for(name: str, family: str = "llama") -> nn.Module:
    """Return what a method trains."""
    model = causal(family)
    if name != "reward":
        return model
    torch.manual_seed(1)
    return with_value_head(model)


def rows_for(name: str, count: int, *, split: str = "train") -> ChatData:
    """Return rows of sums that a method learns from."""
    stage = "sft" if name == "sft" else "preference"
    return chat_data(make_toy_data("sums", count, 0, stage=stage, split=split))
