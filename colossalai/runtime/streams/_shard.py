"""Shard of a stream (`IterableDataset`) for one replica, with any number of workers.

[Note: distribution of a stream]
A stream has neither a length nor positions, so each worker of each replica reads all of it. Every
`num_replicas` samples in a row are a round, of which each replica takes one, like `DataParallelSampler`.
A whole round is read before its sample is returned, so each replica can check that the last one is
complete, and all end after the same batch without a message. A replica's workers take turns in batches, so
the batches and their order are those of one process. A stream that reads `get_worker_info()` divides itself
over workers, as torch requires: then each worker deals its own copy's samples, and forms batches of them.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils import worker as worker_module

_PASSED_ON = (
    "batch_size", "num_workers", "pin_memory", "drop_last", "timeout", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class DealtSample(NamedTuple):
    """A sample of this replica, and the number of replicas with a distinct sample in its round."""

    sample: Any
    of_all: int


class DealtBatch(NamedTuple):
    """A batch of this replica, with its number of samples, and of distinct ones on all replicas."""

    batch: Any
    of_replica: int
    of_all: int


class StreamShard(IterableDataset[DealtSample]):
    """The samples of one replica, in this worker.

    Args:
        stream: A dataset that yields the same samples in the same order in every process.
        num_replicas: Number of replicas.
        replica: Index of this one.
        batch_size: Samples in a batch; None if the stream yields batches.
        drop_last: If the last round is incomplete: drop it; otherwise the first samples of the stream
            complete it.
    """

    def __init__(
        self,
        stream: Dataset[Any],
        *,
        num_replicas: int,
        replica: int,
        batch_size: int | None,
        drop_last: bool,
    ) -> None:
        self.stream = stream
        self.num_replicas = num_replicas
        self.replica = replica
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[DealtSample]:
        # See [Note: distribution of a stream].
        info: Any = get_worker_info()
        worker, num_workers, batch_size = 0, 1, self.batch_size or 1
        for number, dealt in enumerate(self._rounds()):
            if number == 0 and info is not None and not info.names_read:
                worker, num_workers = info.given.id, info.given.num_workers
            if number // batch_size % num_workers == worker:
                yield dealt

    def _rounds(self) -> Iterator[DealtSample]:
        """Yield this replica's sample of each round."""
        samples = iter(self.stream)
        first = current = list(islice(samples, self.num_replicas))
        while len(current) == self.num_replicas:
            yield DealtSample(current[self.replica], self.num_replicas)
            current = list(islice(samples, self.num_replicas))
        if current and not self.drop_last:
            filled = [*current, *islice(cycle(first), self.num_replicas - len(current))]
            yield DealtSample(filled[self.replica], len(current))


def dealing_loader(loader: DataLoader[Any], shard: StreamShard) -> DataLoader[Any]:
    """Return a loader of `DealtBatch` with the present options of `loader`."""
    return DataLoader(
        shard,
        collate_fn=_CollateDealt(loader.collate_fn, is_batch=loader.batch_size is not None),
        worker_init_fn=_WorkerStart(loader.worker_init_fn) if loader.num_workers else None,
        **{name: getattr(loader, name) for name in _PASSED_ON},
    )


def refuse_divided(stream: Dataset[Any]) -> None:
    """Refuse a stream that is known to divide itself over ranks.

    Raises:
        ValueError: `stream` is a torch data pipe, or a result of `split_dataset_by_node` of datasets.
    """
    if isinstance(stream, IterDataPipe):
        raise ValueError(
            "a data pipe is divided by torch's DataLoader, where it has a `.sharding_filter()`: pass "
            "add_sampler=False"
        )
    if getattr(stream, "_distributed", None) is not None:
        raise ValueError(
            "this stream is divided already, by split_dataset_by_node: pass add_sampler=False, or leave "
            "split_dataset_by_node out"
        )


class _CollateDealt:
    """A `collate_fn` of dealt samples, which calls the user's with the samples."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batch: bool) -> None:
        self.collate = collate
        self.is_batch = is_batch

    def __call__(self, dealt: Any) -> DealtBatch:
        if not self.is_batch:
            return DealtBatch(self.collate(dealt.sample), 1, dealt.of_all)
        samples = [each.sample for each in dealt]
        return DealtBatch(self.collate(samples), len(samples), sum(each.of_all for each in dealt))


class _WatchedWorkerInfo:
    """torch's `WorkerInfo` with a record of the attributes that were read.

    Args:
        given: torch's `WorkerInfo`, whose dataset is the `StreamShard`.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.names_read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in ("given", "names_read"):  # not set yet
            raise AttributeError(name)
        self.names_read.add(name)
        return self.given.dataset.stream if name == "dataset" else getattr(self.given, name)


class _WorkerStart:
    """A `worker_init_fn` that installs a `_WatchedWorkerInfo` and calls the user's function."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        info = _WatchedWorkerInfo(get_worker_info())
        worker_module._worker_info = info  # type: ignore[assignment]  # get_worker_info() returns it
        found: Any = get_worker_info()
        assert found is info, "torch keeps the worker info in another place now"
        if self.init is not None:
            self.init(worker)
        if "dataset" not in info.names_read:  # it has seeded something; else it divides the stream itself
            info.names_read.clear()
