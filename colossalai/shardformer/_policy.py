"""Which layers of which classes are cut, and how: a table, one rule for each class of modules.

In 1D tensor parallelism (1909.08053) a block is shared out between a column layer, whose output features are
cut, and a row layer, whose input features are. Between them each rank works on its features alone: its heads
of an attention, its part of a wide hidden layer. So all that has to be known of a class is the names of such
layers, and what else in it counts features or heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the modules of a class are shared out.

    Attributes:
        columns: Names of linear layers whose output features are cut.
        rows: Names of linear layers whose input features are cut; their outputs are summed.
        embeddings: Names of embeddings that are cut along the vocabulary.
        heads: Names of linear layers from features to the vocabulary, which is cut; they return all of it.
        counts: Names of attributes that count heads or features, and of which a rank has its part.
        part: Name of the attribute that says how many output features of a column layer belong together,
            where it yields several things one behind the other: query, key and value. None: all do.
        divisible: Names of attributes of `config` that the ranks must divide.
        draws: Whether random numbers are drawn between the column and the row layers: each rank draws others.
        whole_dropouts: Names of dropouts inside of such a module behind the row layer: all draw the same.
        attentions: Whether its second output are the attention weights (batch, heads, ...) of its heads; they
            are gathered where the caller asks for them (`output_attentions`).
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    part: str | None = None
    divisible: tuple[str, ...] = ()
    draws: bool = False
    whole_dropouts: tuple[str, ...] = ()
    attentions: bool = False


def register_rule(name: str, rule: Rule) -> None:
    """Say how the modules of a class are shared out; what was said of it before does not hold any more.

    Args:
        name: The name of the class; subclasses are shared out alike.
        rule: How.
    """
    _rules[name] = rule


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule of the class of a module, or of the nearest base class that has one."""
    return next((_rules[base.__name__] for base in type(module).__mro__ if base.__name__ in _rules), None)


def sharded_classes() -> list[str]:
    """Return the names of the classes that have a rule."""
    return sorted(_rules)


_LLAMA_ATTENTION = Rule(
    columns=("q_proj", "k_proj", "v_proj"),
    rows=("o_proj",),
    divisible=("num_attention_heads", "num_key_value_heads"),
    draws=True,
    attentions=True,
)
_LLAMA_MLP = Rule(columns=("gate_proj", "up_proj"), rows=("down_proj",))
_LLAMA_MODEL = Rule(embeddings=("embed_tokens",))
_HEAD = Rule(heads=("lm_head",))
_BERT_ATTENTION = Rule(
    columns=("query", "key", "value"),
    counts=("num_attention_heads", "all_head_size"),
    divisible=("num_attention_heads",),
    draws=True,
    attentions=True,
)

_rules: dict[str, Rule] = {
    "GPT2Attention": Rule(
        columns=("c_attn", "q_attn"),
        rows=("c_proj",),
        counts=("num_heads", "split_size"),
        part="split_size",
        divisible=("num_attention_heads",),
        draws=True,
        whole_dropouts=("resid_dropout",),
        attentions=True,
    ),
    "GPT2MLP": Rule(columns=("c_fc",), rows=("c_proj",)),
    "GPT2Model": Rule(embeddings=("wte",)),
    "GPT2LMHeadModel": _HEAD,
    "GPT2DoubleHeadsModel": _HEAD,
    **{
        f"{family}{part}": rule
        for family in ("Llama", "Mistral", "Qwen2")
        for part, rule in {
            "Attention": _LLAMA_ATTENTION,
            "MLP": _LLAMA_MLP,
            "Model": _LLAMA_MODEL,
            "ForCausalLM": _HEAD,
        }.items()
    },
    "BertSelfAttention": _BERT_ATTENTION,
    "BertCrossAttention": _BERT_ATTENTION,
    "BertSelfOutput": Rule(rows=("dense",)),
    "BertIntermediate": Rule(columns=("dense",)),
    "BertOutput": Rule(rows=("dense",)),
}
RULES: Mapping[str, Rule] = _rules
