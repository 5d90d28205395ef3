"""The attentions over cut sequences as values, so that their callers need no name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from colossalai.context import Axis
from colossalai.nn.layer.sequence_parallel._order import Order
from colossalai.nn.layer.sequence_parallel._ring_attention import ring_attention
from colossalai.nn.layer.sequence_parallel._ulysses_attention import check_divides_heads, ulysses_attention


class Attend(Protocol):
    """Signature of `ring_attention` and `ulysses_attention`; see the former for the arguments."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        axis: Axis,
        causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        order: Order = "zigzag",
        tile_size: int = 512,
        lanes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the context of this rank's queries."""


def _any_heads(num_heads: int, num_ranks: int) -> None:
    """Take any number of heads."""


@dataclass(frozen=True, kw_only=True)
class SequenceAttention:
    """An attention over sequences that ranks share.

    Attributes:
        name: Its name in a config.
        attend: The function.
        causal_order: The order of positions in which all ranks have the same work under a causal mask.
        check_heads: Raises ValueError if this number of ranks cannot share sequences of so many heads.
    """

    name: str
    attend: Attend = field(repr=False)
    causal_order: Order
    check_heads: Callable[[int, int], None] = field(repr=False)

    def order(self, *, causal: bool) -> Order:
        """Return the order of positions that suits it best; without a causal mask there is no better one."""
        return self.causal_order if causal else "contiguous"


RING = SequenceAttention(name="ring", attend=ring_attention, causal_order="zigzag", check_heads=_any_heads)
"""Keys and values go round a ring."""

ULYSSES = SequenceAttention(
    name="ulysses", attend=ulysses_attention, causal_order="contiguous", check_heads=check_divides_heads
)
"""Each rank takes some of the heads."""

ATTENTIONS: Mapping[str, SequenceAttention] = {attention.name: attention for attention in (RING, ULYSSES)}
"""By the name that `parallel=dict(sequence=dict(size=..., attention=...))` takes."""
