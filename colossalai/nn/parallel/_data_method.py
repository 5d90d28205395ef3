"""What a way of data parallelism is: applied once, and told for every backward whether to synchronize."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.communication import broadcast
from colossalai.context import Axis


class DataMethod(ABC):
    """A way to keep the ranks that share a model equal; a frozen dataclass of its options.

    Attributes:
        shards_parameters: Whether a rank holds only slices of the parameters.
        shards_gradients: Whether a rank holds only slices of the averaged gradients.
    """

    shards_parameters: ClassVar[bool] = False
    shards_gradients: ClassVar[bool] = False

    @abstractmethod
    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> nn.Module:
        """Return a module that computes as `module` does and averages its gradients over the replicas.

        Args:
            module: The module, on `device`; it may be changed in place, its parameters may be replaced.
            blocks: The repeated parts of it (transformer blocks, residual blocks).
            replicas: The ranks that hold the same model and see different parts of the batch.
            device: The device of this rank.
        """

    def check(  # noqa: B027 - most methods take any model and optimizer
        self, module: nn.Module, optimizers: Sequence[Optimizer], *, blocks: list[nn.Module]
    ) -> None:
        """Raise if `apply`, whose arguments these are, cannot take the module, or later steps the optimizers.

        Raises:
            ValueError: The method cannot take `module` or one of `optimizers`.
        """

    @abstractmethod
    def set_sync(self, module: nn.Module, enabled: bool) -> None:
        """Say whether the next forward and its backward synchronize; `module` is what `apply` returned."""

    def finish(self, module: nn.Module) -> None:  # noqa: B027 - most methods are done with the backward
        """Wait until the gradients of `module`, which `apply` returned, are equal on the replicas."""


def broadcast_from_first(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the parameters and buffers of its first rank."""
    source = dist.get_global_rank(group, 0)
    for tensor in _tensors(module):
        dist.broadcast(tensor.detach(), src=source, group=group)


def broadcast_floating_buffers(module: nn.Module, replicas: Axis) -> None:
    """Give all replicas the floating buffers of the first one, one broadcast for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in module.buffers():
        if buffer.is_floating_point():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        flat = broadcast(torch.cat([buffer.flatten() for buffer in buffers]), replicas.ranks[0], replicas)
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
