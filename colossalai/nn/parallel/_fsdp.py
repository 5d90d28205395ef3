"""Fully sharded data parallelism: torch's FSDP2 (`fully_shard`), which is ZeRO stage 3 (1910.02054)."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from colossalai.context import Axis
from colossalai.nn.parallel._data_method import DataMethod, broadcast_from_first


@dataclass(frozen=True, kw_only=True)
class FullySharded(DataMethod):
    """Every rank holds a slice of each parameter, of its gradient and of its optimizer states.

    Attributes:
        reshard_after_forward: Free a block's gathered parameters after its forward and gather them again in
            the backward; False keeps them, for more memory and less communication.
        cpu_offload: Keep the slices in host memory.
        param_dtype: Gather parameters and compute in this dtype; None: as they are.
        reduce_dtype: Average gradients in this dtype; None: as they are.
    """

    shards_parameters: ClassVar[bool] = True

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, device: torch.device
    ) -> nn.Module:
        """See the base class; the parameters of `module` become DTensors over the replicas."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        broadcast_from_first(module, replicas.group)
        # One dimension, whatever mesh axes it runs along: two would mean shards in one, copies in the other.
        mesh = DeviceMesh.from_group(replicas.group, device.type, mesh_dim_names=(replicas.name,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
        }
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for block in blocks:
            fully_shard(block, **options)
        return cast(nn.Module, fully_shard(module, **options))

    def set_sync(self, module: nn.Module, enabled: bool) -> None:
        """See the base class; without synchronization a rank holds the whole gradient until the next one."""
        from torch.distributed.fsdp import FSDPModule

        cast(FSDPModule, module).set_requires_gradient_sync(enabled)
