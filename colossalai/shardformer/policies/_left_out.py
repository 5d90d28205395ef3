"""Sharding policies of families of transformers whose plans leave out parameters inside a cut region.

Their plans contain the linear layers, but not the parameters on a rank's heads or features between them:
norms of single heads and activations with parameters, whose gradients are summed, and parameters with an
entry for each head. For layers of these families without a rule the plan is used. gpt-oss has no plan, and a
sink for each head. The plan of Phi3 gathers gate and up, which are cut by halves here; for its attention the
plan is used.
"""

from dataclasses import replace

from colossalai.shardformer.policies._rule import Policy, Rule

_MODELS = "transformers.models"
_PHI = f"{_MODELS}.phi.modeling_phi.Phi"
_ATTENTION = Rule(
    columns=("q_proj", "k_proj", "v_proj"),
    rows=("o_proj",),
    divisible=("num_attention_heads", "num_key_value_heads"),
    draws=True,
    attentions=True,
)
_WITH_NORMS = replace(_ATTENTION, head_norms=("q_norm", "k_norm"))
_MODEL = Rule(embeddings=("embed_tokens",))
_CAUSAL_MODEL = Rule(heads=("lm_head",), loss_head="lm_head")

PHI: Policy = {
    f"{_PHI}Attention": replace(_ATTENTION, rows=("dense",), head_norms=("q_layernorm", "k_layernorm")),
    f"{_PHI}MLP": Rule(columns=("fc1",), rows=("fc2",)),
    f"{_PHI}Model": _MODEL,
    f"{_PHI}ForCausalLM": _CAUSAL_MODEL,
    f"{_MODELS}.phi3.modeling_phi3.Phi3MLP": Rule(
        columns=("gate_up_proj",), rows=("down_proj",), packed=("gate_up_proj",)
    ),
}

GPT_OSS: Policy = {
    f"{_MODELS}.gpt_oss.modeling_gpt_oss.GptOss{part}": rule
    for part, rule in {
        "Attention": replace(_ATTENTION, head_params=("sinks",)),
        "Model": _MODEL,
        "ForCausalLM": _CAUSAL_MODEL,
    }.items()
}

LEFT_OUT: Policy = {
    f"{_MODELS}.apertus.modeling_apertus.ApertusMLP": Rule(
        columns=("up_proj",), rows=("down_proj",), head_norms=("act_fn",)
    ),
    # Each head has a norm with weights of its own.
    f"{_MODELS}.cohere.modeling_cohere.CohereAttention": replace(
        _ATTENTION, head_params=("q_norm.weight", "k_norm.weight")
    ),
    # From the values of all heads comes a mask for each of them.
    f"{_MODELS}.doge.modeling_doge.DogeAttention": replace(
        _WITH_NORMS, inner_rows=("dt_proj",), head_params=("A",)
    ),
    # Its forward takes views of the router's output, so the router stays whole.
    f"{_MODELS}.doge.modeling_doge.DogeCDMoE": Rule(
        columns=("gate_proj", "up_proj"),
        rows=("down_proj",),
        embeddings=("down_embed", "up_embed"),
        outside=("router_gate",),
    ),
    f"{_MODELS}.glm4_moe.modeling_glm4_moe.Glm4MoeAttention": _WITH_NORMS,
    f"{_MODELS}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention": _WITH_NORMS,
    f"{_MODELS}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextAttention": _WITH_NORMS,
}
