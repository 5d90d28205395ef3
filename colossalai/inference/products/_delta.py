"""Deltas of linear layers: outputs of low-rank adapters (LoRA, 2106.09685), added to a layer's outputs.

    y = x W^T + b + scale * (x A^T) B^T          A: (rank, in), B: (out, rank)

for the rows of requests with that adapter; the other rows of the layer's output stay unchanged, bit for bit.
A and B of a sharded layer are sharded like its weight: B by rows if outputs are sharded, A by columns if
inputs are. Then a rank's delta is a partial sum, like its product, and is added before the ranks complete the
layer.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from colossalai.communication import all_reduce_in_place, gather_forward_split_backward
from colossalai.inference.paging import adapter_rows
from colossalai.inference.products._products import GatedPair, Product
from colossalai.inference.products._quantized_linear import ProductParts, make_product


class LinearDelta:
    """Delta of one linear layer by all adapters, on this rank.

    Args:
        pairs: A (rank, in) and scale * B (out, rank), by the number of the adapter.
        of_logits: Whether the layer's input has the rows of the logits instead of all tokens.
        is_batch_invariant: Whether the result of a row depends on that row only.
    """

    def __init__(
        self,
        pairs: Mapping[int, tuple[Tensor, Tensor]],
        *,
        of_logits: bool = False,
        is_batch_invariant: bool = False,
    ) -> None:
        self.pairs = pairs
        self.of_logits = of_logits
        self.is_batch_invariant = is_batch_invariant
        # A library may sum in another order for fewer rows, and MKL does so for the last rows. So the
        # products are those of layers, over all rows.
        self._products: dict[int, tuple[Product, Product]] = {}
        if is_batch_invariant:
            self._products = {
                number: (make_product(a, None, a.dtype), make_product(b, None, b.dtype))
                for number, (a, b) in pairs.items()
            }

    @property
    def is_due(self) -> bool:
        """Whether the current step can have rows for it."""
        return adapter_rows(of_logits=self.of_logits) is not None

    def add(self, made: Tensor, x: Tensor) -> None:
        """Add the delta to a product, in place.

        Args:
            made: (rows, out), the layer's product of `x`.
            x: (rows, in).
        """
        rows = adapter_rows(of_logits=self.of_logits)
        if rows is None:
            return
        assert len(made) == rows.num_rows, "the layer has other rows than when it was tried"
        for number, places in rows.groups:
            if number not in self.pairs:  # this adapter does not include the layer
                continue
            first, second = self.pairs[number]
            if self.is_batch_invariant:
                reduce, expand = self._products[number]
                made.index_add_(0, places, expand(reduce(x)).index_select(0, places))
            elif len(places) == rows.num_rows:
                made.addmm_(functional.linear(x, first), second.t())
            else:
                some = functional.linear(x.index_select(0, places), first)
                made.index_add_(0, places, functional.linear(some, second))


Deltas = Mapping[nn.Module, LinearDelta]
"""Deltas of a model by linear layer."""

NO_DELTAS: Deltas = MappingProxyType({})


class AdaptedPair:
    """A gated pair of products with deltas of adapters before the activation.

    Args:
        pair: The products.
        gate: Delta of the first; None for none.
        up: Delta of the second; None for none.
    """

    def __init__(self, pair: GatedPair, gate: LinearDelta | None, up: LinearDelta | None) -> None:
        self.pair = pair
        self.deltas = (gate, up)
        # An activation fused into a product rounds differently from a separate one. For batch invariance
        # it is always separate, with or without an adapter in the step.
        self.is_always_apart = any(delta.is_batch_invariant for delta in self.deltas if delta is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return (tokens, inner); x is (tokens, features)."""
        if not self.is_always_apart and not any(delta is not None and delta.is_due for delta in self.deltas):
            return self.pair(x)
        made = self.pair.apart(x)
        for delta, each in zip(self.deltas, made, strict=True):
            if delta is not None:
                delta.add(each, x)
        return self.pair.joined(*made)


class AdaptedForward:
    """Forward, in paged calls, of an unchanged linear layer with a delta.

    Args:
        layer: The layer.
        parts: Its weight, bias and sharding.
        delta: Its delta.
    """

    def __init__(self, layer: nn.Module, parts: ProductParts, delta: LinearDelta) -> None:
        self._plain: Callable[[Tensor], Tensor] = layer.forward
        self._delta = delta
        self._summed_over, self._gathered_over = parts.summed_over, parts.gathered_over
        self._num_outputs = parts.num_outputs
        self._out_features = parts.out_features

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output plus the delta; (..., in) to (..., out)."""
        plain = self._plain(x, *args, **kwargs)
        if not self._delta.is_due:
            return plain
        flat = x.reshape(-1, x.shape[-1])
        added = plain.new_zeros(len(flat), self._out_features)
        self._delta.add(added, flat)
        # The ranks have completed the layer's output already, so the delta is completed separately.
        if self._summed_over is not None:
            added = all_reduce_in_place(added, self._summed_over)
        if self._gathered_over is not None:
            added = gather_forward_split_backward(added, self._gathered_over, -1)[..., : self._num_outputs]
        return plain + added.view(plain.shape)
