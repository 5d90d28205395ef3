"""Metrics of a phase, reduced over the data-parallel ranks.

[Note: ratios of sums] Every metric is a ratio of two sums, over batches and over data-parallel ranks: the
loss is sum(loss * weight) / sum(weight), with the number of samples where the criterion gives no other
weight, the accuracy sum(correct) / sum(predictions). So a short last batch, or a rank with fewer samples or
labels, has its right weight, and the figure equals that of a single process.

[Note: one reduction] All metrics of a step or of an epoch are reduced by one all-reduce of one small vector.
Every rank issues it: at the end of an epoch the Trainer, for a step the first hook that reads the values, and
hooks are the same on every rank. Later reads use the stored result.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.context import Axis


class MetricTable:
    """The metrics of training or of testing.

    Args:
        replicas: The ranks that the sums run over.
        device: Device of the sums, so that adding does not wait for the device.
    """

    def __init__(self, replicas: Axis, device: torch.device) -> None:
        self._replicas = replicas
        self._step = _Sums(device)
        self._epoch = _Sums(device)
        self._step_values: dict[str, float] | None = None
        self._epoch_values: dict[str, float] = {}

    @property
    def epoch_values(self) -> dict[str, float]:
        """The metrics of the last complete epoch, the same on all data-parallel ranks."""
        return dict(self._epoch_values)

    @property
    def names(self) -> list[str]:
        """The names of the declared metrics."""
        return self._epoch.names

    def declare(self, name: str) -> None:
        """Make room for a metric; hooks do so when they are attached, on every rank in the same order."""
        self._step.declare(name)
        self._epoch.declare(name)

    def add(self, name: str, numerator: Tensor | float, denominator: Tensor | float) -> None:
        """Add to both sums of a declared metric."""
        # See [Note: ratios of sums].
        for sums in (self._step, self._epoch):
            sums.add(name, numerator, denominator)
        self._step_values = None

    def step_values(self) -> dict[str, float]:
        """Return the metrics of the present step.

        The first call of a step is a collective: all data-parallel ranks must make it.

        Returns:
            The metrics by name, without those that no rank added a value to.
        """
        if self._step_values is None:
            self._step_values = self._reduce(self._step)
        return dict(self._step_values)

    def start_step(self) -> None:
        """Begin a step."""
        self._step.clear()
        self._step_values = None

    def start_epoch(self) -> None:
        """Begin an epoch."""
        self.start_step()
        self._epoch.clear()

    def end_epoch(self) -> None:
        """Reduce the metrics of the epoch. A collective over the data-parallel ranks."""
        self._epoch_values = self._reduce(self._epoch)

    def _reduce(self, sums: "_Sums") -> dict[str, float]:
        # See [Note: one reduction].
        vector = sums.as_vector()  # (2 * metrics,): the numerators, then the denominators
        if self._replicas.size > 1 and len(vector) > 0:
            # All data-parallel ranks join with their own sums; `tolist` below waits for the result.
            dist.all_reduce(vector, group=self._replicas.group)
        numerators, denominators = vector.view(2, -1).tolist()
        rows = zip(sums.names, numerators, denominators, strict=True)
        return {name: numerator / denominator for name, numerator, denominator in rows if denominator > 0}


class _Sums:
    """Numerators and denominators by name; tensors on the device once one is added, until then numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # MPS has no float64; everywhere else sums over an epoch shall not lose the small terms.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._numerators: dict[str, Tensor | float] = {}
        self._denominators: dict[str, Tensor | float] = {}

    @property
    def names(self) -> list[str]:
        return list(self._denominators)

    def declare(self, name: str) -> None:
        self._numerators[name] = 0.0
        self._denominators[name] = 0.0

    def add(self, name: str, numerator: Tensor | float, denominator: Tensor | float) -> None:
        self._numerators[name] = self._numerators[name] + self._wide(numerator)
        self._denominators[name] = self._denominators[name] + self._wide(denominator)

    def clear(self) -> None:
        for name in self.names:
            self.declare(name)

    def _wide(self, value: Tensor | float) -> Tensor | float:
        return value.to(self._dtype) if isinstance(value, Tensor) else value

    def as_vector(self) -> Tensor:
        sums = [*self._numerators.values(), *self._denominators.values()]
        scalars = [torch.as_tensor(value, dtype=self._dtype, device=self._device) for value in sums]
        return torch.stack(scalars) if scalars else torch.empty(0)
