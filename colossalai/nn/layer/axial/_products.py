"""Products of two projections, summed over a third axis."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossalai.nn.layer.axial._shapes import check_shape


class OuterProductMean(nn.Module):
    """Pairs of columns by the mean over the rows of outer products (algorithm 10).

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
        mask = x.new_ones(x.shape[:-1]) if mask is None else mask.to(x.dtype)
        left, right = (linear(x) * mask.unsqueeze(-1) for linear in (self.left, self.right))
        return _without_overflow(self._mean, left, right, mask)

    def _mean(self, left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
        products = torch.einsum("bsic,bsjd->bijcd", left, right).flatten(-2)
        counts = torch.einsum("bsi,bsj->bij", mask, mask)  # rows that both columns have
        result: Tensor = self.out(products) / (counts.unsqueeze(-1) + 1e-3)
        return result


class TriangleMultiplication(nn.Module):
    """Pairs (i, j) by the products of the two other edges of each triangle (algorithms 11 and 12).

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
        check_shape("pair", pair, ("batch", "residues", pair.shape[1], *self.norm.normalized_shape))
        check_shape("mask", mask, pair.shape[:-1])
        pair = self.norm(pair)
        exists = None if mask is None else mask.to(pair.dtype).unsqueeze(-1)
        left = _gated(pair, self.left, self.left_gate, exists).movedim(-1, 1)
        right = _gated(pair, self.right, self.right_gate, exists).movedim(-1, 1)
        products = _without_overflow(self._multiply, left, right)  # (batch, hidden_dim, i, j)
        del left, right  # without autograd, their memory is free for the next layers
        update: Tensor = self.out(self.product_norm(products.movedim(1, -1)))
        gates: Tensor = self.gate(pair).sigmoid()
        return update * gates

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Return sums over k of (i, k) and (j, k), or of (k, i) and (k, j), for each channel."""
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
