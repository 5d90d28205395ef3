"""Sharding policy of Phi and Phi3 of transformers, where their plans do less or leave something out.

The plan of Phi has no norms of single heads (`qk_layernorm`). That of Phi3 gathers gate and up, which are cut
by halves here; for its attention the plan stays.
"""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.phi.modeling_phi"

PHI: Policy = {
    f"{_MODULE}.PhiAttention": Rule(
        columns=("q_proj", "k_proj", "v_proj"),
        rows=("dense",),
        head_norms=("q_layernorm", "k_layernorm"),
        divisible=("num_attention_heads", "num_key_value_heads"),
        draws=True,
        attentions=True,
    ),
    f"{_MODULE}.PhiMLP": Rule(columns=("fc1",), rows=("fc2",)),
    f"{_MODULE}.PhiModel": Rule(embeddings=("embed_tokens",)),
    f"{_MODULE}.PhiForCausalLM": Rule(heads=("lm_head",), loss_head="lm_head"),
    "transformers.models.phi3.modeling_phi3.Phi3MLP": Rule(
        columns=("gate_up_proj",), rows=("down_proj",), packed=("gate_up_proj",)
    ),
}
