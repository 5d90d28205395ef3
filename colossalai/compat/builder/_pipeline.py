"""The part of a model that this rank holds, by the pipeline of the current job."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from colossalai.compat.builder._config import build_module
from colossalai.context import ParallelMode, global_context
from colossalai.pipeline.stages import PartitionMethod, cut_sequential
from colossalai.pipeline.stages import partition_balanced as partition_balanced
from colossalai.pipeline.stages import partition_uniform as partition_uniform


def build_pipeline_model(layers: nn.Sequential, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Return the layers that this rank holds, split evenly by their number.

    Args:
        layers: The whole model.
        num_chunks: Number of chunks on each rank.
        verbose: Whether each rank logs which layers it holds.

    Returns:
        An `nn.Sequential`, or several as a `ChunkList`; layers keep their numbers in the whole model.

    Raises:
        ValueError: `layers` is no `nn.Sequential`, or has fewer layers than there are parts.
    """
    return _own_part(layers, num_chunks=num_chunks, method="uniform", verbose=verbose)


def build_pipeline_model_from_cfg(
    config: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    num_chunks: int = 1,
    partition_method: PartitionMethod = "balanced",
    verbose: bool = False,
) -> nn.Module:
    """Build a model from a config and return the layers that this rank holds.

    Args:
        config: The layers, each `dict(type=..., ...)` with a name known to `LAYERS` or `MODELS` (those of
            `torch.nn` are) and its arguments; or one such entry that builds an `nn.Sequential`.
        num_chunks: Number of chunks on each rank.
        partition_method: "balanced" splits by parameters, "uniform" by the number of layers.
        verbose: Whether each rank logs which layers it holds.

    Returns:
        An `nn.Sequential`, or several as a `ChunkList`; layers keep their numbers in the whole model.

    Raises:
        ValueError: An entry names nothing that can be built, or there are fewer layers than parts.
    """
    if isinstance(config, Mapping):
        layers = build_module(config)
    else:
        layers = nn.Sequential(*(build_module(entry) for entry in config))
    return _own_part(layers, num_chunks=num_chunks, method=partition_method, verbose=verbose)


def _own_part(layers: Any, *, num_chunks: int, method: PartitionMethod, verbose: bool) -> nn.Module:
    size, rank = 1, 0
    if global_context.is_initialized(ParallelMode.PIPELINE):
        size = global_context.get_world_size(ParallelMode.PIPELINE)
        rank = global_context.get_local_rank(ParallelMode.PIPELINE)
    return cut_sequential(layers, num_chunks=num_chunks, size=size, rank=rank, method=method, verbose=verbose)
