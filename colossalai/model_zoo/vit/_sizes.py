"""The published sizes of vision transformers, and functions that build them.

Dosovitskiy et al. 2021 (2010.11929), table 1; small: Touvron et al. 2021 (2012.12877), table 1;
lite: ViT-Lite-7/4 of Hassani et al. 2021 (2104.05704).
"""

from dataclasses import replace
from typing import Any

from colossalai.model_zoo.vit._config import ViTConfig
from colossalai.model_zoo.vit._model import ViT
from colossalai.registry import MODELS

VIT_LITE = ViTConfig(
    image_size=32, patch_size=4, num_classes=10, hidden_size=256, num_layers=7, num_attention_heads=4,
    mlp_ratio=2.0,
)  # fmt: skip
VIT_SMALL = ViTConfig(hidden_size=384, num_attention_heads=6)
VIT_BASE = ViTConfig()
VIT_LARGE = ViTConfig(hidden_size=1024, num_layers=24, num_attention_heads=16)
VIT_HUGE = ViTConfig(hidden_size=1280, num_layers=32, num_attention_heads=16, patch_size=14)


@MODELS.register_module
def vit_lite_patch4_32(**overrides: Any) -> ViT:
    """Build a ViT for images of 32 pixels, 3.7M parameters; `overrides` replace fields of `VIT_LITE`."""
    return ViT(replace(VIT_LITE, **overrides))


@MODELS.register_module
def vit_small_patch16_224(**overrides: Any) -> ViT:
    """Build ViT-S/16, 22M parameters; `overrides` replace fields of its `ViTConfig`."""
    return ViT(replace(VIT_SMALL, **overrides))


@MODELS.register_module
def vit_base_patch16_224(**overrides: Any) -> ViT:
    """Build ViT-B/16, 87M parameters; `overrides` replace fields of its `ViTConfig`."""
    return ViT(replace(VIT_BASE, **overrides))


@MODELS.register_module
def vit_base_patch32_224(**overrides: Any) -> ViT:
    """Build ViT-B/32, 88M parameters; `overrides` replace fields of its `ViTConfig`."""
    return ViT(replace(replace(VIT_BASE, patch_size=32), **overrides))


@MODELS.register_module
def vit_large_patch16_224(**overrides: Any) -> ViT:
    """Build ViT-L/16, 304M parameters; `overrides` replace fields of its `ViTConfig`."""
    return ViT(replace(VIT_LARGE, **overrides))


@MODELS.register_module
def vit_huge_patch14_224(**overrides: Any) -> ViT:
    """Build ViT-H/14, 632M parameters; `overrides` replace fields of its `ViTConfig`."""
    return ViT(replace(VIT_HUGE, **overrides))
