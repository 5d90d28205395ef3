"""Attention along an axis of (batch, rows, columns, dim)."""

import torch
from torch import Tensor, nn

from colossalai.communication import TensorInFlight
from colossalai.nn.layer.axial._dap import AxialModule
from colossalai.nn.layer.axial._panels import attend
from colossalai.nn.layer.axial._shapes import check_pairs, check_shape, existing


class GatedAttention(nn.Module):
    """Multi-head attention along each row, with gated outputs.

    Queries, keys and values have no bias. The output of a new layer is 0, so a residual block begins as the
    identity, and its gates are sigmoid(1).

    Args:
        dim: Width of the inputs and outputs.
        num_heads: Number of heads.
        head_dim: Width of a head.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        width = num_heads * head_dim
        self.query = nn.Linear(dim, width, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(dim, width, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(dim, width, bias=False, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, width, device=device, dtype=dtype)
        self.out = nn.Linear(width, dim, device=device, dtype=dtype)
        _init_gated(self.query, self.key, self.value, gate=self.gate, out=self.out)

    def forward(
        self, x: Tensor, bias: Tensor | TensorInFlight | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the update of each position.

        Args:
            x: (batch, rows, n, dim).
            bias: (batch, num_heads, n, n), added to the scores of each row; the projections overlap with one
                in flight.
            mask: (batch, rows, n): positions that exist.

        Returns:
            (batch, rows, n, dim).

        Raises:
            ValueError: The shape of an argument differs from these.
        """
        check_shape("x", x, ("batch", "rows", "n", self.query.in_features))
        check_shape("mask", mask, x.shape[:-1])
        query, key, value = (
            linear(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-2, -3)
            for linear in (self.query, self.key, self.value)
        )  # (batch, rows, heads, n, head_dim)
        if isinstance(bias, TensorInFlight):
            bias = bias.wait()
        check_shape("bias", bias, (len(x), self.num_heads, x.shape[2], x.shape[2]))
        output = attend(query, key, value, bias, mask).transpose(-2, -3).flatten(-2)
        result: Tensor = self.out(output * self.gate(x).sigmoid())
        return result


