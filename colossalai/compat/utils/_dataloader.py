"""Loaders and samplers for the launched job."""

from typing import Any

from torch.utils.data import Dataset

from colossalai import runtime
from colossalai.context import global_context


class DataParallelSampler(runtime.DataParallelSampler):
    """The indices of this rank's part of a dataset.

    Args:
        dataset: A dataset with a length.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders; the same on every rank.
        drop_last: Leave out the rest that does not give every data-parallel rank a sample; otherwise the
            first samples are repeated as padding.
    """

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 1024, drop_last: bool = False
    ) -> None:
        mesh = global_context.mesh
        super().__init__(
            dataset,
            num_replicas=mesh.axis_size("dp"),
            replica=mesh.axis_rank("dp"),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    *,
    batch_size: int | None = 1,
    **kwargs: Any,
) -> runtime.DataParallelLoader:
    """Return a loader of this rank's part of a dataset.

    The order depends on `seed` and the epoch alone. `state_dict()` and `load_state_dict()` save and restore
    the position in an epoch; each complete pass advances the epoch.

    Args:
        dataset: Any torch dataset. A stream (`IterableDataset`) is read whole by every rank and worker, which
            take their samples in turn: it must yield the same ones in the same order everywhere. A
            `set_epoch` that it has is called before each pass.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders and of the workers' random states; the same on every rank.
        add_sampler: Whether the data-parallel ranks divide the dataset; False: every rank reads all of it,
            for streams that divide themselves.
        drop_last: Leave out an incomplete batch, or samples for some ranks only; otherwise the first samples
            are repeated as padding.
        pin_memory: Copy batches into pinned memory; no effect without an accelerator.
        num_workers: Number of loading processes.
        batch_size: Samples in a batch of one rank; None: each sample is a batch.
        kwargs: Further arguments of `torch.utils.data.DataLoader`.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: A sampler is given, the dataset is too small, or it is a stream that divides itself
            already.
    """
    mesh = global_context.mesh
    return runtime.make_dataloader(
        dataset,
        num_replicas=mesh.axis_size("dp"),
        replica=mesh.axis_rank("dp"),
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        add_sampler=add_sampler,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        replicas_now=_replicas_now,
        **kwargs,
    )


def _replicas_now() -> int | None:
    return global_context.mesh.axis_size("dp") if global_context.is_launched else None
