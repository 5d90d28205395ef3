"""HybridAdam under its older name."""

from colossalai.nn.optimizer._hybrid_adam import HybridAdam
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class CPUAdam(HybridAdam):
    """`HybridAdam`: torch's fused kernels leave nothing that would be special to a CPU."""
