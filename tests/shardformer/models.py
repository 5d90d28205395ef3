"""Small models of transformers, built from configs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB = 25  # which two ranks do not divide


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    """Return a GPT-2 with tied embedding and head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": VOCAB, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**{**rates, **sizes, **TOKENS, **options}))


def gpt2_of_four_blocks() -> nn.Module:
    """Return a deeper one."""
    return gpt2(n_layer=4)


def llama(**options: Any) -> nn.Module:
    """Return a Llama whose head is not tied, with two queries to a key."""
    return _decoder("Llama", num_hidden_layers=2, num_attention_heads=4, **options)


def _decoder(family: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    config = getattr(transformers, f"{family}{TEXT.get(family, '')}Config")(**{**sizes, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


TEXT = {"Gemma3": "Text"}  # what the configs of text models are called by
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
}


def planned(family: str, **options: Any) -> nn.Module:
    """Return a causal model whose classes have no rule, and that has a `tp_plan`."""
    return _stirred(_decoder(family, **{**WIDE, **options}))


def _stirred(model: nn.Module) -> nn.Module:
    """Return a model whose norms, biases and sinks, ones or zeros at the start, are none."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() < 2 or "norm" in name or "bias" in name:
                param.add_(torch.randn_like(param), alpha=0.1)
    return model


OPT: dict[str, Any] = {"ffn_dim": 12, "dropout": 0.0, "pad_token_id": 1}


def wide_opt() -> nn.Module:
    """Return an OPT that four ranks can share."""
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _decoder("OPT", **OPT, **sizes)


def bloom(**options: Any) -> nn.Module:
    """Return a BLOOM of twelve heads, whose slopes do not follow one rule, with tied embedding and head."""
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 12}
    return _stirred(BloomForCausalLM(BloomConfig(**{**sizes, **TOKENS, **options})))


TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}  # of families whose own are not in VOCAB

mistral = partial(_decoder, "Mistral")
qwen2 = partial(_decoder, "Qwen2", tie_word_embeddings=True)
"""Queries, keys and values have biases."""
opt = partial(_decoder, "OPT", word_embed_proj_dim=8, **OPT)
"""Vocabulary and positions are in the decoder; embedding and head are tied."""
qwen3 = partial(planned, "Qwen3")
"""Normalizes each head of query and key."""
gemma = partial(planned, "Gemma")
"""Embedding and head are tied."""
gemma2 = partial(planned, "Gemma2", sliding_window=4)
"""Weights and logits are capped; there are windows in every other layer."""
gemma3 = partial(planned, "Gemma3", layer_types=["sliding_attention", "full_attention"], sliding_window=4)
"""The embedding scales, and each head is normalized."""
phi3 = partial(planned, "Phi3", **TOKENS)
"""One weight for query, key and value, of unequal parts."""
phi = partial(planned, "Phi", qk_layernorm=True, resid_pdrop=0.0, embd_pdrop=0.0, **TOKENS)
"""Normalizes each head of query and key; the head has a bias."""
gpt_neox = partial(planned, "GPTNeoX", initializer_range=0.1, **TOKENS)
"""One weight for query, key and value of each head."""
olmo2 = partial(planned, "Olmo2")
"""Normalizes all heads together."""
glm4 = partial(planned, "Glm4")
"""One weight for gate and up."""
apertus = partial(planned, "Apertus", hidden_act="xielu")
"""The activation has parameters, between wide layers."""
cohere = partial(planned, "Cohere", use_qk_norm=True, **TOKENS)
"""A norm for each head of query and key."""
doge = partial(planned, "Doge", attention_bias=True, keep_window_size=4)
"""Masks for each head come from the values of all of them."""
doge_with_experts = partial(doge, is_moe=True, num_experts=16, num_experts_per_tok=2)
"""Experts are rows of embeddings."""

EAGER: dict[str, Any] = {"experts_implementation": "eager"}
TWO_OF_EIGHT: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

mixtral_of_eight = partial(planned, "Mixtral", num_local_experts=8, **EAGER)
"""Experts that several ranks can share."""
qwen2_moe = partial(
    planned,
    "Qwen2Moe",
    shared_expert_intermediate_size=40,
    num_experts=8,
    mlp_only_layers=[1],
    **TWO_OF_EIGHT,
    **EAGER,
)
"""An expert that all tokens share, and a layer without experts."""
qwen3_moe = partial(
    planned,
    "Qwen3Moe",
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=3,
    norm_topk_prob=True,
    **EAGER,
)
"""Weights of the chosen experts add up to 1."""
ROUTED: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
glm4_moe = partial(
    planned,
    "Glm4Moe",
    n_group=1,
    topk_group=1,
    use_qk_norm=True,
    attention_bias=True,
    **ROUTED,
    **TWO_OF_EIGHT,
    **EAGER,
)
"""Normalizes each head of query and key, behind a layer without experts."""
deepseek_v3 = partial(
    planned,
    "DeepseekV3",
    n_group=2,
    topk_group=1,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    num_key_value_heads=8,
    **ROUTED,
    **TWO_OF_EIGHT,
    **EAGER,
)
"""Experts are chosen from the best groups, behind a layer without experts."""
gpt_oss = partial(planned, "GptOss", num_local_experts=8, num_experts_per_tok=2, **EAGER)
"""Experts have biases and are transposed; there are sinks in the attention."""


def mixtral_with_lora() -> nn.Module:
    """Return one whose experts are frozen, with updates of low rank that are not zero."""
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(
        mixtral_of_eight(), LoraConfig(r=3, target_parameters=names, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    return model


TEXT_WITH_EXPERTS: dict[str, Any] = {
    **WIDE,
    **TWO_OF_EIGHT,
    "vocab_size": VOCAB,
    "num_experts": 8,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "patch_size": 4,
}
IMAGES: dict[str, Any] = {"image_token_id": 20, "video_token_id": 21}


def _of_texts(config: Any, kind: Callable[[Any], Any], *towers: str) -> nn.Module:
    """Return a model whose text model normalizes each head of query and key; texts use no other towers."""
    config.text_config._experts_implementation = "eager"
    model: Any = _stirred(kind(config))
    for tower in towers:
        getattr(model.model, tower).requires_grad_(False)
    return model


def qwen3_vl_moe() -> nn.Module:
    """Return a Qwen3-VL-MoE, for texts."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    tokens = {**IMAGES, "vision_start_token_id": 22, "vision_end_token_id": 23}
    config = Qwen3VLMoeConfig(text_config=TEXT_WITH_EXPERTS, vision_config=VISION, **tokens)
    return _of_texts(config, Qwen3VLMoeForConditionalGeneration, "visual")


def qwen3_omni_moe() -> nn.Module:
    """Return the thinker of a Qwen3-Omni-MoE, for texts."""
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    audio |= {"output_dim": 64, "num_mel_bins": 16, "downsample_hidden_size": 8}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=TEXT_WITH_EXPERTS, vision_config=VISION, audio_config=audio, audio_token_id=22, **IMAGES
    )
    return _of_texts(config, Qwen3OmniMoeThinkerForConditionalGeneration, "visual", "audio_tower")


class Translator(nn.Module):
    """A T5 that decodes what it encodes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        config = T5Config(**{**sizes, "dropout_rate": 0.0, "decoder_start_token_id": 0, **options})
        self.model = T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor) -> Any:
        """Return what the model does."""
        return self.model(input_ids=ids, decoder_input_ids=ids)


def t5() -> nn.Module:
    """Return a T5 with one weight for all vocabularies."""
    return Translator()


gated_t5 = partial(Translator, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
"""A T5 of the newer kind, with a head of its own."""


class Classifier(nn.Module):
    """A ViT on images that are made of ids, one class for each of them."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
        sizes |= {"image_size": 6, "patch_size": 3, "num_channels": 1, "num_labels": VOCAB}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model = ViTForImageClassification(ViTConfig(**sizes, **rates))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return logits for all ids."""
        images = (ids[:, None, :, None] * (1 + ids[:, None, None, :])).to(self.model.dtype).sin()
        logits = self.model(images).logits
        return {"logits": logits[:, None].expand(-1, ids.shape[1], -1)}


def vit() -> nn.Module:
    """Return a ViT."""
    return Classifier()


def bert() -> nn.Module:
    """Return a BERT with the head of masked language models."""
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def bert_decoder(**options: Any) -> nn.Module:
    """Return a BERT that decodes, with cross-attention."""
    from transformers import BertLMHeadModel

    return BertLMHeadModel(_bert_config(is_decoder=True, add_cross_attention=True, **options))


def _bert_config(**options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )


def language_loss(output: Any, labels: Tensor) -> Tensor:
    """Return the loss of the next tokens."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class InDouble(TorchFunctionMode):
    """What a model computes of float64 in float32, as its norms, stays in float64, in forward and backward.

    Where the terms of a gradient pass through float32, their sums over heads depend on who sums them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, in the place of a conversion to float32 none."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
