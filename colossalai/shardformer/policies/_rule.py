"""Sharding rule of a class of modules, or of one module by name: which of its layers are cut, and how.

In 1D tensor parallelism (1909.08053) a block is shared between a column layer, whose output features are cut,
and a row layer, whose input features are. Between them each rank computes its own features: its heads of an
attention, its part of a wide hidden layer. So a class is described by the names of such layers, and of its
attributes that count features or heads. A *policy* is the rules of a family of models, by the full names of
its classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The cuts of the modules of a class, or of the modules with a name.

    Fields of linear layers can contain convolutions of one group, too: their features are channels.

    Attributes:
        columns: Names of linear layers whose output features are cut.
        rows: Names of linear layers whose input features are cut; their outputs are summed.
        embeddings: Names of embeddings that are cut along the vocabulary.
        feature_embeddings: Names of embeddings that are cut along the features, of which a rank returns its
            part: a bias for each head of an attention.
        inner_rows: Names of row layers between the column and the row layers, with one output for each head:
            outputs are summed, and a rank goes on with those of its heads.
        heads: Names of linear layers whose output features are cut and gathered: from features to the
            vocabulary, or to inputs that an attention needs in full. Any number is padded.
        splits: Names of row layers that are given all input features, of which each rank takes its part.
        channel_norms: Names of batch norms, or group norms, between a column and a row layer: a rank has
            those of its channels, with their running statistics.
        packed: Names of those of `columns`, `rows` and `channel_norms` whose cut features are two equal
            parts, one behind the other (gate and up), each of which is cut for itself.
        head_params: Names of parameters of the module, or of a layer of it (`q_norm.weight`), whose dimension
            0 counts heads, of which a rank has those of its heads.
        head_inputs: Names of arguments of its forward whose dimension 0 counts batch times heads, of which a
            rank takes those of its heads; the first of `counts` counts the heads.
        experts: Names of parameters of the module itself whose dimension 0 counts experts: they are cut
            along it, and tokens travel to the ranks that have the experts of their choice. The module is
            called with (tokens, features), chosen experts and weights, both (tokens, choices).
        head_norms: Names of layers that all ranks hold and that a rank applies to its heads or features
            alone, as norms of single heads and activations with parameters; their gradients are summed.
        outside: Names of layers and parameters of a module with column and row layers that act before the
            ones or behind the others, on whole activations; "*" for all that no other field names. Any
            other parameter of such a module has to be covered by a field, or by a rule of its own module.
        counts: Names of attributes that count heads or features, and of which a rank has its part.
        part: Name of the attribute with the number of output features in each part of a column layer, if it
            has several parts in sequence: query, key and value. None: all features form one part.
        divisible: Names of attributes of `config` that the ranks must divide.
        unset: Names of attributes that have to be false: with them the forward multiplies with the weights of
            its layers by itself.
        draws: Whether random numbers are drawn between the column and the row layers: each rank draws others.
        whole_dropouts: Names of dropouts inside of such a module behind the row layer: all draw the same.
        attentions: Whether its output has the attention weights (batch, heads, ...) of its heads; they are
            gathered if the caller requests them (`output_attentions`).
        attentions_at: The place of the weights in the output.
        loss_head: Name of the linear layer whose outputs go to `self.loss_function(logits, labels, ...)` and
            nowhere else in the forward, as they are: `fused_loss` computes both together. None for none.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    inner_rows: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    feature_embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    channel_norms: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    head_params: tuple[str, ...] = ()
    head_inputs: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    part: str | None = None
    divisible: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    draws: bool = False
    whole_dropouts: tuple[str, ...] = ()
    attentions: bool = False
    attentions_at: int = 1
    loss_head: str | None = None

    @property
    def cuts(self) -> bool:
        """Whether anything is shared out."""
        cut = (
            self.columns,
            self.rows,
            self.inner_rows,
            self.splits,
            self.heads,
            self.embeddings,
            self.feature_embeddings,
        )
        norms = self.channel_norms or self.head_norms
        return any(cut) or bool(norms or self.head_params or self.counts or self.draws)


Policy = Mapping[str, Rule]
"""The rules of a family of models: by `module.qualname` of a class, so that nothing needs to be imported."""
