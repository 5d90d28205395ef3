"""Products of two projections, summed over a third axis."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossalai.nn.layer.axial._dap import AxialModule
from colossalai.nn.layer.axial._ring_products import product_of_rows, product_over_rows
from colossalai.nn.layer.axial._shapes import check_pairs, check_shape, existing


class OuterProductMean(AxialModule):
    """Pairs of columns by the mean over the rows of outer products (algorithm 10).

    Under DAP with p ranks, `x` and `mask` have columns/p columns, and the result has columns/p rows. The
    right projections and the mask are gathered: (p - 1)/p batch * rows * columns * (hidden_dim + 1) elements
    in each direction.

    Args:
        dim: Width of the inputs.
        pair_dim: Width of the outputs.
        hidden_dim: Width of both projections, whose product has its square.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        pair_dim: int,
        hidden_dim: int = 32,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.left = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.right = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.out = nn.Linear(hidden_dim**2, pair_dim, device=device, dtype=dtype)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update of pairs.

        Args:
            x: (batch, rows, columns, dim).
            mask: (batch, rows, columns): positions that exist.

        Returns:
            (batch, columns, columns, pair_dim).

        Raises:
            ValueError: The shape of an argument differs from these.
        """
        check_shape("x", x, ("batch", "rows", "columns", *self.norm.normalized_shape))
        check_shape("mask", mask, x.shape[:-1])
        x = self.norm(x)
        mask = x.new_ones(x.shape[:-1]) if mask is None else existing(mask, x.dtype)
        exists = mask.unsqueeze(-1)
        if self.group.size == 1:
            right, right_mask = self.right(x) * exists, mask
            left = self.left(x) * exists
        else:
            # Columns of all ranks, with their masks, arrive while the left projections are computed.
            in_flight = self.group.whole_async(torch.cat([self.right(x) * exists, exists], -1), 2)
            left = self.left(x) * exists
            whole = in_flight.wait()
            right, right_mask = whole[..., :-1], whole[..., -1]
        return _without_overflow(self._mean, left, right, mask, right_mask)

    def _mean(self, left: Tensor, right: Tensor, left_mask: Tensor, right_mask: Tensor) -> Tensor:
        products = torch.einsum("bsic,bsjd->bijcd", left, right).flatten(-2)
        counts = torch.einsum("bsi,bsj->bij", left_mask, right_mask)  # rows that both columns have
        result: Tensor = self.out(products) / (counts.unsqueeze(-1) + 1e-3)
        return result


class TriangleMultiplication(AxialModule):
    """Pairs (i, j) by the products of the two other edges of each triangle (algorithms 11 and 12).

    Under DAP with p ranks, pairs, mask and result have residues/p rows. The forward sends (p - 1)/p batch *
    residues^2 * hidden_dim elements, and the backward twice as many (outgoing) or as many (incoming). See
    [Note: triangles in a ring].

    Args:
        dim: Width of the inputs and outputs.
        hidden_dim: Width of the projections. Default: `dim`.
        outgoing: Whether the edges are (i, k) and (j, k), else (k, i) and (k, j).
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        *,
        outgoing: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_dim = dim if hidden_dim is None else hidden_dim
        self.outgoing = outgoing
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.left = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.left_gate = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.right = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.right_gate = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.product_norm = nn.LayerNorm(hidden_dim, device=device, dtype=dtype)
        self.out = nn.Linear(hidden_dim, dim, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, dim, device=device, dtype=dtype)
        for gate in (self.left_gate, self.right_gate, self.gate):
            nn.init.zeros_(gate.weight)
            nn.init.ones_(gate.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, pair: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update of each pair.

        Args:
            pair: (batch, residues, residues, dim).
            mask: (batch, residues, residues): pairs that exist.

        Returns:
            (batch, residues, residues, dim).

        Raises:
            ValueError: The shape of an argument differs from these.
        """
        check_pairs("pair", pair, self.norm.normalized_shape[0], self.group.size, cut=1)
        check_shape("mask", mask, pair.shape[:-1])
        pair = self.norm(pair)
        exists = None if mask is None else existing(mask, pair.dtype).unsqueeze(-1)
        # Rows of the outgoing products need the right operand whole, columns of the incoming ones the left
        # one. It is first, so that `autochunk` can cut the other operand together with the products.
        layers = [(self.left, self.left_gate), (self.right, self.right_gate)]
        order = -1 if self.outgoing else 1
        operands = [_gated(pair, *each, exists).movedim(-1, 1) for each in layers[::order]]
        products = _without_overflow(self._multiply, *operands[::order])  # (batch, hidden_dim, i, j)
        del operands  # without autograd, their memory is free for the next layers
        update: Tensor = self.out(self.product_norm(products.movedim(1, -1)))
        gates: Tensor = self.gate(pair).sigmoid()
        return update * gates

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Return sums over k of (i, k) and (j, k), or of (k, i) and (k, j), for each channel."""
        if self.group.size > 1:
            multiply = product_of_rows if self.outgoing else product_over_rows
            return multiply(left, right, self.group.axis)
        return left @ right.mT if self.outgoing else left.mT @ right


def _gated(pair: Tensor, linear: nn.Linear, gate: nn.Linear, exists: Tensor | None) -> Tensor:
    """Return the projection of pairs times its gate, and 0 for pairs that do not exist."""
    gates: Tensor = gate(pair).sigmoid()
    if exists is not None:
        gates = gates * exists
    projection: Tensor = linear(pair)
    return projection * gates


def _without_overflow(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Return the value of a function, in float32 under autocast to float16, in which long sums overflow."""
    device = args[0].device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.float16:
        return function(*args)
    with torch.autocast(device, enabled=False):
        return function(*(x.float() for x in args))
