"""Strategies: how each layer of a model can be cut over tensor-parallel ranks.

A *site* is what is cut as one: a linear layer, a convolution, a batch norm, an embedding, or all layers that
a rule of `shardformer` shares out together, such as an attention with its heads. Each of its strategies says
which field of a `Rule` carries it out, what its ranks communicate, and whether its input and its output are
whole or parts of the features.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from colossalai.shardformer import Rule

CUTS = ("whole", "output", "input", "vocab", "channel", "expert")
"""How a layer can be cut: not at all, by output or input features or channels, by the vocabulary, by the
channels of a norm, by experts."""

CUT_OF_FIELD: Mapping[str, str] = {
    "columns": "output",
    "heads": "output",
    "feature_embeddings": "output",
    "rows": "input",
    "splits": "input",
    "embeddings": "vocab",
    "channel_norms": "channel",
    "experts": "expert",
}
"""By the field of a `Rule` that names a layer, how the layer is cut."""


@dataclass(frozen=True)
class CutTransfer:
    """A collective along the tensor axis.

    Attributes:
        op: One of `colossalai.device.OPERATIONS`.
        tensor: The tensor of the trace whose bytes it has, as of one rank's share of the batch.
    """

    op: str
    tensor: str


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to cut a site.

    Attributes:
        cut: One of `CUTS`; of a rule with several layers, that of the first.
        field: The field of a `Rule` that names the layer; None where nothing is cut, or the site has a rule.
        takes_part: Whether its input is a part of the features.
        gives_part: Whether its output is.
        forward: What the ranks exchange in the forward.
        backward: What they exchange in the backward.
    """

    cut: str = "whole"
    field: str | None = None
    takes_part: bool = False
    gives_part: bool = False
    forward: tuple[CutTransfer, ...] = ()
    backward: tuple[CutTransfer, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether the ranks share it."""
        return self.cut != "whole"


WHOLE = Strategy()


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is cut as one.

    Attributes:
        name: The full name of the layer, or of the module that has the rule.
        layers: The full names of the layers that are cut, with how they are then.
        operations: Names of its operations in the trace, whose work the ranks share.
        params: Names of the parameter tensors of which each rank has its part.
        strategies: `WHOLE`, then the others.
        takes: The number of the followers that are its input; None: its input is whole.
        gives: The same of its output.
        rule: The rule that carries out its cut; None for a single layer.
        results: Tensors of its operations that stay whole when it is cut.
    """

    name: str
    layers: Mapping[str, str]
    operations: tuple[str, ...]
    params: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    takes: int | None = None
    gives: int | None = None
    rule: Rule | None = None
    results: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Followers:
    """Tensors between sites that are all whole or all cut; see [Note: tensors that follow].

    Attributes:
        tensors: Their names.
        operations: The operations between them.
    """

    tensors: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """All that can be chosen for a number of tensor-parallel ranks.

    Attributes:
        num_ranks: Their number.
        sites: In the order in which they run.
        followers: Those that may be cut.
        ties: Pairs of sites, by number, that share a parameter, or of which one hands a part to the other:
            both are cut, or neither.
    """

    num_ranks: int
    sites: tuple[Site, ...]
    followers: tuple[Followers, ...]
    ties: tuple[tuple[int, int], ...]

    @cached_property
    def site_of(self) -> Mapping[str, int]:
        """By the name of an operation the number of the site that it belongs to; the innermost."""
        found: dict[str, int] = {}
        sizes: dict[str, float] = {}
        for number, site in enumerate(self.sites):
            for name in site.operations:
                if len(site.operations) < sizes.get(name, math.inf):
                    found[name], sizes[name] = number, len(site.operations)
        return found

    @cached_property
    def followers_of(self) -> Mapping[str, int]:
        """By the name of an operation the number of the followers that it is between."""
        return {name: number for number, each in enumerate(self.followers) for name in each.operations}

    @cached_property
    def followers_by_tensor(self) -> Mapping[str, int]:
        """By the name of a tensor the number of the followers that it is among."""
        return {name: number for number, each in enumerate(self.followers) for name in each.tensors}


def tied_alike(first: Strategy, second: Strategy) -> bool:
    """Whether two sites that share a parameter may have these strategies: both cut it by rows, or neither."""
    by_rows = {"embeddings", "heads", None}
    if first.is_cut != second.is_cut:
        return False
    return not first.is_cut or {first.field, second.field} <= by_rows
