"""Data for data parallelism: each rank along `dp` reads its own part, in an order that the seed fixes.

The position in an epoch is counted in batches that were handed out, not in samples that were prefetched, so
that it can be saved at any moment and a resumed run sees exactly the batches that were left.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from colossalai.logging import get_dist_logger
from colossalai.runtime._epoch import WatchedLoader, length_of, with_last
from colossalai.runtime._gather import InHand


class DataParallelSampler(Sampler[int]):
    """The indices of one replica: a fixed or seeded order of the dataset, dealt out like cards.

    Args:
        dataset: A dataset with a length.
        num_replicas: Number of replicas.
        replica: Number of this one.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders; the same on every replica.
        drop_last: If the length is not a multiple of `num_replicas`: leave the rest out; otherwise the first
            samples stand in for the missing ones, so that all replicas make the same number of steps.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        num_replicas: int,
        replica: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica {replica} of {num_replicas}: it must be from 0 to {num_replicas - 1}")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.replica = replica
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0  # number of this replica's samples to leave out at the beginning of the next pass
        total = len(dataset)  # type: ignore[arg-type]
        self.num_samples = total // num_replicas if drop_last else -(-total // num_replicas)
        if self.num_samples == 0:
            raise ValueError(
                f"the dataset has {total} samples, too few for {num_replicas} data-parallel ranks"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        total = len(self.dataset)  # type: ignore[arg-type]
        order = torch.arange(total)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(total, generator=generator)
        padded = order.repeat(-(-self.num_samples * self.num_replicas // total))
        mine = padded[: self.num_samples * self.num_replicas][self.replica :: self.num_replicas]
        return iter(mine[self.start :].tolist())


class DataParallelLoader(DataLoader[Any]):
    """A `DataLoader` that counts epochs and batches, and can be put back to where it was.

    Every complete pass advances the epoch, and with it the order of a shuffling `DataParallelSampler`; a pass
    that is left early starts again from its beginning.

    Args:
        dataset: The dataset.
        seed: Seed of the workers' random states; every epoch has its own.
        device: Where the tensors of a batch are handed out; None: where the workers made them.
        options: The arguments of `torch.utils.data.DataLoader`.

    Attributes:
        epoch: Number of the present pass.
        batch: Number of batches of it that have been handed out.
        at_last_batch: Whether the batch handed out last is the last one of the pass.
        handed_out_ns: When that was, by a clock that never goes back; 0 before the first one.
    """

    def __init__(
        self, dataset: Dataset[Any], *, seed: int, device: torch.device | None = None, **options: Any
    ) -> None:
        super().__init__(dataset, generator=torch.Generator(), **options)
        self.seed = seed
        self.device = device
        self.handed_out_ns = 0
        self.epoch = 0
        self.batch = 0
        self.at_last_batch = False
        self._resume_at = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.batch, self._resume_at = self._resume_at, 0
        self._prepare_pass()
        length = length_of(self)
        remaining = None if length is None else length - self.batch
        for batch, is_last in with_last(super().__iter__(), remaining):
            self.batch += 1
            self.at_last_batch = is_last
            self.handed_out_ns = time.monotonic_ns()
            yield batch if self.device is None else to_device(batch, self.device)
        self.set_epoch(self.epoch + 1)

    def _prepare_pass(self) -> None:
        self.generator.manual_seed(self.seed + self.epoch)
        if isinstance(self.sampler, DataParallelSampler):
            self.sampler.set_epoch(self.epoch)
            self.sampler.start = self.batch * (self.batch_size or 1)
        elif self.batch > 0:
            raise ValueError(
                "an iterable dataset cannot go on in the middle of an epoch: it has no positions"
            )

    @property
    def reads_all(self) -> bool:
        """Whether every replica reads the whole dataset (`add_sampler=False`)."""
        return isinstance(self.sampler, DataParallelSampler) and self.sampler.num_replicas == 1

    @property
    def in_hand(self) -> InHand | None:
        """The samples of the batch handed out last, after a complete pass those of all of it.

        None before the first batch, and where the dataset has no length.
        """
        if not isinstance(self.sampler, DataParallelSampler) or self.handed_out_ns == 0:
            return None
        size, replicas = self.batch_size or 1, self.sampler.num_replicas
        last = self.batch or len(self)
        start = (last - 1) * size if self.batch else 0
        end = min(last * size, self.sampler.num_samples)
        total = len(self.dataset)  # type: ignore[arg-type]
        return InHand(end - start, min(end * replicas, total) - start * replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the position: the pass, how many of its batches have been handed out, and their size."""
        if self.at_last_batch:  # the consumer has the last batch in hand: what comes next is the next pass
            return {"epoch": self.epoch + 1, "batch": 0, "batch_samples": self._batch_samples}
        return {"epoch": self.epoch, "batch": self.batch, "batch_samples": self._batch_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state_dict` was taken.

        Where batches, taken over all replicas, are of another size now, it goes on with the same sample; if
        that is in the middle of a batch, with the first one of that batch.
        """
        self.set_epoch(state["epoch"])
        samples = state["batch"] * state.get("batch_samples", self._batch_samples)
        batch, again = divmod(samples, self._batch_samples)
        if again:
            get_dist_logger().warning(
                f"a batch has {self._batch_samples} samples over all ranks now, and {samples} of the epoch "
                f"were seen, which is not a multiple: {again} of them will be seen again",
                ranks=[0],
            )
        self.batch = self._resume_at = batch

    @property
    def _batch_samples(self) -> int:
        """Number of samples in a batch of all replicas together."""
        replicas = self.sampler.num_replicas if isinstance(self.sampler, DataParallelSampler) else 1
        return (self.batch_size or 1) * replicas

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be the given one, from its beginning."""
        self.epoch, self.batch, self.at_last_batch = epoch, 0, False


def make_dataloader(
    dataset: Dataset[Any],
    *,
    num_replicas: int,
    replica: int,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    device: torch.device | None = None,
    **kwargs: Any,
) -> DataParallelLoader:
    """Return a loader of one replica's part of a dataset.

    Args:
        dataset: Any torch dataset. An iterable one must divide its samples itself.
        num_replicas: Number of replicas.
        replica: Number of this one.
        batch_size: Samples in a batch of one replica.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders and of the workers' random states; the same on every replica.
        add_sampler: Whether the replicas divide the dataset; False: every replica reads all of it.
        drop_last: Leave out what does not fill a batch, or a sample for every replica.
        pin_memory: Copy batches into pinned memory; no effect without an accelerator.
        num_workers: Number of loading processes.
        device: Where the tensors of a batch are handed out; None: in host memory.
        kwargs: Further arguments of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: A sampler is given beside `add_sampler`, or the dataset is too small.
    """
    if "sampler" in kwargs or "batch_sampler" in kwargs:
        raise ValueError(
            "a sampler of your own cannot divide the data over the ranks: leave it out, or use a DataLoader"
        )
    if not isinstance(dataset, IterableDataset):
        kwargs["sampler"] = DataParallelSampler(
            dataset,
            num_replicas=num_replicas if add_sampler else 1,
            replica=replica if add_sampler else 0,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last and add_sampler,
        )
    elif shuffle:
        raise ValueError("shuffle=True needs a dataset with a length: an iterable one has to shuffle itself")
    return DataParallelLoader(
        dataset,
        seed=seed,
        device=device,
        batch_size=batch_size,
        drop_last=drop_last,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        num_workers=num_workers,
        **kwargs,
    )


def watched(loader: Iterable[Any]) -> DataParallelLoader | WatchedLoader:
    """Return a loader that says which batch is the last of an epoch: itself if it does."""
    return loader if isinstance(loader, DataParallelLoader) else WatchedLoader(loader)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
