"""Deltas of linear layers: what adapters of low rank (LoRA, 2106.09685) add to a layer's outputs.

    y = x W^T + b + scale * (x A^T) B^T          A: (rank, in), B: (out, rank)

for the rows whose answers asked for that adapter; the other rows keep what the layer has made, bit for bit.
Of a layer that is cut over ranks A and B are cut as its weight is: B by rows where outputs are cut, A by
columns where inputs are. Then a rank's delta is its part of a sum, like its product, and is added before the
ranks complete the layer.
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
    """What adapters add to one linear layer, on this rank.

    Args:
        pairs: By the number of the adapter, A (rank, in) and scale * B (out, rank).
        of_logits: Whether the layer is given the rows whose logits are wanted, rather than all tokens.
        is_batch_invariant: Whether a row's result is to depend on nothing but the row.
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
        # A library may sum in another order where there are fewer rows, and MKL does so where a row is one of
        # the last. So the products are those that layers use, of all rows.
        self._products: dict[int, tuple[Product, Product]] = {}
        if is_batch_invariant:
            self._products = {
                number: (make_product(a, None, a.dtype), make_product(b, None, b.dtype))
                for number, (a, b) in pairs.items()
            }

    @property
    def is_due(self) -> bool:
        """Whether the step that is running may have rows for it."""
        return adapter_rows(of_logits=self.of_logits) is not None

    def add(self, made: Tensor, x: Tensor) -> None:
        """Add to a product, in place.

        Args:
            made: (rows, out), what the layer has made of `x`.
            x: (rows, in).
        """
        rows = adapter_rows(of_logits=self.of_logits)
        if rows is None:
            return
        assert len(made) == rows.num_rows, "the layer has other rows than when it was tried"
        for number, places in rows.groups:
            if number not in self.pairs:  # this adapter leaves the layer as it is
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
"""The deltas of a model by the linear layers that they belong to."""

NO_DELTAS: Deltas = MappingProxyType({})


class AdaptedPair:
    """A gated pair of products where adapters add to one or both of them, before the activation.

    Args:
        pair: The products.
        gate: What is added to the first; None for nothing.
        up: What is added to the second.
    """

    def __init__(self, pair: GatedPair, gate: LinearDelta | None, up: LinearDelta | None) -> None:
        self.pair = pair
        self.deltas = (gate, up)
        # An activation within a product rounds otherwise than one behind it: where company must not matter,
        # it is behind it whether or not somebody in the step has an adapter.
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
    """The forward, in paged calls, of a linear layer that is computed as it is.

    Args:
        layer: The layer.
        parts: What it computes with.
        delta: What is added.
    """

    def __init__(self, layer: nn.Module, parts: ProductParts, delta: LinearDelta) -> None:
        self._plain: Callable[[Tensor], Tensor] = layer.forward
        self._delta = delta
        self._summed_over, self._gathered_over = parts.summed_over, parts.gathered_over
        self._num_outputs = parts.num_outputs
        self._out_features = parts.out_features

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the layer returns, with what is added to it; (..., in) to (..., out)."""
        plain = self._plain(x, *args, **kwargs)
        if not self._delta.is_due:
            return plain
        flat = x.reshape(-1, x.shape[-1])
        added = plain.new_zeros(len(flat), self._out_features)
        self._delta.add(added, flat)
        # The layer has been completed by its ranks already, so this is completed by itself.
        if self._summed_over is not None:
            added = all_reduce_in_place(added, self._summed_over)
        if self._gathered_over is not None:
            added = gather_forward_split_backward(added, self._gathered_over, -1)[..., : self._num_outputs]
        return plain + added.view(plain.shape)
