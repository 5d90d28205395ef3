"""Replicated data parallelism whose backwards are told when to synchronize, not its forwards.

Torch's `DistributedDataParallel` decides in the forward whether its backward synchronizes. In a pipeline the
forwards of other microbatches lie between a forward and its backward, and a part of the model that never runs
a forward as a whole has no place for a wrapper. Here the gradients are averaged by hooks on the parameters.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn

from colossalai.context import Axis
from colossalai.nn.parallel._data_method import (
    DataMethod,
    broadcast_floating_buffers,
    broadcast_from_first,
)
from colossalai.nn.parallel._reducer import GradReducer


@dataclass(frozen=True)
class _Handle:
    """What a module, or a part of one, is to its reducer."""

    reducer: GradReducer
    replicas: Axis
    part: int | None = None


@dataclass(frozen=True, kw_only=True)
class Bucketed(DataMethod):
    """Every rank holds the whole model; gradients are averaged in flat buckets while the backward runs.

    Each rank sends its gradients once per `finish`, and one more element for every parameter. A parameter
    that has a gradient on no replica stays without.

    Attributes:
        bucket_cap_mb: Size of a bucket in MB (1024 * 1024 bytes).
        overlap: Average during the last backward; False: in `finish`.
        broadcast_buffers: Give all replicas the floating buffers of the first one in `finish`.
    """

    bucket_cap_mb: float = 25.0
    overlap: bool = True
    broadcast_buffers: bool = True
    _handles: WeakKeyDictionary[nn.Module, _Handle] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be above 0")

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> nn.Module:
        """See the base class; `module` itself is returned.

        The children of an `nn.ModuleList` are its parts: `set_sync` can be called for each of them.
        """
        if replicas.size == 1:
            return module
        broadcast_from_first(module, replicas.group)
        parts = list(module) if isinstance(module, nn.ModuleList) else [module]
        reducer = GradReducer(
            parts, replicas, cap_bytes=int(self.bucket_cap_mb * 2**20), overlap=self.overlap
        )
        for number, part in enumerate(parts):
            self._handles[part] = _Handle(reducer, replicas, number)
        self._handles[module] = _Handle(reducer, replicas)
        return module

    def set_sync(self, module: nn.Module, enabled: bool) -> None:
        """Say whether the backwards from now on are the last ones before `finish`.

        May be called between a forward and its backward. Until it is called, and after `finish`, they are.

        Args:
            module: What `apply` returned; to switch on, also one of its parts.
            enabled: Whether they are.
        """
        handle = self._handles.get(module)
        if handle is not None:
            handle.reducer.set_sync(enabled, part=handle.part)

    def finish(self, module: nn.Module) -> None:
        """Wait until all gradients of `module`, which `apply` returned, are averages over the replicas.

        Collective over the replicas. Gradients that have not been averaged yet are, whether the backward
        synchronized or not.
        """
        handle = self._handles.get(module)
        if handle is None:
            return
        handle.reducer.finish()
        if self.broadcast_buffers:
            broadcast_floating_buffers(module, handle.replicas)
