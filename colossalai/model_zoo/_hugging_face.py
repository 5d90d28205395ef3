"""Common parts of encoders of Hugging Face transformers: settings, and blocks with separate q, k and v."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colossalai.model_zoo._attention import by_head
from colossalai.model_zoo._config import TransformerConfig
from colossalai.model_zoo._weights import gelu_of


def encoder_fields(hf_config: Any) -> dict[str, Any]:
    """Return the fields of a `TransformerConfig` that mean the same as the config of an encoder of theirs."""
    return {
        "hidden_size": hf_config.hidden_size,
        "num_layers": hf_config.num_hidden_layers,
        "num_attention_heads": hf_config.num_attention_heads,
        "mlp_ratio": hf_config.intermediate_size / hf_config.hidden_size,
        "embedding_dropout": hf_config.hidden_dropout_prob,
        "dropout": hf_config.hidden_dropout_prob,
        "attention_dropout": hf_config.attention_probs_dropout_prob,
        "layer_norm_epsilon": hf_config.layer_norm_eps,
        "init_std": hf_config.initializer_range,
        "gelu": gelu_of(hf_config.hidden_act),
    }


def encoder_blocks(
    theirs: Mapping[str, Tensor],
    config: TransformerConfig,
    *,
    stack: str,
    qkv: Sequence[str],
    others: Mapping[str, str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of all blocks by their names here.

    Args:
        theirs: The weights of a model of theirs.
        config: The shape of the model here.
        stack: Name of their stack of blocks.
        qkv: Names of query, key and value in a block of theirs, which are one layer here.
        others: For each other layer of a block here, its name in theirs.
    """
    for layer in range(config.num_layers):
        source, target = f"{stack}.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            fused = torch.cat([theirs[f"{source}.{name}.{kind}"] for name in qkv])
            yield f"{target}.attention.qkv.{kind}", by_head(fused, config.num_attention_heads)
            for mine, name in others.items():
                yield f"{target}.{mine}.{kind}", theirs[f"{source}.{name}.{kind}"]
