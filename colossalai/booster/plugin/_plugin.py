"""Interface of plugins: a plugin returns a plan of methods, and makes their dataloaders."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

from torch.utils.data import Dataset

from colossalai.amp import FullPrecision, Precision
from colossalai.context import global_context, relayout
from colossalai.nn.parallel import DataMethod
from colossalai.runtime import DataParallelLoader, Plan, make_dataloader


class Plugin(ABC):
    """A choice of parallel methods with their options. Making one has no effect; see `configure`."""

    @abstractmethod
    def plan(self, precision: Precision) -> Plan:
        """Return the plan of this choice.

        Args:
            precision: The precision given to Booster.
        """

    def configure(self) -> None:
        """Lay out the mesh of the launched job for the plan; `Booster(plugin=...)` calls it, too.

        Call it yourself if layers that depend on the mesh are built before the Booster. A second call has no
        effect, nor has a plan without a layout: the layout of the launch is kept.

        Raises:
            RuntimeError: The job has not been launched.
            ConfigException: The sizes do not fit the number of processes, or the job has other sizes already.
        """
        layout = self.plan(FullPrecision()).layout
        if layout is not None:
            relayout(layout)

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
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
            dataset: Any torch dataset, streams (`IterableDataset`) too.
            batch_size: Samples in a batch of one data-parallel rank; None: each sample is a batch.
            shuffle: Whether to shuffle the samples anew for each epoch.
            seed: Seed of the orders; the same on every rank.
            drop_last: Drop samples that do not fill a batch, or do not give a sample to every rank.
            pin_memory: Copy batches into pinned memory; no effect without an accelerator.
            num_workers: Number of loading processes.
            kwargs: Further arguments of `torch.utils.data.DataLoader`; `add_sampler=False` for a stream that
                divides itself.

        Raises:
            ValueError: The mesh, which determines the samples of each rank, has not been laid out yet.
        """
        mesh, layout = global_context.mesh, self.plan(FullPrecision()).layout
        if layout is not None and layout.over(mesh.world_size) != global_context.layout:
            raise ValueError(
                f"{type(self).__name__} has not laid the mesh out yet, which determines the samples of "
                "each rank: make Booster(plugin=...) before, or call plugin.configure()"
            )
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
            replicas_now=_replicas_now,
            **kwargs,
        )
        self._loaders.add(loader)
        return loader

    def last_dataloader(self) -> DataParallelLoader | None:
        """Return the prepared loader that returned a batch last, or None."""
        started = (loader for loader in self._loaders if loader.handed_out_ns)
        return max(started, key=lambda loader: loader.handed_out_ns, default=None)

    @cached_property
    def _loaders(self) -> WeakSet[DataParallelLoader]:
        return WeakSet()  # not in __init__, which users' plugins need not call


class DataMethodPlugin(Plugin):
    """Trains with a data method: one of `colossalai.nn.parallel`, or your own subclass of `DataMethod`.

    A plugin of its own, such as `TorchDDPPlugin`, gives the options of a method documented names.

    Args:
        method: The data method with its options.
        recompute: Checkpoint activations: True for the model's blocks, names of sub-modules, or one name.

    Raises:
        ValueError: `method` is not a `DataMethod`.
    """

    def __init__(self, method: DataMethod, *, recompute: bool | str | Sequence[str] = False) -> None:
        if not isinstance(method, DataMethod):
            raise ValueError(
                f"method is a {type(method).__name__}; it must be a DataMethod, such as Replicated() of "
                "colossalai.nn.parallel"
            )
        self.method = method
        self.recompute = recompute

    def plan(self, precision: Precision) -> Plan:
        """See the base class."""
        return Plan(data=self.method, precision=precision, recompute=self.recompute)


def _replicas_now() -> int | None:
    return global_context.mesh.axis_size("dp") if global_context.is_launched else None
