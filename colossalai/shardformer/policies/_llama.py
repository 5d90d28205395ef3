"""Sharding policy of Llama and of the models of transformers whose blocks have its layers: Mistral, Qwen2."""

from colossalai.shardformer.policies._rule import Policy, Rule

_RULES = {
    "Attention": Rule(
        columns=("q_proj", "k_proj", "v_proj"),
        rows=("o_proj",),
        divisible=("num_attention_heads", "num_key_value_heads"),
        draws=True,
        attentions=True,
    ),
    "MLP": Rule(columns=("gate_proj", "up_proj"), rows=("down_proj",)),
    "Model": Rule(embeddings=("embed_tokens",)),
    "ForCausalLM": Rule(heads=("lm_head",), loss_head="lm_head"),
}

LLAMA: Policy = {
    f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{part}": rule
    for family in ("Llama", "Mistral", "Qwen2")
    for part, rule in _RULES.items()
}
