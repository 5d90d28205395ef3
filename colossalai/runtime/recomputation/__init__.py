"""Activation checkpointing of blocks, named parts, and segments of blocks that are recomputed together."""

from colossalai.runtime.recomputation._recompute import apply_recompute as apply_recompute
from colossalai.runtime.recomputation._recompute import find_blocks as find_blocks
from colossalai.runtime.recomputation._recompute import removable_recompute as removable_recompute
from colossalai.runtime.recomputation._segments import RecomputeHandle as RecomputeHandle
from colossalai.runtime.recomputation._segments import RecomputeSegment as RecomputeSegment
from colossalai.runtime.recomputation._segments import Segments as Segments
from colossalai.runtime.recomputation._segments import parts_of as parts_of
