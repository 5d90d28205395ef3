"""Sharding policy of ViT of transformers: its blocks are cut, its patches, positions and heads stay whole."""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.vit.modeling_vit"

VIT: Policy = {
    f"{_MODULE}.ViTAttention": Rule(
        columns=("q_proj", "k_proj", "v_proj"),
        rows=("o_proj",),
        divisible=("num_attention_heads",),
        draws=True,
        attentions=True,
    ),
    f"{_MODULE}.ViTMLP": Rule(columns=("fc1",), rows=("fc2",)),
}
