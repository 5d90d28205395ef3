"""The published GPT sizes, and functions that build them.

GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2.
GPT-3: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1.
"""

from dataclasses import replace
from typing import Any

from colossalai.model_zoo.gpt._config import GPTConfig
from colossalai.model_zoo.gpt._model import GPT
from colossalai.registry import MODELS

GPT2_SMALL = GPTConfig()
GPT2_MEDIUM = GPTConfig(hidden_size=1024, num_layers=24, num_attention_heads=16)
GPT2_LARGE = GPTConfig(hidden_size=1280, num_layers=36, num_attention_heads=20)
GPT2_XL = GPTConfig(hidden_size=1600, num_layers=48, num_attention_heads=25)
GPT3 = GPTConfig(max_position_embeddings=2048, hidden_size=12288, num_layers=96, num_attention_heads=96)


@MODELS.register_module
def gpt2_small(**overrides: Any) -> GPT:
    """Build GPT-2 small, 124M parameters; `overrides` replace fields of its `GPTConfig`."""
    return GPT(replace(GPT2_SMALL, **overrides))


@MODELS.register_module
def gpt2_medium(**overrides: Any) -> GPT:
    """Build GPT-2 medium, 355M parameters; `overrides` replace fields of its `GPTConfig`."""
    return GPT(replace(GPT2_MEDIUM, **overrides))


@MODELS.register_module
def gpt2_large(**overrides: Any) -> GPT:
    """Build GPT-2 large, 774M parameters; `overrides` replace fields of its `GPTConfig`."""
    return GPT(replace(GPT2_LARGE, **overrides))


@MODELS.register_module
def gpt2_xl(**overrides: Any) -> GPT:
    """Build GPT-2 XL, 1.56B parameters; `overrides` replace fields of its `GPTConfig`."""
    return GPT(replace(GPT2_XL, **overrides))


@MODELS.register_module
def gpt3(**overrides: Any) -> GPT:
    """Build GPT-3 with dense attention, 175B parameters; `overrides` replace fields of its `GPTConfig`."""
    return GPT(replace(GPT3, **overrides))
