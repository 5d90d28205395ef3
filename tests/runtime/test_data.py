"""Loaders: each replica its own part, an order that the seed fixes, a position that can be restored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from colossalai.runtime import DataParallelSampler, make_dataloader

pytestmark = pytest.mark.unit


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


def dataset_of(size):
    return TensorDataset(torch.arange(size))


def batches_of(loader):
    return [batch[0].tolist() for batch in loader]


@settings(max_examples=60)
@given(
    size=st.integers(1, 40), num_replicas=st.integers(1, 7), shuffle=st.booleans(), drop_last=st.booleans()
)
def test_replicas_divide_the_dataset(size, num_replicas, shuffle, drop_last):
    if drop_last and size < num_replicas:
        with pytest.raises(ValueError, match="too few"):
            DataParallelSampler(dataset_of(size), num_replicas=num_replicas, replica=0, drop_last=True)
        return
    options = {"num_replicas": num_replicas, "shuffle": shuffle, "drop_last": drop_last}
    parts = [
        list(DataParallelSampler(dataset_of(size), replica=replica, **options))
        for replica in range(num_replicas)
    ]
    assert len({len(part) for part in parts}) == 1  # all ranks make the same number of steps
    seen = [index for part in parts for index in part]
    if drop_last:
        assert len(set(seen)) == len(seen) == size // num_replicas * num_replicas
    else:
        assert set(seen) == set(range(size))
        assert len(seen) < size + num_replicas


def test_epochs_have_their_own_order_that_the_seed_fixes():
    def make(seed):
        return make_dataloader(
            dataset_of(10), num_replicas=2, replica=1, batch_size=2, shuffle=True, seed=seed
        )

    loader = make(1)
    first, second = batches_of(loader), batches_of(loader)
    assert first != second
    again = make(1)
    assert [batches_of(again), batches_of(again)] == [first, second]
    assert batches_of(make(2)) != first
    again.set_epoch(0)
    assert batches_of(again) == first


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_position_is_restored(num_workers):
    def make():
        return make_dataloader(
            dataset_of(14), num_replicas=2, replica=0, batch_size=2, shuffle=True, num_workers=num_workers
        )

    whole = make()
    undisturbed = [batches_of(whole), batches_of(whole)]
    for stop in range(1, 5):
        interrupted = make()
        for number, _ in enumerate(interrupted, start=1):
            if number == stop:
                state = interrupted.state_dict()
                break
        resumed = make()
        resumed.load_state_dict(state)
        rest = batches_of(resumed)
        if stop == 4:  # after the last batch of an epoch comes the next epoch
            assert rest == undisturbed[1]
        else:
            assert rest == undisturbed[0][stop:]
            assert batches_of(resumed) == undisturbed[1]
        if num_workers:
            break


def test_a_pass_that_is_left_early_starts_again():
    loader = make_dataloader(dataset_of(6), num_replicas=1, replica=0, batch_size=2)
    next(iter(loader))
    assert len(batches_of(loader)) == 3


@pytest.mark.parametrize("dataset", [Numbers(), dataset_of(5)])
def test_the_last_batch_is_known(dataset):
    loader = make_dataloader(dataset, num_replicas=1, replica=0, batch_size=2)
    flags = [loader.at_last_batch for _ in loader]
    assert flags == [False, False, True]


def test_refusals():
    with pytest.raises(ValueError, match="a sampler of your own"):
        make_dataloader(dataset_of(4), num_replicas=1, replica=0, sampler=[0])
    with pytest.raises(ValueError, match="has to shuffle itself"):
        make_dataloader(Numbers(), num_replicas=1, replica=0, shuffle=True)
    loader = make_dataloader(Numbers(), num_replicas=1, replica=0, add_sampler=False)
    loader.load_state_dict({"epoch": 0, "batch": 1})
    with pytest.raises(ValueError, match="no positions"):
        next(iter(loader))
    with pytest.raises(ValueError, match="replica 2 of 2"):
        DataParallelSampler(dataset_of(4), num_replicas=2, replica=2)


@pytest.mark.unit
def test_a_batch_of_another_size_goes_on_at_the_same_sample(capfd):
    def loader(num_replicas, batch_size):
        dataset = TensorDataset(torch.arange(24))
        return make_dataloader(dataset, num_replicas=num_replicas, replica=0, batch_size=batch_size)

    saved = loader(2, 2)
    batches = iter(saved)
    next(batches), next(batches), next(batches)  # samples 0 to 11, on both replicas
    for num_replicas, batch_size, first in ((1, 6, 12), (3, 2, 12), (1, 12, 12), (1, 8, 8)):
        resumed = loader(num_replicas, batch_size)
        resumed.load_state_dict(saved.state_dict())
        assert next(iter(resumed))[0][0] == first
    assert capfd.readouterr().err.count("4 of them will be seen again") == 1
