"""Plugin of torch's FSDP2: one model sharded over all ranks."""

from collections.abc import Sequence

import torch

from colossalai.booster.plugin._plugin import DataMethodPlugin
from colossalai.context import names_arguments
from colossalai.nn.parallel import FullySharded


class TorchFSDPPlugin(DataMethodPlugin):
    """Shards parameters, gradients and optimizer states with torch's FSDP2 (`fully_shard`).

    The members of the model's block stacks are sharded one by one, so that one block at a time is whole.
    Optimizers with several parameter groups work; boost an optimizer before its first step. `Booster.boost`
    refuses models that cannot be sharded (docs/features/zero.md). All ranks must run the same blocks in the
    same order: control flow that differs by rank trains wrongly, a limit of torch's FSDP.

    Args:
        reshard_after_forward: Free a block's gathered parameters after its forward and gather them again in
            the backward.
        cpu_offload: Keep the slices in host memory.
        param_dtype: Gather parameters and compute in this dtype; None: as they are.
        reduce_dtype: Average gradients in this dtype; None: as they are.
        recompute: Checkpoint activations: True for the model's blocks, names of sub-modules, or one name.
    """

    @names_arguments
    def __init__(
        self,
        *,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        recompute: bool | str | Sequence[str] = False,
    ) -> None:
        method = FullySharded(
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
        )
        super().__init__(method, recompute=recompute)
