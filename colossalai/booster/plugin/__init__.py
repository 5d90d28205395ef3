"""Plugins of a Booster: choices of parallel methods."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.booster.plugin._auto import AutoPlugin as AutoPlugin
from colossalai.booster.plugin._gemini import GeminiPlugin as GeminiPlugin
from colossalai.booster.plugin._hybrid_parallel import HybridParallelPlugin as HybridParallelPlugin
from colossalai.booster.plugin._low_level_zero import LowLevelZeroPlugin as LowLevelZeroPlugin
from colossalai.booster.plugin._plugin import DataMethodPlugin as DataMethodPlugin
from colossalai.booster.plugin._plugin import Plugin as Plugin
from colossalai.booster.plugin._torch_ddp import TorchDDPPlugin as TorchDDPPlugin
from colossalai.booster.plugin._torch_fsdp import TorchFSDPPlugin as TorchFSDPPlugin

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that do not exist yet
