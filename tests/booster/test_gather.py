"""`booster.gather_for_metrics`: every sample once, in the order of the dataset, in any nesting."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from colossalai.runtime import make_dataloader
from tests.ranks import run_ranks
from tests.turns import run_each


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def results_of(numbers: torch.Tensor) -> dict[str, Any]:
    """What an evaluation may gather of some samples, in several dtypes and shapes."""
    return {
        "number": numbers,
        "logits": torch.stack([numbers, numbers * 10], dim=1).to(torch.bfloat16).requires_grad_(),
        "nested": [(numbers % 2 == 0, None), Pair(numbers.double() / 3, [numbers.view(-1, 1, 1)])],
        "tokens": numbers.repeat_interleave(3) * 10 + torch.arange(3).repeat(len(numbers)),
        "empty": numbers.new_zeros(len(numbers), 0),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [*found.values()], [*expected.values()]
    if isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif expected is not None:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected.detach())
        assert not found.requires_grad


def gather(size: int, batch_size: int) -> None:
    if not gpc.is_launched:
        colossalai.launch_from_torch({}, verbose=False)
    booster = Booster()
    dataset = TensorDataset(torch.arange(size) + 100)
    order = dataset.tensors[0]
    world = gpc.data_parallel_size
    for shuffle in (False, True):
        loader = booster.plugin.prepare_dataloader(dataset, batch_size, shuffle=shuffle, seed=3)
        if shuffle:
            order = order[torch.randperm(size, generator=torch.Generator().manual_seed(3))]
        whole: list[torch.Tensor] = []
        seen = 0
        for (numbers,) in loader:
            whole.append(numbers)
            step = order[seen : seen + batch_size * world]
            seen += len(step)
            assert_same(booster.gather_for_metrics(results_of(numbers)), results_of(step))
            assert booster.gather_for_metrics(numbers.max(), loader).shape == (world,)
        assert seen == size
        # After the pass: all of it at once.
        assert_same(booster.gather_for_metrics(torch.cat(whole)), order)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_comes_once(world_size: int) -> None:
    run_each(world_size, gather, {1: [(5, 2)], 2: [(13, 3)], 3: [(8, 2), (2, 4)]}[world_size])


def other_loaders() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster()
    rank = gpc.get_global_rank()
    own = torch.arange(rank + 1) + 10 * rank  # [0] and [10, 11]
    assert booster.gather_for_metrics(own).tolist() == [0, 10, 11], "of no loader of ours: rank after rank"
    dataset = TensorDataset(torch.arange(5))
    for batch in DataLoader(dataset, 2):
        assert len(booster.gather_for_metrics(batch[0])) == 2 * len(batch[0])
    for batch in booster.plugin.prepare_dataloader(dataset, 2, add_sampler=False):
        assert torch.equal(booster.gather_for_metrics(batch[0]), batch[0]), "every rank has them all"
    # A mistake is the same sentence on every rank, and the job goes on.
    loader = booster.plugin.prepare_dataloader(dataset, 2)
    (numbers,) = next(iter(loader))
    for wrong, message in (
        (torch.zeros(2, 3 + rank), "differ between ranks, in structure, dtypes or shapes"),
        ({"a": numbers} if rank else [numbers], "differ between ranks"),
        (torch.zeros(3), r"dim 0 of a tensor is \[3, 3\] on the ranks, whose batch has 2 samples each"),
        (torch.zeros(2 * (1 + rank)), r"dim 0 of a tensor is \[2, 4\]"),
        ({"a": "text"}, "there is a str among the values to gather"),
    ):
        with pytest.raises(ValueError, match=message):
            booster.gather_for_metrics(wrong, loader)
    assert booster.gather_for_metrics(numbers).tolist() == [0, 1, 2, 3]
    assert booster.gather_for_metrics(None) is None


@pytest.mark.dist
def test_other_loaders_and_mistakes() -> None:
    run_ranks(other_loaders, 2)


@pytest.mark.unit
def test_a_prepared_loader_moves_its_batches() -> None:
    """On the device without memory, which every machine has."""
    dataset = TensorDataset(torch.arange(4), torch.ones(4, 2))
    options: dict[str, Any] = {"num_replicas": 1, "replica": 0, "batch_size": 2}
    for batch in make_dataloader(dataset, **options, device=torch.device("meta")):
        assert [tensor.device.type for tensor in batch] == ["meta", "meta"]
    for batch in make_dataloader(dataset, **options):
        assert [tensor.device.type for tensor in batch] == ["cpu", "cpu"]


def prepared() -> list[Any]:
    colossalai.launch_from_torch({}, verbose=False)
    gpc._device = torch.device("meta")
    booster = Booster(device="cpu")
    loader = booster.plugin.prepare_dataloader(TensorDataset(torch.arange(4)), 2)
    before = loader.device
    *_, loader, _ = booster.boost(torch.nn.Linear(1, 1), dataloader=loader)
    return [before.type, loader.device.type]


@pytest.mark.dist
def test_the_device_is_that_of_the_rank_or_of_the_booster() -> None:
    assert run_ranks(prepared, 1) == [["meta", "cpu"]]
