"""An engine of one process for unit tests of the trainer, and a logger that remembers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.trainer.hooks import BaseHook

Batch = tuple[torch.Tensor, torch.Tensor]


class FakeEngine:
    """Trains a linear classifier with plain SGD; writes down what the trainer calls.

    Args:
        accumulation_steps: Number of iterations between two updates.
        overflows: The updates, counted from 0, that are skipped.
    """

    def __init__(self, accumulation_steps: int = 1, overflows: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2, dtype=torch.float64)
        self.model.takes_labels = False  # as the wrapper of a model says
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.criterion = nn.CrossEntropyLoss()
        self.mesh = Mesh({"dp": 1}, rank=0)
        self.observers = self.mesh.axis("dp")
        self.sees_output = True
        self.settings: dict[str, Any] = {"mesh": {"dp": 1}}
        self.loss_weight = self.num_samples = None
        self.device = torch.device("cpu")
        self.schedule: Any = SimpleNamespace(data_process_func=None)
        self.accumulation_steps = accumulation_steps
        self.overflows = overflows
        self.calls: list[str] = []
        self._num_microbatches = 0
        self._num_updates = 0

    @property
    def training(self) -> bool:
        return self.model.training

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        if self._num_microbatches % self.accumulation_steps == 0:
            self.optimizer.zero_grad()

    def step(self) -> bool:
        self.calls.append("step")
        self._num_microbatches += 1
        if self._num_microbatches % self.accumulation_steps != 0:
            return False
        self._num_updates += 1
        if self._num_updates - 1 in self.overflows:
            return False
        self.optimizer.step()
        return True

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        self.calls.append(f"run{' forward' * forward_only}{' grad' * torch.is_grad_enabled()}")
        data, label = next(data_iter)
        output = self.model(data)
        loss = self.criterion(output, label) if return_loss else None
        if not forward_only:
            (loss / self.accumulation_steps).backward()
        kept = (output, label) if return_output_label else (None, None)
        return (*kept, None if loss is None else loss.detach())


class Lines:
    """A logger that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def info(self, message: str, ranks: list[int] | None = None) -> None:
        self.lines.append(message)

    def warning(self, message: str, ranks: list[int] | None = None) -> None:
        self.warnings.append(message)


class Probe(BaseHook):
    """Calls a function at a moment."""

    def __init__(self, moment: str, function: Any, priority: int = 20) -> None:
        super().__init__(priority)
        setattr(self, moment, function)


def make_batches(sizes: tuple[int, ...] = (4, 4, 1), seed: int = 1) -> list[Batch]:
    """Batches of the given sizes; the last one is short by default."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, dtype=torch.float64, generator=generator),
            torch.randint(2, (size,), generator=generator),
        )
        for size in sizes
    ]
