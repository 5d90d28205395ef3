"""BERT models converted from Hugging Face transformers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from colossalai.model_zoo._hugging_face import encoder_blocks, encoder_fields
from colossalai.model_zoo._weights import load_parameters, require_settings
from colossalai.model_zoo.bert._config import BertConfig
from colossalai.model_zoo.bert._model import Bert

_BUILT_IN = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}
_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
_BLOCK = {
    "attention.projection": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.expansion": "intermediate.dense",
    "mlp.projection": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def from_hugging_face(hf_model: nn.Module, **overrides: Any) -> Bert:
    """Return the BERT with the weights of a `transformers.BertForMaskedLM`, in the current tensor mode.

    Args:
        hf_model: The model, whole on every rank; it is not changed.
        overrides: Fields of `BertConfig` that are not taken from it, such as dropout rates.

    Returns:
        A model with the same logits, on the device and with the dtype of a new model.

    Raises:
        ValueError: The model has a setting or a shape that `Bert` does not support.
    """
    config = replace(config_of(hf_model.config), **overrides)
    model = Bert(config)
    load_parameters(model, dict(_weights(hf_model.state_dict(), config)))
    return model


def config_of(hf_config: Any) -> BertConfig:
    """Return the config equivalent to a `transformers.BertConfig`."""
    require_settings(hf_config, _BUILT_IN)
    return BertConfig(
        vocab_size=hf_config.vocab_size,
        type_vocab_size=hf_config.type_vocab_size,
        max_position_embeddings=hf_config.max_position_embeddings,
        **encoder_fields(hf_config),
    )


def _weights(theirs: dict[str, Tensor], config: BertConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.tokens.weight", theirs["bert.embeddings.word_embeddings.weight"]
    yield "embedding.positions.weight", theirs["bert.embeddings.position_embeddings.weight"]
    yield "embedding.segments.weight", theirs["bert.embeddings.token_type_embeddings.weight"]
    yield "head.decoder.bias", theirs["cls.predictions.bias"]
    for kind in ("weight", "bias"):
        yield f"embedding.norm.{kind}", theirs[f"bert.embeddings.LayerNorm.{kind}"]
        yield f"head.transform.{kind}", theirs[f"cls.predictions.transform.dense.{kind}"]
        yield f"head.norm.{kind}", theirs[f"cls.predictions.transform.LayerNorm.{kind}"]
    yield from encoder_blocks(theirs, config, stack="bert.encoder.layer", qkv=_QKV, others=_BLOCK)
