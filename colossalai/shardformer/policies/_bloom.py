"""Sharding policy of BLOOM of transformers: query, key and value of a head are neighbours in one weight.

Its biases for positions (ALiBi, 2108.12409) have a slope for each head, so each rank takes those of its own.
"""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.bloom.modeling_bloom"

BLOOM: Policy = {
    f"{_MODULE}.BloomAttention": Rule(
        columns=("query_key_value",),
        rows=("dense",),
        counts=("num_heads",),
        head_inputs=("alibi",),
        draws=True,
        attentions=True,
        unset=("slow_but_exact",),
    ),
    f"{_MODULE}.BloomMLP": Rule(
        columns=("dense_h_to_4h",), rows=("dense_4h_to_h",), unset=("slow_but_exact",)
    ),
    f"{_MODULE}.BloomModel": Rule(embeddings=("word_embeddings",)),
    f"{_MODULE}.BloomForCausalLM": Rule(heads=("lm_head",), loss_head="lm_head"),
}
