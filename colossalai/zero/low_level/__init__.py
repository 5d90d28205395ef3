"""The ZeRO optimizer under its documented name."""

from colossalai.zero._wrappers import LowLevelZeroOptimizer as LowLevelZeroOptimizer
