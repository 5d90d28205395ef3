"""Sharding policy of GPT-NeoX of transformers: a weight has query, key and value of a head, then the next."""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.gpt_neox.modeling_gpt_neox"

GPT_NEOX: Policy = {
    f"{_MODULE}.GPTNeoXAttention": Rule(
        columns=("query_key_value",),
        rows=("dense",),
        divisible=("num_attention_heads",),
        draws=True,
        attentions=True,
    ),
    f"{_MODULE}.GPTNeoXMLP": Rule(columns=("dense_h_to_4h",), rows=("dense_4h_to_h",)),
    f"{_MODULE}.GPTNeoXModel": Rule(embeddings=("embed_in",)),
    f"{_MODULE}.GPTNeoXForCausalLM": Rule(heads=("lm_head",), loss_head="lm_head"),
}
