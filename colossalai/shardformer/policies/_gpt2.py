"""Sharding policy of GPT-2 of transformers; its linear layers are `Conv1D`, query, key and value are one."""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.gpt2.modeling_gpt2"

GPT2: Policy = {
    f"{_MODULE}.GPT2Attention": Rule(
        columns=("c_attn", "q_attn"),
        rows=("c_proj",),
        counts=("num_heads", "split_size"),
        part="split_size",
        divisible=("num_attention_heads",),
        draws=True,
        whole_dropouts=("resid_dropout",),
        attentions=True,
    ),
    f"{_MODULE}.GPT2MLP": Rule(columns=("c_fc",), rows=("c_proj",)),
    f"{_MODULE}.GPT2Model": Rule(embeddings=("wte",)),
    f"{_MODULE}.GPT2LMHeadModel": Rule(heads=("lm_head",), loss_head="lm_head"),
    f"{_MODULE}.GPT2DoubleHeadsModel": Rule(heads=("lm_head",)),
}