class RowAttention(AxialModule):
    """Attention along each row, with a bias from pairs of columns (algorithm 7).

    Under DAP with p ranks, `x`, `mask` and the result have rows/p rows, and `pair` columns/p. The bias of
    `pair` is gathered: (p - 1)/p batch * num_heads * columns^2 elements in each direction.

    Args:
        dim: Width of the inputs and outputs.
        num_heads: Number of heads.
        head_dim: Width of a head.
        pair_dim: Width of the representation of pairs; None for no bias.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        pair_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.attention = GatedAttention(dim, num_heads, head_dim, device=device, dtype=dtype)
        self.pair_norm = self.pair_bias = None
        if pair_dim is not None:
            self.pair_norm = nn.LayerNorm(pair_dim, device=device, dtype=dtype)
            self.pair_bias = nn.Linear(pair_dim, num_heads, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, pair: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the update of each position.

        Args:
            x: (batch, rows, columns, dim).
            pair: (batch, columns, columns, pair_dim).
            mask: (batch, rows, columns): positions that exist.

        Returns:
            (batch, rows, columns, dim).

        Raises:
            ValueError: `pair` is given to a layer without `pair_dim`, or missing, or the shape of an argument
                differs from these.
        """
        if (pair is None) != (self.pair_bias is None):
            state = "has a pair_dim, and no pair was" if pair is None else "has no pair_dim, and pair was"
            raise ValueError(f"this RowAttention {state} given: pass both or neither")
        check_shape("x", x, ("batch", "rows", "columns", *self.norm.normalized_shape))
        bias, columns = None, x.shape[2]
        if pair is not None and self.pair_bias is not None and self.pair_norm is not None:
            check_pairs("pair", pair, self.pair_norm.normalized_shape[0], self.group.size, cut=1)
            check_shape("pair", pair, (len(x), columns // self.group.size, columns, pair.shape[-1]))
            bias = self.pair_bias(self.pair_norm(pair)).movedim(-1, 1)  # (batch, heads, columns/p, columns)
            if self.group.size > 1:
                bias = self.group.whole_async(bias, 2)
        result: Tensor = self.attention(self.norm(x), bias, mask)
        return result


class ColumnAttention(nn.Module):
    """Attention along each column (algorithm 8).

    Args:
        dim: Width of the inputs and outputs.
        num_heads: Number of heads.
        head_dim: Width of a head.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.attention = GatedAttention(dim, num_heads, head_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update of each position.

        Args:
            x: (batch, rows, columns, dim).
            mask: (batch, rows, columns): positions that exist.

        Returns:
            (batch, rows, columns, dim).

        Raises:
            ValueError: The shape of an argument differs from these.
        """
        check_shape("x", x, ("batch", "rows", "columns", *self.norm.normalized_shape))
        check_shape("mask", mask, x.shape[:-1])
        mask = None if mask is None else mask.transpose(1, 2)
        output: Tensor = self.attention(self.norm(x.transpose(1, 2)), None, mask)
        return output.transpose(1, 2)


class GlobalColumnAttention(nn.Module):
    """Attention along each column by one query, the mean over its rows, with one head of keys (algorithm 19).

    Args:
        dim: Width of the inputs and outputs.
        num_heads: Number of heads of the query.
        head_dim: Width of a head.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        width = num_heads * head_dim
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.query = nn.Linear(dim, width, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(dim, head_dim, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(dim, head_dim, bias=False, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, width, device=device, dtype=dtype)
        self.out = nn.Linear(width, dim, device=device, dtype=dtype)
        _init_gated(self.query, self.key, self.value, gate=self.gate, out=self.out)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update of each position.

        Args:
            x: (batch, rows, columns, dim).
            mask: (batch, rows, columns): positions that exist.

        Returns:
            (batch, rows, columns, dim).

        Raises:
            ValueError: The shape of an argument differs from these.
        """
        check_shape("x", x, ("batch", "rows", "columns", *self.norm.normalized_shape))
        check_shape("mask", mask, x.shape[:-1])
        x = self.norm(x.transpose(1, 2))  # (batch, columns, rows, dim)
        mask = x.new_ones(x.shape[:-1]) if mask is None else mask.transpose(1, 2)
        weights = existing(mask, x.dtype)
        mean = (x * weights.unsqueeze(-1)).sum(-2) / weights.sum(-1, keepdim=True).clamp(min=1)
        query = self.query(mean).unflatten(-1, (self.num_heads, self.head_dim))  # (batch, columns, heads, d)
        # The heads are the queries of a single head of keys.
        key, value = self.key(x).unsqueeze(2), self.value(x).unsqueeze(2)  # (batch, columns, 1, rows, d)
        output = attend(query.unsqueeze(2), key, value, None, mask).flatten(2)  # (batch, columns, heads * d)
        result: Tensor = self.out(output.unsqueeze(-2) * self.gate(x).sigmoid())
        return result.transpose(1, 2)


class TriangleAttention(AxialModule):
    """Attention of pairs (i, j) to pairs with the same first or second residue (algorithms 13 and 14).

    The third edge of each triangle is a bias of the scores.

    Under DAP with p ranks, pairs, mask and result have residues/p rows, or residues/p columns if not
    `starting`. The bias is gathered: (p - 1)/p batch * num_heads * residues^2 elements in each direction.

    Args:
        dim: Width of the inputs and outputs.
        num_heads: Number of heads.
        head_dim: Width of a head.
        starting: Whether pairs have the first residue in common, as edges that start in one node.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        starting: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.starting = starting
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.bias = nn.Linear(dim, num_heads, bias=False, device=device, dtype=dtype)
        self.attention = GatedAttention(dim, num_heads, head_dim, device=device, dtype=dtype)

    def forward(self, pair: Tensor, mask: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        """Return the update of each pair.

        Args:
            pair: (batch, residues, residues, dim).
            mask: (batch, residues, residues): pairs that exist.
            chunk_size: Number of residues whose pairs are computed at a time. Default: all.

        Returns:
            (batch, residues, residues, dim).

        Raises:
            ValueError: The shape of an argument differs from these.
        """
        check_pairs(
            "pair", pair, self.norm.normalized_shape[0], self.group.size, cut=1 if self.starting else 2
        )
        check_shape("mask", mask, pair.shape[:-1])
        if not self.starting:
            # Edges (j, i) and (k, i) end in one node: rows of the transposed pairs.
            pair, mask = pair.transpose(1, 2), None if mask is None else mask.transpose(1, 2)
        pair = self.norm(pair)
        bias = self.bias(pair).movedim(-1, 1)  # (batch, heads, residues/p, residues)
        if self.group.size > 1:
            bias = self.group.whole_async(bias, 2)
        if chunk_size is None:
            output: Tensor = self.attention(pair, bias, mask)
        else:
            if self.group.size > 1:
                bias = bias.wait()
            rows = pair.split(chunk_size, 1)
            masks = [None] * len(rows) if mask is None else mask.split(chunk_size, 1)
            output = torch.cat(
                [self.attention(x, bias, part) for x, part in zip(rows, masks, strict=True)], 1
            )
        return output if self.starting else output.transpose(1, 2)


def _init_gated(*projections: nn.Linear, gate: nn.Linear, out: nn.Linear) -> None:
    """Draw the projections of a new attention; its gates are sigmoid(1), and its output is 0."""
    for linear in projections:
        nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(gate.weight)
    nn.init.ones_(gate.bias)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
