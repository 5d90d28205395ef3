"""The deep learning recommendation model (DLRM, arXiv 1906.00091) with cached tables of embeddings."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from embeddings import Tables
from torch import Tensor, nn


class DLRM(nn.Module):
    """Click logits from dense features and ids.

    The dense features pass a bottom MLP to a vector as wide as the rows. A top MLP takes this vector and its
    inner products with all rows, and those of each two rows.

    Args:
        tables: The embeddings.
        num_dense: Number of dense features.
        bottom_sizes: Widths of the hidden layers of the bottom MLP.
        top_sizes: Widths of the hidden layers of the top MLP.
    """

    pairs: Tensor

    def __init__(
        self, tables: Tables, *, num_dense: int, bottom_sizes: Sequence[int], top_sizes: Sequence[int]
    ) -> None:
        super().__init__()
        num_vectors = 1 + tables.num_tables
        pairs = torch.triu_indices(num_vectors, num_vectors, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.tables = tables
        self.bottom = mlp(num_dense, *bottom_sizes, tables.dim)
        self.top = mlp(tables.dim + pairs.shape[1], *top_sizes, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return logits (batch,) of features (batch, dense features) and ids (batch, tables)."""
        bottom = self.bottom(dense)  # (batch, dim)
        vectors = torch.cat([bottom.unsqueeze(1), self.tables(ids).to(bottom.dtype)], 1)
        products = vectors @ vectors.mT  # (batch, 1 + tables, 1 + tables)
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([bottom, interactions], 1))
        return logits.squeeze(1)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these widths, with a ReLU after each but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
