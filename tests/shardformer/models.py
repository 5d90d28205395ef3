"""Small models of transformers, built from configs."""

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
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**rates, **sizes, **options}))


def gpt2_of_four_blocks() -> nn.Module:
    """Return a deeper one."""
    return gpt2(n_layer=4)


def llama(**options: Any) -> nn.Module:
    """Return a Llama whose head is not tied, with two queries to a key."""
    return _decoder("Llama", num_hidden_layers=2, num_attention_heads=4, **options)


def mistral() -> nn.Module:
    """Return a Mistral."""
    return _decoder("Mistral")


def qwen2() -> nn.Module:
    """Return a Qwen2, whose queries, keys and values have biases, with tied embedding and head."""
    return _decoder("Qwen2", tie_word_embeddings=True)


def opt() -> nn.Module:
    """Return an OPT, whose vocabulary and positions are in the decoder, with tied embedding and head."""
    return _decoder("OPT", ffn_dim=12, word_embed_proj_dim=8, dropout=0.0, pad_token_id=1)


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
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def planned(family: str, **options: Any) -> nn.Module:
    """Return a causal model whose classes have no rule, and that has a `tp_plan`."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    return _decoder(family, **{**sizes, **options})


def qwen3(**options: Any) -> nn.Module:
    """Return a Qwen3, which normalizes each head of query and key."""
    return planned("Qwen3", **options)


def gemma(**options: Any) -> nn.Module:
    """Return a Gemma, with tied embedding and head."""
    return planned("Gemma", **options)


def gemma2(**options: Any) -> nn.Module:
    """Return a Gemma 2, whose weights and logits are capped, with windows in every other layer."""
    return planned("Gemma2", sliding_window=4, **options)


def gemma3(**options: Any) -> nn.Module:
    """Return the text model of Gemma 3, whose embedding scales, and which normalizes each head."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"layer_types": kinds, "sliding_window": 4, "max_position_embeddings": 16}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**sizes, **options}))


def phi3(**options: Any) -> nn.Module:
    """Return a Phi3, which has one weight for query, key and value, of unequal parts."""
    return planned("Phi3", bos_token_id=0, eos_token_id=0, **options)


def phi(**options: Any) -> nn.Module:
    """Return a Phi, which normalizes each head of query and key, and whose head has a bias."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = planned("Phi", **{"qk_layernorm": True, "bos_token_id": 0, "eos_token_id": 0, **rates, **options})
    return _with_biases(model)


def gpt_neox(**options: Any) -> nn.Module:
    """Return a GPT-NeoX, which has one weight for query, key and value of each head."""
    settings = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
    return _with_biases(planned("GPTNeoX", **{**settings, **options}))


def bloom(**options: Any) -> nn.Module:
    """Return a BLOOM of twelve heads, whose slopes do not follow one rule, with tied embedding and head."""
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 12}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return _with_biases(BloomForCausalLM(BloomConfig(**{**sizes, **tokens, **options})))


def _with_biases(model: nn.Module) -> nn.Module:
    """Return a model whose biases, zeros at the start, are none."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.1)
    return model


def olmo2(**options: Any) -> nn.Module:
    """Return an Olmo2, which normalizes all heads together."""
    return planned("Olmo2", **options)


def glm4(**options: Any) -> nn.Module:
    """Return a Glm4, which has one weight for gate and up."""
    return planned("Glm4", **options)


def apertus(**options: Any) -> nn.Module:
    """Return an Apertus, whose activation has parameters, between its wide layers."""
    return planned("Apertus", hidden_act="xielu", **options)


def cohere(**options: Any) -> nn.Module:
    """Return a Cohere with a norm for each head of query and key."""
    return _stirred(
        planned("Cohere", **{"use_qk_norm": True, "bos_token_id": 0, "eos_token_id": 0, **options})
    )


def doge(**options: Any) -> nn.Module:
    """Return a Doge, whose masks for each head come from the values of all of them."""
    return _stirred(planned("Doge", **{"attention_bias": True, "keep_window_size": 4, **options}))


