"""Data for data parallelism: each rank along `dp` reads its own part, in an order that the seed fixes.

The position in an epoch is counted in batches that were returned, not in samples that were prefetched, so
that it can be saved at any moment and a resumed run gets exactly the remaining batches.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from colossalai.context import random_state, set_random_state
from colossalai.logging import get_dist_logger
from colossalai.runtime._epoch import WatchedLoader, length_of, with_last
from colossalai.runtime._gather import LastBatch
from colossalai.runtime.streams import DealtBatch, StreamShard, dealing_loader, refuse_divided


class DataParallelSampler(Sampler[int]):
    """The indices of one replica: a fixed or seeded order of the dataset, dealt round robin.

    Args:
        dataset: A dataset with a length.
        num_replicas: Number of replicas.
        replica: Index of this one.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders; the same on every replica.
        drop_last: If the length is not a multiple of `num_replicas`: drop the rest; otherwise the first
            samples are repeated, so that all replicas make the same number of steps.
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
        self.start = 0  # number of this replica's samples to skip at the beginning of the next pass
        total = len(dataset)  # type: ignore[arg-type]
        self.num_samples = total // num_replicas if drop_last else -(-total // num_replicas)
        if self.num_samples == 0:
            raise ValueError(
                f"the dataset has {total} samples, too few for {num_replicas} data-parallel ranks"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the order of the next pass."""
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


@runtime_checkable
class _HasEpochs(Protocol):
    """A dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None: ...


class DataParallelLoader(DataLoader[Any]):
    """A `DataLoader` that counts epochs and batches, and can resume at a saved position.

    Every complete pass advances the epoch, and with it the order of a shuffling `DataParallelSampler`; a pass
    that is stopped early starts again from its beginning.

    Args:
        dataset: The dataset.
        seed: Seed of the workers' random states; every epoch has its own.
        device: Device of the returned tensors; None: the device on which the workers made them.
        shard: This replica's part of a stream; None: the dataset divides itself, or has a sampler.
        replicas_now: Returns the number of replicas of the job when a pass begins, None after its end.
        options: The arguments of `torch.utils.data.DataLoader`.

    Attributes:
        epoch: Number of the present pass.
        batch: Number of batches of it that have been returned.
        at_last_batch: Whether the last returned batch is the last one of the pass.
        handed_out_ns: Time of that batch, by a monotonic clock; 0 before the first one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        seed: int,
        device: torch.device | None = None,
        shard: StreamShard | None = None,
        replicas_now: Callable[[], int | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, generator=torch.Generator(), **options)
        self.seed = seed
        self.device = device
        self.handed_out_ns = 0
        self.epoch = 0
        self.batch = 0
        self.at_last_batch = False
        self._resume_at = 0
        self._shard = shard
        self._replicas_now = replicas_now
        self._dealing: DataLoader[Any] | None = None  # kept if its workers persist
        self._dealt = self._dealt_in_pass = LastBatch(0, 0)
        self._fills_within = False  # whether a batch of this pass before the last one repeated samples

    def __len__(self) -> int:
        if self._shard is None:
            return super().__len__()
        total, replicas = len(self.dataset), self._shard.num_replicas  # type: ignore[arg-type]
        samples = total // replicas if self._shard.drop_last else -(-total // replicas)
        size = self.batch_size or 1
        return samples // size if self.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.batch, self._resume_at = self._resume_at, 0
        self._prepare_pass()
        # Workers whose streams divide themselves can form more batches than the length.
        length = length_of(self) if self._shard is None or self.num_workers == 0 else None
        remaining = None if length is None else length - self.batch
        batches = super().__iter__() if self._shard is None else self._dealt_batches(self._shard)
        for batch, is_last in with_last(batches, remaining):
            if isinstance(batch, DealtBatch):
                batch = self._count_dealt(batch)
            self.batch += 1
            self.at_last_batch = is_last
            self.handed_out_ns = time.monotonic_ns()
            yield batch if self.device is None else to_device(batch, self.device)
        self.set_epoch(self.epoch + 1)

    def _prepare_pass(self) -> None:
        now = None if self._replicas_now is None else self._replicas_now()
        if now is not None and self.num_replicas not in (None, 1, now):
            get_dist_logger().log_once(
                f"this dataloader divides samples among {self.num_replicas} ranks, and the mesh has been "
                f"laid out anew since, with {now} data-parallel ranks: models that were boosted afterwards "
                "need a loader that was made afterwards",
                ranks=[0],
            )
        self.generator.manual_seed(self.seed + self.epoch)
        if isinstance(self.sampler, DataParallelSampler):
            self.sampler.set_epoch(self.epoch)
            self.sampler.start = self.batch * (self.batch_size or 1)
        elif self._shard is not None:
            self._dealt_in_pass, self._fills_within = LastBatch(0, 0), False
            if isinstance(self.dataset, _HasEpochs):
                self.dataset.set_epoch(self.epoch)
        elif self.batch > 0:
            raise ValueError(
                "an iterable dataset that divides itself (add_sampler=False) cannot go on in the middle of "
                "an epoch: it has no positions"
            )

    def _dealt_batches(self, shard: StreamShard) -> Iterator[DealtBatch]:
        """Return the batches of a stream from the position on: earlier ones are read and dropped."""
        if self._dealing is None or not self.persistent_workers:
            self._dealing = dealing_loader(self, shard)
        batches = iter(self._dealing)
        if self.batch > 0:
            state = random_state()  # restored with the position: the skipped batches have drawn already
            for _ in islice(batches, self.batch):
                pass
            set_random_state(state)
        yield from batches

    def _count_dealt(self, dealt: DealtBatch) -> Any:
        """Count the samples of a returned batch, and return the batch."""
        assert self._shard is not None
        before = self._dealt_in_pass
        self._fills_within |= before.of_all < before.of_replica * self._shard.num_replicas
        self._dealt = LastBatch(dealt.of_replica, dealt.of_all)
        self._dealt_in_pass = LastBatch(before.of_replica + dealt.of_replica, before.of_all + dealt.of_all)
        return dealt.batch

    @property
    def num_replicas(self) -> int | None:
        """Number of replicas that divide the samples; None if the dataset divides itself."""
        if self._shard is not None:
            return self._shard.num_replicas
        return self.sampler.num_replicas if isinstance(self.sampler, DataParallelSampler) else None

    @property
    def reads_all(self) -> bool:
        """Whether every replica reads the whole dataset (`add_sampler=False`)."""
        return isinstance(self.sampler, DataParallelSampler) and self.sampler.num_replicas == 1

    @property
    def last_batch(self) -> LastBatch | None:
        """The samples of the last returned batch; after a complete pass, of all batches.

        None before the first batch, and if an iterable dataset divides itself.

        Raises:
            ValueError: The pass is over, and samples were repeated in the middle of it, as several workers'
                streams ended: only single batches can be gathered.
        """
        if self._shard is not None and self.handed_out_ns:
            if self.batch == 0 and self._fills_within:
                raise ValueError(
                    "this stream divides itself over workers, so samples replace missing ones within "
                    "the pass: gather each batch by itself, in the loop"
                )
            return self._dealt if self.batch else self._dealt_in_pass
        if not isinstance(self.sampler, DataParallelSampler) or self.handed_out_ns == 0:
            return None
        size, replicas = self.batch_size or 1, self.sampler.num_replicas
        last = self.batch or len(self)
        start = (last - 1) * size if self.batch else 0
        end = min(last * size, self.sampler.num_samples)
        total = len(self.dataset)  # type: ignore[arg-type]
        return LastBatch(end - start, min(end * replicas, total) - start * replicas)

    @property
    def read_position(self) -> Any:
        """The counts of this loader; a reader ahead of the loop sets those after the batch of the loop."""
        counts = self.epoch, self.batch, self.at_last_batch
        return *counts, self._dealt, self._dealt_in_pass, self._fills_within

    @read_position.setter
    def read_position(self, value: Any) -> None:
        self.epoch, self.batch, self.at_last_batch, *dealt = value
        self._dealt, self._dealt_in_pass, self._fills_within = dealt
        self.handed_out_ns = time.monotonic_ns()

    def state_dict(self) -> dict[str, int]:
        """Return the position: the pass, the number of its returned batches, and their size."""
        if self.at_last_batch:  # the consumer has the last batch: the next one belongs to the next pass
            return {"epoch": self.epoch + 1, "batch": 0, "batch_samples": self._batch_samples}
        return {"epoch": self.epoch, "batch": self.batch, "batch_samples": self._batch_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass continue at the position of `state_dict`.

        If the batch size over all replicas has changed, it continues with the same sample; if that is in the
        middle of a batch, with the first one of that batch.
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
        return (self.batch_size or 1) * (self.num_replicas or 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the given one, from its beginning."""
        self.epoch, self.batch, self.at_last_batch = epoch, 0, False


def make_dataloader(
    dataset: Dataset[Any],
    *,
    num_replicas: int,
    replica: int,
    batch_size: int | None = 1,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    device: torch.device | None = None,
    replicas_now: Callable[[], int | None] | None = None,
    **kwargs: Any,
) -> DataParallelLoader:
    """Return a loader of one replica's part of a dataset.

    Args:
        dataset: Any torch dataset. A stream (`IterableDataset`) must yield the same samples in the same order
            on every replica and worker; its `set_epoch`, if any, is called before each pass.
        num_replicas: Number of replicas.
        replica: Index of this one.
        batch_size: Samples in a batch of one replica; None: each sample is a batch.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders and of the workers' random states; the same on every replica.
        add_sampler: Whether the replicas divide the dataset; False: every replica reads all of it, for
            streams that divide themselves.
        drop_last: Drop samples that do not fill a batch, or do not give a sample to every replica.
        pin_memory: Copy batches into pinned memory; no effect without an accelerator.
        num_workers: Number of loading processes.
        device: Device of the returned tensors; None: host memory.
        replicas_now: Returns the number of replicas of the job when a pass begins, None after its end.
        kwargs: Further arguments of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: `kwargs` has a sampler in addition to `add_sampler`, the dataset is too small, or it is a
            stream that divides itself already.
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
    elif add_sampler:
        refuse_divided(dataset)
        kwargs["shard"] = StreamShard(
            dataset,
            num_replicas=num_replicas,
            replica=replica,
            batch_size=batch_size,
            drop_last=drop_last,
        )
        if num_replicas > 1:
            get_dist_logger().log_once(
                f"the loader divides this stream over {num_replicas} data-parallel ranks, each of which "
                "reads all of it; a stream that divides itself needs add_sampler=False",
                level="INFO",
                ranks=[0],
            )
    return DataParallelLoader(
        dataset,
        seed=seed,
        device=device,
        replicas_now=replicas_now,
        batch_size=batch_size,
        drop_last=drop_last,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        num_workers=num_workers,
        **kwargs,
    )


def watched(loader: Iterable[Any]) -> DataParallelLoader | WatchedLoader:
    """Return a loader that marks the last batch of an epoch: the given one if it does."""
    return loader if isinstance(loader, DataParallelLoader) else WatchedLoader(loader)


def divided_among(loader: object) -> int | None:
    """Return the number of replicas among which a loader divides its samples, None if it is unknown.

    Args:
        loader: Any iterable of batches.
    """
    loader = loader.loader if isinstance(loader, WatchedLoader) else loader
    if isinstance(loader, DataParallelLoader):
        return loader.num_replicas
    if not isinstance(loader, DataLoader):
        return None
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return next((each.num_replicas for each in samplers if isinstance(each, _DIVIDING)), None)


_DIVIDING = (DistributedSampler, DataParallelSampler)


def check_division(loader: object, num_replicas: int, *, remedy: str) -> None:
    """Refuse a loader that divides samples among other ranks; warn of a loader that does not divide them.

    Args:
        loader: The user's dataloader: any iterable of batches, or None.
        num_replicas: Number of data-parallel ranks of the model that is trained with it.
        remedy: The call that makes a valid one.

    Raises:
        ValueError: `loader` divides samples among another number of ranks.
    """
    found = divided_among(loader)
    if found not in (None, 1, num_replicas):
        raise ValueError(
            f"the dataloader divides samples among {found} ranks, and the model has {num_replicas} "
            "data-parallel ranks in the mesh of this job, which another plugin may have laid out after the "
            f"loader was made: lay the mesh out first, then make the loader ({remedy})"
        )
    unprepared = isinstance(loader, DataLoader) and not isinstance(loader, DataParallelLoader)
    if num_replicas > 1 and found is None and unprepared:
        get_dist_logger().log_once(
            "this dataloader gives every data-parallel rank the same samples, unless its sampler or its "
            f"dataset divides them: {remedy} makes a loader that does",
            ranks=[0],
        )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
