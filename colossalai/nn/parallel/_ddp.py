"""Replicated data parallelism: torch's `DistributedDataParallel`, or nothing but equal starting weights."""

from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.context import Axis
from colossalai.nn.parallel._data_method import DataMethod, broadcast_from_first


@dataclass(frozen=True, kw_only=True)
class Replicated(DataMethod):
    """Every rank holds the whole model; gradients are averaged in buckets while the backward runs.

    The fields are those of `torch.nn.parallel.DistributedDataParallel`. With one replica the module stays
    bare.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> nn.Module:
        """See the base class."""
        trainable = any(param.requires_grad for param in module.parameters())
        if replicas.size == 1 or not trainable:  # DDP refuses a module without trainable parameters
            return module
        # Only what was chosen is passed: torch warns of some of these names even at their default value.
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        device_ids = None if device.type == "cpu" else [device]
        return DistributedDataParallel(module, device_ids, process_group=replicas.group, **chosen)

    def set_sync(self, module: nn.Module, enabled: bool) -> None:
        """See the base class."""
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = enabled


@dataclass(frozen=True, kw_only=True)
class Unsynchronized(DataMethod):
    """Every rank holds the whole model; somebody else (a gradient handler) makes the gradients equal."""

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> nn.Module:
        """See the base class."""
        broadcast_from_first(module, replicas.group)
        return module

    def set_sync(self, module: nn.Module, enabled: bool) -> None:
        """Nothing to say: no backward synchronizes."""
