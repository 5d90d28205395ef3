"""The part of an `nn.Sequential` that a rank holds; layers keep their numbers."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.pipeline._chunks import as_model
from colossalai.pipeline._partition import (
    Part,
    parameter_weights,
    partition_balanced,
    partition_uniform,
)

PartitionMethod = Literal["uniform", "balanced"]


def cut_sequential(
    layers: nn.Sequential,
    *,
    num_chunks: int,
    size: int,
    rank: int,
    method: PartitionMethod = "uniform",
    verbose: bool = False,
) -> nn.Module:
    """Return the chunks of a rank, an `nn.Sequential` each; layer 5 is called "5" on whatever rank.

    Args:
        layers: The whole model.
        num_chunks: Number of chunks on each rank; several are returned as a `ChunkList`.
        size: Number of pipeline ranks.
        rank: The pipeline rank.
        method: "uniform" by the number of layers, or "balanced" by their parameters.
        verbose: Whether each rank logs what it holds.

    Raises:
        ValueError: It is no `nn.Sequential`, it has fewer layers than there are parts, or there is no such
            method.
    """
    if not isinstance(layers, nn.Sequential):
        raise ValueError(
            f"a {type(layers).__name__} is not an nn.Sequential: build it as one, or cut it with "
            "PipelinableContext, or by hand"
        )
    parts = parts_by(method, list(layers), num_chunks=num_chunks, size=size)[rank]
    if verbose:
        log_parts(parts, len(layers), rank=rank)
    named = list(layers._modules.items())  # not named_children(): a layer may stand there twice
    return as_model([nn.Sequential(OrderedDict(named[start:end])) for start, end in parts])


def parts_by(
    method: str, layers: Sequence[nn.Module], *, num_chunks: int, size: int
) -> list[list[tuple[int, int]]]:
    """Split layers by a named method; return the parts of each rank.

    Raises:
        ValueError: There is no such method, or there are fewer layers than parts.
    """
    if method == "uniform":
        return partition_uniform(len(layers), size, num_chunks)
    if method == "balanced":
        return partition_balanced(parameter_weights(layers), size, num_chunks)
    raise ValueError(f"the partition method is {method!r}; it must be 'uniform' or 'balanced'")


def log_parts(parts: Sequence[Part], num_layers: int, *, rank: int) -> None:
    """Log which layers a rank holds."""
    held = ", ".join(f"{start}-{end - 1}" for start, end in parts)
    get_dist_logger().info(f"pipeline rank {rank} holds layers {held} of {num_layers}")
