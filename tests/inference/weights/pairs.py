"""Models in pairs: one that is served first, and one of the same shapes that it is given the values of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.inference import LLM, SamplingParams
from tests.inference.models import MIXED, prompts, tiny

NUM_TOKENS = 6
FULL = SamplingParams(max_tokens=12, temperature=0)  # with `MIXED`: what the long tier compares
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
POOL = 2**22
_DIVISIBLE = {"Llama": {"intermediate_size": 64}, "Qwen3": {"intermediate_size": 64}, "OPT": {"ffn_dim": 64}}


def old_model(family: str, **more: Any) -> nn.Module:
    return tiny(family, **_DIVISIBLE.get(family, {}) | more)


def new_model(family: str, seed: int = 5, **more: Any) -> nn.Module:
    """Return a model with other values everywhere: norms and biases, too."""
    model = old_model(family, **more)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.1)
    return model


def saved_pair(folder: Path, family: str = "Llama", **more: Any) -> tuple[str, str]:
    """Save both; return their folders."""
    old_model(family, **more).save_pretrained(folder / "old")
    new_model(family, **more).save_pretrained(folder / "new")
    return str(folder / "old"), str(folder / "new")


def texts(
    llm: LLM, lengths: Sequence[int] = MIXED[:6], params: SamplingParams = GREEDY
) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts(*lengths), params)]
