"""The ZeRO optimizer under its documented name."""

from colossalai.zero._low_level import LowLevelZeroOptimizer as LowLevelZeroOptimizer
