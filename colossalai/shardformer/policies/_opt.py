"""Sharding policy of OPT of transformers: as Llama, under other names, its embedding in the decoder."""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.opt.modeling_opt"

OPT: Policy = {
    f"{_MODULE}.OPTAttention": Rule(
        columns=("q_proj", "k_proj", "v_proj"),
        rows=("out_proj",),
        counts=("num_heads",),
        divisible=("num_attention_heads",),
        draws=True,
        attentions=True,
    ),
    f"{_MODULE}.OPTDecoderLayer": Rule(
        columns=("fc1",), rows=("fc2",), outside=("self_attn_layer_norm", "final_layer_norm")
    ),
    f"{_MODULE}.OPTDecoder": Rule(embeddings=("embed_tokens",)),
    f"{_MODULE}.OPTForCausalLM": Rule(heads=("lm_head",), loss_head="lm_head"),
}
