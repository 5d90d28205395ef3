"""A mixture of experts that the data choose, so that ranks run different ones, in many guises."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
NUM_EXPERTS = 4

GUISES = (
    *("plain", "around", "around, reentrant", "inside", "inside, reentrant", "dataclass", "dict"),
    *("called twice", "written", "frozen"),
)
"""Checkpointing around the mixture or inside, what it returns, how it is called."""


@dataclass
class Routed:
    """What a mixture returns in one guise."""

    hidden: Tensor
    counts: list[int]


class Expert(nn.Linear):
    """A layer with an activation."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of it."""
        return torch.tanh(super().forward(x))


class Mixture(nn.Module):
    """Runs each sample through the expert that its last feature names, or through none."""

    def __init__(self, guise: str) -> None:
        super().__init__()
        self.guise = guise
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        if guise == "frozen":
            self.requires_grad_(False)
            self.experts[1].requires_grad_(True)

    def forward(self, x: Tensor, choice: Tensor) -> Any:
        """Return the outputs of the experts: zeros where there is none."""
        if self.guise == "written":
            x *= 0.5
        result = torch.zeros_like(x)
        counts = []
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            counts.append(len(rows))
            if len(rows):
                result = result.index_add(0, rows, self._run(expert, x[rows]))
        match self.guise:
            case "dataclass":
                return Routed(result, counts)
            case "dict":
                return {"hidden": (result, counts), "log": None, "choice": choice}
            case _:
                return result

    def _run(self, expert: nn.Module, x: Tensor) -> Tensor:
        if self.guise.startswith("inside"):
            return checkpoint(expert, x, use_reentrant=self.guise == "inside, reentrant")
        return expert(x)


class Layer(nn.Module):
    """A linear layer and a mixture, with a residual connection."""

    def __init__(self, guise: str) -> None:
        super().__init__()
        self.guise = guise
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(guise)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Return the sum of `x` and the mixture of it."""
        routed = self.mixture(self.mix(self.norm(x)), choice)
        match self.guise:
            case "dataclass":
                routed = routed.hidden
            case "dict":
                routed = routed["hidden"][0]
            case "called twice":
                routed = routed + self.mixture(routed, (choice + 1) % NUM_EXPERTS)
            case "written":
                routed += 1.0
        return x + routed


class Routing(nn.Module):
    """A layer for each guise, between two linear layers."""

    def __init__(self, *guises: str) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(guise) for guise in guises)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of classes: (batch, 3)."""
        choice = x[:, -1].long()
        x = self.start(x)
        for layer in self.layers:
            if layer.guise.startswith("around"):
                x = checkpoint(layer, x, choice, use_reentrant=layer.guise == "around, reentrant")
            else:
                x = layer(x, choice)
        return self.head(x)


def batches(num_ranks: int, num_steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return samples for which ranks choose different experts, and their classes: (4 * num_ranks, WIDTH).

    A rank takes one expert for two of its samples, and none for the others; the last rank takes none at all
    in most steps. The last expert is first used in the third step.
    """
    generator = torch.Generator().manual_seed(5)
    found = []
    for step in range(num_steps):
        x = torch.randn(4 * num_ranks, WIDTH, generator=generator)
        for rank in range(num_ranks):
            expert = (rank + step) % 3 if step < 2 else 3
            own = x[4 * rank : 4 * rank + 4]
            own[:, -1] = NUM_EXPERTS + 1  # of which there is none
            if rank < num_ranks - 1 or step == 1:
                own[:2, -1] = expert
        found.append((x, torch.randint(3, (4 * num_ranks,), generator=generator)))
    return found