def doge_with_experts() -> nn.Module:
    """Return a Doge whose experts are rows of embeddings."""
    return doge(is_moe=True, num_experts=16, num_experts_per_tok=2)


def glm4_moe(**options: Any) -> nn.Module:
    """Return a Glm4Moe that normalizes each head of query and key, behind a layer without experts."""
    sizes = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1}
    sizes |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    settings = {**sizes, "use_qk_norm": True, "attention_bias": True, "experts_implementation": "eager"}
    return _stirred(planned("Glm4Moe", **{**settings, **options}))


def qwen3_vl_moe() -> nn.Module:
    """Return a Qwen3-VL-MoE, whose text model normalizes each head of query and key, for texts."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    text |= {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4}
    tokens = {
        "image_token_id": 20,
        "video_token_id": 21,
        "vision_start_token_id": 22,
        "vision_end_token_id": 23,
    }
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)
    config.text_config._experts_implementation = "eager"
    model = _stirred(Qwen3VLMoeForConditionalGeneration(config))
    model.model.visual.requires_grad_(False)  # texts do not use it
    return model


def qwen3_omni_moe() -> nn.Module:
    """Return the thinker of a Qwen3-Omni-MoE, whose text model normalizes each head, for texts."""
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    text = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    text |= {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    audio |= {"output_dim": 64, "num_mel_bins": 16, "downsample_hidden_size": 8}
    tokens = {"image_token_id": 20, "video_token_id": 21, "audio_token_id": 22}
    config = Qwen3OmniMoeThinkerConfig(text_config=text, vision_config=vision, audio_config=audio, **tokens)
    config.text_config._experts_implementation = "eager"
    model = _stirred(Qwen3OmniMoeThinkerForConditionalGeneration(config))
    for tower in (model.model.visual, model.model.audio_tower):
        tower.requires_grad_(False)  # texts use neither
    return model


def _stirred(model: nn.Module) -> nn.Module:
    """Return a model whose vectors (norms and biases), ones or zeros at the start, are none."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() < 2 or "norm" in name:
                param.add_(torch.randn_like(param), alpha=0.1)
    return model


def mixtral_of_eight(**options: Any) -> nn.Module:
    """Return a Mixtral whose experts several ranks can share."""
    return planned("Mixtral", num_local_experts=8, experts_implementation="eager", **options)


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


def qwen2_moe(**options: Any) -> nn.Module:
    """Return a Qwen2-MoE, with an expert that all tokens share and a layer without experts."""
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 8}
    return planned(
        "Qwen2Moe",
        **sizes,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        experts_implementation="eager",
        **options,
    )


def qwen3_moe(**options: Any) -> nn.Module:
    """Return a Qwen3-MoE, whose weights of the chosen experts add up to 1."""
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
    return planned("Qwen3Moe", **sizes, norm_topk_prob=True, experts_implementation="eager", **options)


def deepseek_v3(**options: Any) -> nn.Module:
    """Return a DeepSeek-V3, whose experts are chosen from the best groups, behind a layer without experts."""
    sizes = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2}
    sizes |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    return planned(
        "DeepseekV3",
        **{**sizes, "v_head_dim": 16, "num_key_value_heads": 8},
        experts_implementation="eager",
        **options,
    )


def gpt_oss(**options: Any) -> nn.Module:
    """Return a gpt-oss, whose experts have biases and lie transposed, with sinks in its attention."""
    model = planned(
        "GptOss", num_local_experts=8, num_experts_per_tok=2, experts_implementation="eager", **options
    )
    with torch.no_grad():  # biases and sinks are zeros at the start
        for name, param in model.named_parameters():
            if "bias" in name or "sinks" in name:
                param.normal_(std=0.1)
    return model


def wide_opt() -> nn.Module:
    """Return an OPT that four ranks can share."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _decoder("OPT", ffn_dim=12, word_embed_proj_dim=16, dropout=0.0, pad_token_id=1, **sizes)


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


def gated_t5() -> nn.Module:
    """Return a T5 of the newer kind, with a head of its own."""
    return Translator(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


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
