"""The feed-forward network of an axial model."""

import torch
from torch import Tensor, nn


class Transition(nn.Module):
    """Two linear layers with a ReLU between them, for each position (algorithms 9 and 15).

    Args:
        dim: Width of the inputs and outputs.
        factor: Width of the hidden layer in units of `dim`.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        factor: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.hidden = nn.Linear(dim, factor * dim, device=device, dtype=dtype)
        self.out = nn.Linear(factor * dim, dim, device=device, dtype=dtype)
        nn.init.kaiming_normal_(self.hidden.weight, nonlinearity="relu")
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update of each position, (..., dim)."""
        result: Tensor = self.out(self.hidden(self.norm(x)).relu())
        return result
