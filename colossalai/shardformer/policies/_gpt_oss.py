"""Sharding policy of gpt-oss, which has no plan: an attention with a sink for each head."""

from colossalai.shardformer.policies._rule import Policy, Rule

_RULES = {
    "Attention": Rule(
        columns=("q_proj", "k_proj", "v_proj"),
        rows=("o_proj",),
        head_params=("sinks",),
        divisible=("num_attention_heads", "num_key_value_heads"),
        draws=True,
        attentions=True,
    ),
    "Model": Rule(embeddings=("embed_tokens",)),
    "ForCausalLM": Rule(heads=("lm_head",), loss_head="lm_head"),
}

GPT_OSS: Policy = {
    f"transformers.models.gpt_oss.modeling_gpt_oss.GptOss{part}": rule for part, rule in _RULES.items()
}
