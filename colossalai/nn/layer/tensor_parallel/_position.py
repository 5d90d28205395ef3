"""A table of learned positions, added to an embedding."""

from typing import Any

import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.nn.layer.tensor_parallel._base import ParallelModule, empty_parameter
from colossalai.nn.layer.tensor_parallel._flow import current_cut
from colossalai.nn.layer.tensor_parallel._launched import launched_job
from colossalai.nn.layer.tensor_parallel._scheme import LINEAR_SCHEMES, Cut
from colossalai.tensor import set_built_for


class ParallelPositionEmbedding(ParallelModule):
    """Looks up rows of a weight (positions, features) that every sample of a batch uses alike.

    The weight is cut along the features as the activation is. Nothing is sent but its gradient, summed over
    the axes that cut the batch: 2 (p-1)/p |w| bytes for p ranks.

    Args:
        num_embeddings: Number of positions.
        embedding_dim: Global size of the features.
        cut: Cut of the activation that the result is added to.
        dtype: Type of the weight.
        mesh: The ranks; default: those of the launched job.

    Shape:
        Input (seq,) of position numbers; output (seq, features), the features a slice by `cut`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        cut: Cut,
        dtype: torch.dtype | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(mesh)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.cut = cut
        whole = nn.init.normal_(empty_parameter(num_embeddings, embedding_dim, dtype=dtype))
        self.weight = self.cut_parameter("weight", whole, ((), cut.features))

    def extra_repr(self) -> str:
        """Return the arguments for `print(model)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, weight {tuple(self.weight.shape)}"

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the rows."""
        weight = self.shared_over(self.cut.batch, self.weight) if self.cut.batch else self.weight
        return nn.functional.embedding(positions, weight)


def PositionEmbedding(
    num_embeddings: int, embedding_dim: int, *, input_cut: Cut | None = None, **options: Any
) -> nn.Module:
    """Return the position embedding of the current mode.

    It is `torch.nn.Embedding` where nothing is cut, else a `ParallelPositionEmbedding`.

    Args:
        num_embeddings: Number of positions.
        embedding_dim: Global size of the features.
        input_cut: Cut of the activation that it is added to; default: the output cut of the layer built
            before, the token embedding.
        options: `dtype`, and without a tensor mode the options of torch's embedding.
    """
    mode = launched_job().mode
    if LINEAR_SCHEMES[mode] == LINEAR_SCHEMES[None]:
        return set_built_for(nn.Embedding(num_embeddings, embedding_dim, **options), mode=mode)
    cut = input_cut or current_cut(mode)
    return ParallelPositionEmbedding(num_embeddings, embedding_dim, cut=cut, **options)
