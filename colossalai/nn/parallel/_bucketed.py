"""Replicated data parallelism that synchronizes by backward, not by forward.

Torch's `DistributedDataParallel` decides in the forward whether its backward synchronizes. In a pipeline the
forwards of other microbatches lie between a forward and its backward, and a part of the model that never runs
a forward as a whole has no place for a wrapper. Here the gradients are averaged by hooks on the parameters.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn

from colossalai.context import Axis
from colossalai.nn.parallel._arriving import ArrivingParams
from colossalai.nn.parallel._data_method import (
    AppliedDataMethod,
    DataMethod,
    NoSync,
    broadcast_floating_buffers,
    broadcast_from_first,
)
from colossalai.nn.parallel._reducer import GradReducer


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

    in_pipeline: ClassVar[bool | None] = True

    @property
    def label(self) -> str:
        """See the base class."""
        return "DDP"

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be above 0")

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        """See the base class; the children of an `nn.ModuleList` are its parts."""
        if replicas.size == 1:
            return NoSync(module)
        broadcast_from_first(module, replicas)
        parts = list(module) if isinstance(module, nn.ModuleList) else [module]
        reducer = GradReducer(
            parts, replicas, cap_bytes=int(self.bucket_cap_mb * 2**20), overlap=self.overlap
        )
        return _InBuckets(module, reducer, replicas if self.broadcast_buffers else None)


@final
class _InBuckets(AppliedDataMethod):
    """A module whose gradients a reducer averages.

    Args:
        module: The module itself.
        reducer: The reducer.
        buffers_from: Replicas whose first one broadcasts its floating buffers; None: no broadcast.
    """

    def __init__(self, module: nn.Module, reducer: GradReducer, buffers_from: Axis | None) -> None:
        super().__init__(module)
        self._reducer = reducer
        self._buffers_from = buffers_from

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """Set whether the backwards from now on are the last ones before `finish`.

        May be called between a forward and its backward. Until it is called, and after `finish`, they are.
        """
        self._reducer.set_sync(enabled, part=part)

    def finish(self) -> None:
        """Wait until all gradients are averages over the replicas.

        Collective over the replicas. Gradients that have not been averaged yet are, whether the backward
        synchronized or not.
        """
        self._reducer.finish()
        if self._buffers_from is not None:
            broadcast_floating_buffers(self.module, self._buffers_from)
