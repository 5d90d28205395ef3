"""Families of models of transformers whose layers are cut, and the runs behind a row of their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import colossalai
from colossalai.context import random_state, set_random_state
from colossalai.shardformer import has_experts, rule_of
from colossalai.shardformer._tp_plan import rules_of_plans
from tests.parity.experts import table as experts
from tests.parity.test_recomputed_dropout import gradients, largest_difference
from tests.parity.training import train
from tests.shardformer import models
from tests.shardformer.models import VOCAB, language_loss, planned
from tests.shardformer.table import CUT, PATCHES, transformer

RATE = 0.3


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        build: Returns a small model without dropout.
        uncut: Words in the names of the matrices that every tensor-parallel rank holds whole; all others must
            be cut.
        first: The column that `make test` runs.
    """

    build: Callable[[], nn.Module]
    uncut: tuple[str, ...] = ()
    first: str = "tp"


AGAIN = "tp, recomputed"
EXPERTS = ("gate", "embed_tokens")
FAMILIES: dict[str, Family] = {
    "BERT": Family(models.bert, ("embeddings", "predictions")),
    "BERT, decoder": Family(models.bert_decoder, ("embeddings", "predictions")),
    "BLOOM": Family(models.bloom),
    "GPT-2": Family(models.gpt2, ("wpe",)),
    "GPT-NeoX": Family(models.gpt_neox),
    "gpt-oss": Family(models.gpt_oss, ("router",)),
    "Llama": Family(models.llama),
    "Mistral": Family(models.mistral, first=AGAIN),
    "OPT": Family(models.opt, ("embed_positions",)),
    "Phi": Family(models.phi),
    "Qwen2": Family(models.qwen2, first=AGAIN),
    "T5": Family(models.t5),
    "T5, gated": Family(models.gated_t5, first=AGAIN),
    "ViT": Family(models.vit, PATCHES),
    "Apertus": Family(models.apertus, ("embed_tokens",)),
    "Cohere": Family(models.cohere),
    "DeepSeek-V3": Family(models.deepseek_v3, (*EXPERTS, "self_attn"), "ep"),
    "Doge": Family(models.doge, ("embed_tokens",)),
    "Doge, experts": Family(models.doge_with_experts, ("embed_tokens", "router_gate")),
    "Gemma": Family(models.gemma, first=AGAIN),
    "Gemma 2": Family(models.gemma2, first=AGAIN),
    "Gemma 3": Family(models.gemma3),
    "GLM-4": Family(models.glm4, first=AGAIN),
    "GLM-4-MoE": Family(models.glm4_moe, EXPERTS),
    "Mixtral": Family(models.mixtral_of_eight, ("gate",), "ep"),
    "OLMo": Family(partial(planned, "Olmo"), first=AGAIN),
    "OLMo 2": Family(models.olmo2, first=AGAIN),
    "Phi-3": Family(models.phi3, first=AGAIN),
    "Qwen2-MoE": Family(models.qwen2_moe, (*EXPERTS, "shared_expert"), "ep"),
    "Qwen3": Family(models.qwen3),
    "Qwen3-MoE": Family(models.qwen3_moe, EXPERTS, "ep"),
    "Qwen3-Omni-MoE": Family(models.qwen3_omni_moe, (*EXPERTS, "visual", "audio_tower")),
    "Qwen3-VL-MoE": Family(models.qwen3_vl_moe, (*EXPERTS, "visual")),
    "SmolLM3": Family(partial(planned, "SmolLM3"), first=AGAIN),
    "StarCoder2": Family(partial(planned, "Starcoder2"), first=AGAIN),
}


def recomputed(build: Callable[[], nn.Module]) -> None:
    """See that gradients under `gradient_checkpointing_enable()` and dropout are those without the former.

    One process draws other masks, so that it cannot be compared with.
    """
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch(CUT, verbose=False)
    torch.manual_seed(0)
    model = with_dropout(build())
    inner: Any = next(part for part in model.modules() if hasattr(part, "gradient_checkpointing_enable"))
    inner.config.use_cache = False
    colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    model.train()
    ids = torch.arange(12).reshape(2, 6) % VOCAB
    compute = partial(_loss, model, ids)
    start = random_state()
    truth, others = gradients(model, compute), gradients(model, compute)
    assert largest_difference(truth, others) > 1e-4, "it draws no masks"
    for is_reentrant in (False, True):
        inner.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        set_random_state(start)
        for expected in (truth, others):
            assert (far := largest_difference(gradients(model, compute), expected)) < 1e-12, far


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return language_loss(model(ids), ids)


def with_dropout(model: nn.Module) -> nn.Module:
    """Return a model that drops out wherever its class can: by a layer, or by a rate that a forward reads."""
    for part in model.modules():
        for holder in (part, getattr(part, "config", None)):
            for name, rate in vars(holder).items() if holder is not None else ():
                if isinstance(rate, float) and ("dropout" in name or name.endswith("pdrop")):
                    setattr(holder, name, RATE)
        if isinstance(part, nn.Dropout):
            part.p = RATE
    return model


def run(column: str, label: str) -> str:
    """Run a cell on two ranks; return its verdict.

    Raises:
        AssertionError: A number differs from that of one process.
    """
    family = FAMILIES[label]
    if column == "ep":
        if not has_experts(family.build()):
            return "-"
        train(experts.transformer(family.build, 2))
    elif column == "tp":
        train(transformer(family.build, 2, *family.uncut))
    else:
        recomputed(family.build)
    return "equal"


COLUMNS = ("tp", AGAIN, "ep")


def cut_by(model: nn.Module) -> str:
    """Return whether layers of a model are cut by its plan, or by rules alone."""
    ruled = {part for part in model.modules() if (rule := rule_of(part)) and rule.cuts}
    return "plan" if rules_of_plans(model, ruled=ruled) else "rules"
