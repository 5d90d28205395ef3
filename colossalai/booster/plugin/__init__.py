"""Choices of parallel methods for Booster."""

from colossalai.booster.plugin._hybrid_parallel import HybridParallelPlugin as HybridParallelPlugin
from colossalai.booster.plugin._low_level_zero import LowLevelZeroPlugin as LowLevelZeroPlugin
from colossalai.booster.plugin._plugin import Plugin as Plugin
from colossalai.booster.plugin._torch_ddp import TorchDDPPlugin as TorchDDPPlugin
from colossalai.booster.plugin._torch_fsdp import TorchFSDPPlugin as TorchFSDPPlugin
