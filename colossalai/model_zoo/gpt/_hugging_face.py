"""GPT-2 models converted from Hugging Face transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from colossalai.model_zoo._attention import by_head, by_kind
from colossalai.model_zoo._weights import gelu_of, load_parameters, require_settings
from colossalai.model_zoo.gpt._config import GPTConfig
from colossalai.model_zoo.gpt._model import GPT

# Names in a block: here, and theirs.
_LINEAR = {
    "attention.projection": "attn.c_proj",
    "mlp.expansion": "mlp.c_fc",
    "mlp.projection": "mlp.c_proj",
}
_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_BUILT_IN = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def from_hugging_face(hf_model: nn.Module, **overrides: Any) -> GPT:
    """Return the GPT with the weights of a `transformers.GPT2LMHeadModel`, in the current tensor mode.

    Args:
        hf_model: The model, whole on every rank; it is not changed.
        overrides: Fields of `GPTConfig` that are not taken from it, such as dropout rates.

    Returns:
        A model with the same logits, on the device and with the dtype of a new model.

    Raises:
        ValueError: The model has a setting or a shape that `GPT` does not support.
    """
    config = replace(config_of(hf_model.config), **overrides)
    model = GPT(config)
    load_parameters(model, dict(_weights(hf_model.state_dict(), config)))
    return model


def to_hugging_face(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the weights of a GPT by the names, and in the layout, of a `transformers.GPT2LMHeadModel`.

    Args:
        weights: Whole tensors by their names in `GPT`, as in a file of `save_model`.
        config: The shape of the model.
    """
    theirs = {
        "transformer.wte.weight": weights["embedding.tokens.weight"],
        "transformer.wpe.weight": weights["embedding.positions.weight"],
        "lm_head.weight": weights["embedding.tokens.weight"],
    }
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = weights[f"norm.{kind}"]
        for layer in range(config.num_layers):
            block, target = f"blocks.{layer}", f"transformer.h.{layer}"
            fused = by_kind(weights[f"{block}.attention.qkv.{kind}"], config.num_attention_heads)
            # Their linear layers are stored (in, out).
            theirs[f"{target}.attn.c_attn.{kind}"] = fused.t()
            for mine, name in _LINEAR.items():
                theirs[f"{target}.{name}.{kind}"] = weights[f"{block}.{mine}.{kind}"].t()
            for mine, name in _NORMS.items():
                theirs[f"{target}.{name}.{kind}"] = weights[f"{block}.{mine}.{kind}"]
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def to_hugging_face_config(config: GPTConfig) -> Any:
    """Return the `transformers.GPT2Config` equivalent to a config here.

    Raises:
        ModuleNotFoundError: `transformers` is not installed (raised on every call without it).
    """
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_attention_heads,
        n_inner=round(config.mlp_ratio * config.hidden_size),
        embd_pdrop=config.embedding_dropout,
        resid_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.layer_norm_epsilon,
        initializer_range=config.init_std,
        activation_function={"none": "gelu", "tanh": "gelu_new"}[config.gelu],
        bos_token_id=None,
        eos_token_id=None,
    )


def config_of(hf_config: Any) -> GPTConfig:
    """Return the config equivalent to a `transformers.GPT2Config`."""
    require_settings(hf_config, _BUILT_IN)
    return GPTConfig(
        vocab_size=hf_config.vocab_size,
        max_position_embeddings=hf_config.n_positions,
        hidden_size=hf_config.n_embd,
        num_layers=hf_config.n_layer,
        num_attention_heads=hf_config.n_head,
        mlp_ratio=(hf_config.n_inner or 4 * hf_config.n_embd) / hf_config.n_embd,
        embedding_dropout=hf_config.embd_pdrop,
        dropout=hf_config.resid_pdrop,
        attention_dropout=hf_config.attn_pdrop,
        layer_norm_epsilon=hf_config.layer_norm_epsilon,
        init_std=hf_config.initializer_range,
        gelu=gelu_of(hf_config.activation_function),
    )


def _weights(theirs: dict[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.tokens.weight", theirs["transformer.wte.weight"]
    yield "embedding.positions.weight", theirs["transformer.wpe.weight"]
    for layer in range(config.num_layers):
        source, target = f"transformer.h.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            # Their linear layers are stored (in, out).
            fused = theirs[f"{source}.attn.c_attn.{kind}"].t()
            yield f"{target}.attention.qkv.{kind}", by_head(fused, config.num_attention_heads)
            for mine, name in _LINEAR.items():
                yield f"{target}.{mine}.{kind}", theirs[f"{source}.{name}.{kind}"].t()
            for mine, name in _NORMS.items():
                yield f"{target}.{mine}.{kind}", theirs[f"{source}.{name}.{kind}"]
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", theirs[f"transformer.ln_f.{kind}"]
