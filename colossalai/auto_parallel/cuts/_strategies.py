"""Strategies: the ways to cut each layer of a model over tensor-parallel ranks.

A *site* is a unit of cutting: a linear layer, a convolution, a batch norm, an embedding, or all layers that a
rule of `shardformer` cuts together, such as an attention with its heads. Each of its strategies has the field
of a `Rule` that implements it, the communication of its ranks, and whether its input and its output are whole
or parts of the features.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from colossalai.shardformer import Rule

CUTS = ("whole", "output", "input", "vocab", "channel", "expert")
"""Cuts of a layer: none, by output or input features or channels, by the vocabulary, by the channels of a
norm, by experts."""

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
"""Cut of the layers in each field of a `Rule`."""


@dataclass(frozen=True)
class CutTransfer:
    """A collective along the tensor axis.

    Attributes:
        op: One of `colossalai.device.OPERATIONS`.
        tensor: The tensor of the trace with its bytes, for one rank's share of the batch.
    """

    op: str
    tensor: str


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to cut a site.

    Attributes:
        cut: One of `CUTS`. For a rule with several layers, the cut of the first.
        field: The field of a `Rule` that contains the layer. None if nothing is cut, or the site has a rule.
        takes_part: Whether its input is a part of the features.
        gives_part: Whether its output is a part of the features.
        forward: Collectives of the ranks in the forward.
        backward: Collectives of the ranks in the backward.
    """

    cut: str = "whole"
    field: str | None = None
    takes_part: bool = False
    gives_part: bool = False
    forward: tuple[CutTransfer, ...] = ()
    backward: tuple[CutTransfer, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether the ranks share the site."""
        return self.cut != "whole"


WHOLE = Strategy()


@dataclass(frozen=True, kw_only=True)
class Site:
    """A unit of cutting.

    Attributes:
        name: The full name of the layer, or of the module with the rule.
        layers: Cut of each layer of the site, if the site is cut, by full name.
        operations: Names of its operations in the trace, whose work the ranks share.
        params: Names of the parameter tensors of which each rank has its part.
        strategies: `WHOLE`, then the others.
        takes: The number of the followers that are its input. None: its input is whole.
        gives: The number of the followers that are its output. None: its output is whole.
        rule: The rule that implements its cut. None for a single layer.
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
    """Tensors between sites that are all whole or all cut; see [Note: followers].

    Attributes:
        tensors: Their names.
        operations: The operations between them.
    """

    tensors: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """The choices for a number of tensor-parallel ranks.

    Attributes:
        num_ranks: Number of ranks.
        sites: The sites in the order in which they run.
        followers: The sets of tensors that can be cut.
        ties: Pairs of sites, by number, that share a parameter, or of which one passes a part to the other:
            both are cut, or neither.
    """

    num_ranks: int
    sites: tuple[Site, ...]
    followers: tuple[Followers, ...]
    ties: tuple[tuple[int, int], ...]

    @cached_property
    def site_of(self) -> Mapping[str, int]:
        """Number of the innermost site of an operation, by name."""
        found: dict[str, int] = {}
        sizes: dict[str, float] = {}
        for number, site in enumerate(self.sites):
            for name in site.operations:
                if len(site.operations) < sizes.get(name, math.inf):
                    found[name], sizes[name] = number, len(site.operations)
        return found

    @cached_property
    def followers_of(self) -> Mapping[str, int]:
        """Number of the followers of an operation, by name."""
        return {name: number for number, each in enumerate(self.followers) for name in each.operations}

    @cached_property
    def followers_by_tensor(self) -> Mapping[str, int]:
        """Number of the followers of a tensor, by name."""
        return {name: number for number, each in enumerate(self.followers) for name in each.tensors}


def tied_alike(first: Strategy, second: Strategy) -> bool:
    """Whether sites that share a parameter can have these strategies: both cut it by rows, or neither."""
    by_rows = {"embeddings", "heads", None}
    if first.is_cut != second.is_cut:
        return False
    return not first.is_cut or {first.field, second.field} <= by_rows
