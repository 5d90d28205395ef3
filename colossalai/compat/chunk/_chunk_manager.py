"""Chunk sizes and a placement policy as values, which documented scripts carry to `ZeroDDP`.

They hold no chunks: the model that `ZeroDDP` returns does.
"""

from typing import Any

import torch
from torch import nn

from colossalai.zero.gemini import (
    DEFAULT_INTERVAL,
    MB,
    PLACEMENT_POLICIES,
    ChunkSizes,
    GeminiOptions,
    search_chunk_configuration,
)

_ON_HOST = ("cpu", "const", "auto", "nvme")


class ChunkManager:
    """The sizes of chunks.

    Args:
        chunk_size: Number of elements of a chunk; it is rounded up to a multiple of the ranks. Or the sizes
            that are tried.
        process_group: Not taken: chunks are cut over the data-parallel ranks of the launched job.
        enable_distributed_storage: Whether chunks are cut; they always are.
        init_device: Not needed: the placement policy of `GeminiManager` places sections.
        filters_outliers: Whether parameters that are outliers in size have chunks of their own.

    Attributes:
        sizes: The sizes that are tried.
        filters_outliers: As given.

    Raises:
        ValueError: `chunk_size` is not a positive number of elements, `process_group` is given, or
            `enable_distributed_storage` is False.
    """

    def __init__(
        self,
        chunk_size: int | ChunkSizes,
        process_group: Any = None,
        enable_distributed_storage: bool = True,
        init_device: torch.device | str | int | None = None,
        *,
        filters_outliers: bool = True,
    ) -> None:
        is_number = isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size > 0
        if not is_number and not isinstance(chunk_size, ChunkSizes):
            raise ValueError(
                f"chunk_size is {chunk_size!r}; it must be a number of elements, from 1 on, such as "
                "ChunkManager.search_chunk_size(model, 64 * 1024**2, 32) returns"
            )
        if process_group is not None:
            raise ValueError(
                "process_group is given, and chunks are cut over the data-parallel ranks that the launch has "
                "laid out: leave it out"
            )
        if enable_distributed_storage is not True:
            raise ValueError(
                "enable_distributed_storage=False would keep all chunks whole on every rank: take "
                "TorchDDPPlugin or LowLevelZeroPlugin for that"
            )
        self.sizes = chunk_size if isinstance(chunk_size, ChunkSizes) else ChunkSizes(chunk_size, 0, 1)
        self.init_device = init_device
        self.filters_outliers = filters_outliers

    @staticmethod
    def search_chunk_size(model: nn.Module, search_range: int, n_grids: int) -> int:
        """Return the number of elements of a chunk that wastes least; the largest of several kinds.

        Args:
            model: The model; its parameters need no memory.
            search_range: The largest size that is tried, in elements.
            n_grids: Number of sizes that are tried, at equal distances.

        Raises:
            ValueError: `search_range` or `n_grids` is not a positive integer, or there are fewer elements
                than sizes.
        """
        for name, value in (("search_range", search_range), ("n_grids", n_grids)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer, from 1 on")
        step = search_range // n_grids
        if step < 1:
            raise ValueError(
                f"search_range is {search_range} elements and n_grids {n_grids}: give a range of at least as "
                "many elements as sizes, such as 64 * 1024**2 and 32"
            )
        groups, _, _ = search_chunk_configuration(
            model, (search_range - step) / MB, step, min_chunk_size_mb=step / MB
        )
        return max((group.packing.chunk_size for group in groups), default=step)


class GeminiManager:
    """Sizes and placement of chunks.

    Args:
        placement_policy: "cuda", "cpu", "const", "auto" or "nvme"; see `GeminiDDP`.
        chunk_manager: The sizes.
        memstats: Not taken: the first iteration is recorded.

    Attributes:
        placement_policy: As given.
        chunk_manager: As given.

    Raises:
        ValueError: `placement_policy` is unknown, `chunk_manager` is not a `ChunkManager`, or `memstats` is
            given.
    """

    def __init__(self, placement_policy: str, chunk_manager: ChunkManager, memstats: Any = None) -> None:
        if not isinstance(chunk_manager, ChunkManager):
            raise ValueError(
                f"chunk_manager is a {type(chunk_manager).__name__}: give a ChunkManager, such as "
                "init_chunk_manager(model, ...) returns"
            )
        GeminiOptions(memstats=memstats)  # refuses an unsupported value
        _check_policy(placement_policy)
        self.placement_policy = placement_policy
        self.chunk_manager = chunk_manager

    @staticmethod
    def get_default_device(placement_policy: str) -> torch.device:
        """Return where sections of chunks lie under a policy, before an iteration has been recorded.

        Raises:
            ValueError: `placement_policy` is unknown.
        """
        _check_policy(placement_policy)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if placement_policy in _ON_HOST or accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check_policy(name: object) -> None:
    if name not in PLACEMENT_POLICIES:
        raise ValueError(f"placement_policy is {name!r}; it must be one of {', '.join(PLACEMENT_POLICIES)}")


def init_chunk_manager(
    model: nn.Module,
    init_device: torch.device | str | int | None = None,
    hidden_dim: int | None = None,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
) -> ChunkManager:
    """Return the sizes among which `ZeroDDP` searches the least wasteful for a model.

    Args:
        model: The model.
        init_device: Not needed, see `ChunkManager`.
        hidden_dim: The step between sizes, in elements; default 1024.
        search_range_mb: Range of sizes above `min_chunk_size_mb`, in MB of 2**20 elements.
        min_chunk_size_mb: The least size, in MB of 2**20 elements.
        filter_exlarge_params: Whether parameters that are outliers in size have chunks of their own.
        strict_ddp_flag: Whether parameters that tensor parallelism has cut are refused.

    Raises:
        ValueError: A number is out of its range, or, with `strict_ddp_flag`, `model` has a parameter that is
            cut.
    """
    interval = DEFAULT_INTERVAL if hidden_dim is None else hidden_dim
    search_chunk_configuration(  # checks the arguments; the ranks are unknown here
        model, search_range_mb, interval, min_chunk_size_mb, filter_exlarge_params, strict_ddp_flag
    )
    sizes = ChunkSizes.in_mb(search_range_mb, interval, min_chunk_size_mb)
    return ChunkManager(sizes, init_device=init_device, filters_outliers=filter_exlarge_params)
