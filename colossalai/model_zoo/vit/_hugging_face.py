"""Vision transformers converted from Hugging Face transformers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from colossalai.model_zoo._hugging_face import encoder_blocks, encoder_fields
from colossalai.model_zoo._weights import load_parameters, require_settings
from colossalai.model_zoo.vit._config import ViTConfig
from colossalai.model_zoo.vit._model import ViT

_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_BLOCK = {
    "attention.projection": "attention.o_proj",
    "mlp.expansion": "mlp.fc1",
    "mlp.projection": "mlp.fc2",
    "attention_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
}


def from_hugging_face(hf_model: nn.Module, **overrides: Any) -> ViT:
    """Return the ViT with the weights of a `transformers.ViTForImageClassification`, in the current mode.

    Args:
        hf_model: The model, whole on every rank; it is not changed.
        overrides: Fields of `ViTConfig` that are not taken from it, such as dropout rates.

    Returns:
        A model with the same logits, on the device and with the dtype of a new model.

    Raises:
        ValueError: The model has a setting or a shape that `ViT` does not support.
    """
    theirs = hf_model.state_dict()
    num_classes = theirs["classifier.weight"].shape[0]
    config = replace(config_of(hf_model.config, num_classes=num_classes), **overrides)
    model = ViT(config)
    load_parameters(model, dict(_weights(theirs, config)))
    return model


def config_of(hf_config: Any, *, num_classes: int) -> ViTConfig:
    """Return the config equivalent to a `transformers.ViTConfig`."""
    require_settings(hf_config, {"qkv_bias": True})
    return ViTConfig(
        image_size=hf_config.image_size,
        patch_size=hf_config.patch_size,
        num_channels=hf_config.num_channels,
        num_classes=num_classes,
        **encoder_fields(hf_config),
    )


def _weights(theirs: dict[str, Tensor], config: ViTConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.patches.cls_token", theirs["vit.embeddings.cls_token"]
    yield "embedding.patches.pos_embed", theirs["vit.embeddings.position_embeddings"]
    for kind in ("weight", "bias"):
        patches = theirs[f"vit.embeddings.patch_embeddings.projection.{kind}"]
        yield f"embedding.patches.{kind}", patches
        yield f"norm.{kind}", theirs[f"vit.layernorm.{kind}"]
        yield f"head.classifier.{kind}", theirs[f"classifier.{kind}"]
    yield from encoder_blocks(theirs, config, stack="vit.layers", qkv=_QKV, others=_BLOCK)
