"""Sharding policy of BERT of transformers: its blocks are cut, its embeddings and heads stay whole."""

from colossalai.shardformer.policies._rule import Policy, Rule

_MODULE = "transformers.models.bert.modeling_bert"
_ATTENTION = Rule(
    columns=("query", "key", "value"),
    counts=("num_attention_heads", "all_head_size"),
    divisible=("num_attention_heads",),
    draws=True,
    attentions=True,
)

BERT: Policy = {
    f"{_MODULE}.BertSelfAttention": _ATTENTION,
    f"{_MODULE}.BertCrossAttention": _ATTENTION,
    f"{_MODULE}.BertSelfOutput": Rule(rows=("dense",)),
    f"{_MODULE}.BertIntermediate": Rule(columns=("dense",)),
    f"{_MODULE}.BertOutput": Rule(rows=("dense",)),
}
