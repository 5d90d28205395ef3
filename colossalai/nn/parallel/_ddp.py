"""Replicated data parallelism: torch's `DistributedDataParallel`, or nothing but equal starting weights.

[Note: the order of the first sum]
Where in a bucket a gradient lies decides in which order an all-reduce over three or more ranks adds it up,
and so its last bits. `DistributedDataParallel` lays its buckets out anew after its first backward, in the
order in which that one's gradients came. The first step of a job, and the first one after a checkpoint was
loaded, would then add up in an order of their own. So the reducer gets its first backward here: one from a
zero that depends on every parameter, the last one first, which is the order that torch, too, expects of a
model. The model's own forward is not run; a hook on a parameter sees one gradient of zeros.
"""

from dataclasses import dataclass, fields
from typing import final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.context import Axis
from colossalai.nn.parallel._data_method import (
    AppliedDataMethod,
    DataMethod,
    NoSync,
    broadcast_from_first,
)


@dataclass(frozen=True, kw_only=True)
class Replicated(DataMethod):
    """Every rank holds the whole model; gradients are averaged in buckets while the backward runs.

    The fields are those of `torch.nn.parallel.DistributedDataParallel`. With one replica the module stays
    bare. Gradients are added up in the same order in every step, so that a run which goes on from a
    checkpoint has the same bits; not with `static_graph=True`, whose first two steps torch reduces in an
    order of their own.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def allows_float32_grads(self, replicas: Axis) -> bool:
        """See the base class: `DistributedDataParallel` reduces in the dtype of the parameters only."""
        return replicas.size == 1

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> AppliedDataMethod:
        """See the base class."""
        trainable = any(param.requires_grad for param in module.parameters())
        if replicas.size == 1 or not trainable:  # DDP refuses a module without trainable parameters
            return NoSync(module)
        # Only what was chosen is passed: torch warns of some of these names even at their default value.
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        device_ids = None if device.type == "cpu" else [device]
        applied = DistributedDataParallel(module, device_ids, process_group=replicas.group, **chosen)
        # With find_unused_parameters torch never lays the buckets out anew. A static graph is what the first
        # backward finds, which must be one of the model.
        if not self.find_unused_parameters and not self.static_graph:
            _settle_buckets(applied)
        return _Averaging(applied)


@final
class _Averaging(AppliedDataMethod):
    """A module whose backwards average its gradients, the forward before saying whether."""

    module: DistributedDataParallel

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """See the base class."""
        self.module.require_backward_grad_sync = enabled


@dataclass(frozen=True, kw_only=True)
class Unsynchronized(DataMethod):
    """Every rank holds the whole model; somebody else (a gradient handler) makes the gradients equal."""

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> AppliedDataMethod:
        """See the base class."""
        broadcast_from_first(module, replicas.group)
        return NoSync(module)


class _Zero(nn.Module):
    """Zero as a function of the trainable parameters of a module; its backward reaches the last one first.

    Args:
        module: The module, which is not called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        lookups = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
        self._sparse = {part.weight for part in lookups if part.sparse}

    def forward(self, device: torch.device) -> torch.Tensor:
        """Return the zero, on a device."""
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        total = torch.zeros((), device=device)
        for param in self.module.parameters():
            if param.requires_grad:
                is_sparse = param in self._sparse
                none = nn.functional.embedding(nothing, param, sparse=True) if is_sparse else param[None][:0]
                total = total + none.sum().abs()  # a real number, whatever the parameter is
        return total


def _settle_buckets(applied: DistributedDataParallel) -> None:
    """Let the reducer see a backward before the first step; see [Note: the order of the first sum].

    Collective over the replicas: one all-reduce of the size of the gradients.
    """
    grads = {param: param.grad for param in applied.parameters()}
    module, applied.module = applied.module, _Zero(applied.module)
    try:
        with torch.enable_grad():
            # The next forward, that of the first step, finds the order and lays out the buckets.
            applied(next(module.parameters()).device).backward()
    finally:
        applied.module = module
    for param, grad in grads.items():
        param.grad = grad
