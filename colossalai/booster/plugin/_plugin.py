"""The interface of plugins: a plugin says which methods to use, and prepares the data for them."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any
from weakref import WeakSet

from torch.utils.data import Dataset

from colossalai.amp import Precision
from colossalai.context import global_context
from colossalai.runtime import DataParallelLoader, Plan, make_dataloader


class Plugin(ABC):
    """A choice of parallel methods with their options."""

    @abstractmethod
    def plan(self, precision: Precision) -> Plan:
        """Return the plan that this choice stands for.

        Args:
            precision: The precision that Booster was given.
        """

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> DataParallelLoader:
        """Return a loader of this rank's part of a dataset; its batches are on the device of this rank.

        See `colossalai.utils.get_dataloader`, which leaves batches in host memory.

        Args:
            dataset: Any torch dataset.
            batch_size: Samples in a batch of one data-parallel rank.
            shuffle: Whether each epoch has its own order.
            seed: Seed of the orders; the same on every rank.
            drop_last: Leave out what does not fill a batch, or a sample for every rank.
            pin_memory: Copy batches into pinned memory; no effect without an accelerator.
            num_workers: Number of loading processes.
            kwargs: Further arguments of `torch.utils.data.DataLoader`.
        """
        mesh = global_context.mesh
        loader = make_dataloader(
            dataset,
            num_replicas=mesh.axis_size("dp"),
            replica=mesh.axis_rank("dp"),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            device=global_context.device,
            **kwargs,
        )
        self._loaders.add(loader)
        return loader

    def last_dataloader(self) -> DataParallelLoader | None:
        """Return the prepared loader that has handed out a batch last, None if none has."""
        started = (loader for loader in self._loaders if loader.handed_out_ns)
        return max(started, key=lambda loader: loader.handed_out_ns, default=None)

    @cached_property
    def _loaders(self) -> WeakSet[DataParallelLoader]:
        return WeakSet()  # not in __init__, which plugins of the user's own need not call
