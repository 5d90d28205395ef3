"""Sharding policy of T5 of transformers: its bias for relative positions is cut by heads, as attentions."""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.t5.modeling_t5"

T5: Policy = {
    f"{_MODULE}.T5Attention": Rule(
        columns=("q", "k", "v"),
        rows=("o",),
        feature_embeddings=("relative_attention_bias",),
        counts=("n_heads", "inner_dim"),
        divisible=("num_heads",),
        draws=True,
        attentions=True,
        attentions_at=2,  # behind the bias, which the next blocks take as it is, cut
    ),
    f"{_MODULE}.T5DenseActDense": Rule(columns=("wi",), rows=("wo",), draws=True),
    f"{_MODULE}.T5DenseGatedActDense": Rule(columns=("wi_0", "wi_1"), rows=("wo",), draws=True),
    f"{_MODULE}.T5Stack": Rule(embeddings=("embed_tokens",)),
    f"{_MODULE}.T5ForConditionalGeneration": Rule(embeddings=("shared",), heads=("lm_head",)),
    # Their stacks share this weight.
    f"{_MODULE}.T5Model": Rule(embeddings=("shared",)),
    f"{_MODULE}.T5EncoderModel": Rule(embeddings=("shared",)),
    f"{_MODULE}.T5ForQuestionAnswering": Rule(embeddings=("shared",)),
}
