"""Streams: dealt over replicas and workers as samples of a dataset with a length are, and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from colossalai.runtime import DataParallelLoader, make_dataloader
from colossalai.runtime._gather import _join_rows

pytestmark = pytest.mark.unit


class Plain(IterableDataset[torch.Tensor]):
    """A stream that does not look at workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.size))


class Sized(Plain):
    def __len__(self) -> int:
        return self.size


class DividesOverWorkers(Plain):
    """As torch's page of IterableDataset says."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(torch.arange(start, self.size, step))


class ShufflesByEpoch(Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return iter(torch.tensor(order))


def of_all(
    make_stream: Callable[[], IterableDataset[Any]], num_replicas: int, **options: Any
) -> list[DataParallelLoader]:
    """Return the loaders of all replicas."""
    return [
        make_dataloader(make_stream(), num_replicas=num_replicas, replica=replica, **options)
        for replica in range(num_replicas)
    ]


def batches_of(loader: DataParallelLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@settings(max_examples=60)
@given(
    size=st.integers(0, 30),
    num_replicas=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_a_stream_is_divided_as_a_dataset_with_a_length(size, num_replicas, batch_size, drop_last) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    found = of_all(lambda: Sized(size), num_replicas, **options)
    batches = [batches_of(loader) for loader in found]
    for loader, mine in zip(found, batches, strict=True):
        assert len(mine) == len(loader)
    if size < (num_replicas if drop_last else 1):
        assert not any(batches)  # and none waits for another
        return
    dataset = TensorDataset(torch.arange(size))
    for replica, mine in enumerate(batches):
        mapped = make_dataloader(dataset, num_replicas=num_replicas, replica=replica, **options)
        assert mine == [batch[0].tolist() for batch in mapped]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_workers_change_nothing(options: dict[str, Any]) -> None:
    one_process = [batches_of(loader) for loader in of_all(lambda: Plain(11), 2, batch_size=2)]
    for mine, loader in zip(
        one_process, of_all(lambda: Plain(11), 2, batch_size=2, num_workers=2, **options), strict=True
    ):
        flags = []
        for number, batch in enumerate(loader):
            assert batch.tolist() == mine[number]
            flags.append(loader.at_last_batch)
        assert flags == [False, False, True]
        assert batches_of(loader) == mine
        loader._dealing = None  # ends the workers that persist


def fraction(_: int) -> None:
    """A `worker_init_fn` that divides, as on torch's page."""
    info: Any = get_worker_info()
    info.dataset.size = 4 + info.id


@pytest.mark.parametrize(
    ("make_stream", "options", "expected"),
    [
        (lambda: DividesOverWorkers(7), {}, [[[0, 4], [1, 5]], [[2, 6], [3, 1]]]),
        (lambda: Plain(99), {"worker_init_fn": fraction}, [[[0, 2], [0, 2], [4]], [[1, 3], [1, 3], [0]]]),
    ],
)
def test_a_stream_that_divides_itself_over_workers_is_not_divided_again(
    make_stream, options, expected
) -> None:
    found = of_all(make_stream, 2, batch_size=2, num_workers=2, **options)
    assert [batches_of(loader) for loader in found] == expected


def test_a_worker_init_fn_that_seeds_divides_nothing() -> None:
    def seeds(_: int) -> None:
        info: Any = get_worker_info()
        random.seed(info.seed)

    (loader,) = of_all(lambda: Plain(4), 1, num_workers=2, worker_init_fn=seeds)
    assert batches_of(loader) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_resumes_and_has_its_epochs(num_workers: int) -> None:
    def make() -> DataParallelLoader:
        return of_all(lambda: ShufflesByEpoch(10), 2, batch_size=2, num_workers=num_workers)[1]

    whole = make()
    first, second = batches_of(whole), batches_of(whole)
    assert first != second
    interrupted = make()
    batches = iter(interrupted)
    next(batches), next(batches)
    resumed = make()
    resumed.load_state_dict(interrupted.state_dict())
    drawn = torch.get_rng_state()
    assert batches_of(resumed) == first[2:]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert batches_of(resumed) == second
    resumed.set_epoch(0)
    assert batches_of(resumed) == first


def test_what_is_skipped_draws_nothing_of_the_resumed_run() -> None:
    def drawing(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + torch.rand(len(samples))

    def make() -> DataParallelLoader:
        return of_all(lambda: Sized(8), 1, batch_size=2, collate_fn=drawing)[0]

    undisturbed = make()
    batches = iter(undisturbed)
    next(batches), next(batches)
    state, random_state = undisturbed.state_dict(), torch.get_rng_state()
    rest = list(batches)
    resumed = make()
    resumed.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert all(torch.equal(one, other) for one, other in zip(resumed, rest, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_stands_in_is_known(num_workers: int) -> None:
    """[Note: order of gathered samples] holds for streams: dealt back they are in order, each once."""
    loaders = of_all(lambda: Plain(9), 2, batch_size=2, num_workers=num_workers)
    rows, parts = [], [[], []]
    for batches in zip(*loaders, strict=True):
        assert loaders[0].last_batch == loaders[1].last_batch
        rows += _join_rows(list(batches), loaders[0].last_batch).tolist()
        for part, batch in zip(parts, batches, strict=True):
            part.append(batch)
    assert rows == list(range(9))
    assert _join_rows([torch.cat(part) for part in parts], loaders[0].last_batch).tolist() == rows


def test_batches_that_the_stream_makes() -> None:
    class Batches(Plain):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(self.size).split(4))

    loaders = of_all(lambda: Batches(10), 2, batch_size=None)
    rows: list[int] = []
    for batches in zip(*loaders, strict=True):
        rows += _join_rows(list(batches), loaders[0].last_batch).tolist()
    assert rows == list(range(10))


def test_stand_ins_within_a_pass_are_not_counted_as_samples_of_it() -> None:
    loader = of_all(lambda: DividesOverWorkers(6), 2, batch_size=2, num_workers=2)[0]
    assert [loader.last_batch for _ in loader] == [(2, 3), (2, 3)]
    with pytest.raises(ValueError, match="gather each batch by itself"):
        _ = loader.last_batch


def test_streams_that_are_divided_already() -> None:
    assert batches_of(of_all(lambda: Plain(3), 2, add_sampler=False)[1]) == [[0], [1], [2]]
    with pytest.raises(ValueError, match=r"sharding_filter.*add_sampler=False"):
        of_all(lambda: IterableWrapper(range(4)), 2)
    stream = Plain(4)
    stream._distributed = object()  # what `datasets.distributed.split_dataset_by_node` sets
    with pytest.raises(ValueError, match=r"split_dataset_by_node.*add_sampler=False"):
        of_all(lambda: stream, 2)
