"""Batches are cut and put together again, whatever they are made of."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from colossalai.pipeline._microbatch import merge_outputs, microbatch_weights, num_samples_in, split_batch

pytestmark = pytest.mark.unit

Pair = namedtuple("Pair", "left right")


def nested(n):
    return {
        "ids": torch.arange(n),
        "more": (torch.arange(2.0 * n).view(n, 2), [torch.ones(n), "name", None]),
        "pair": Pair(torch.zeros(n), 3),
        "temperature": torch.tensor(0.5),
    }


@pytest.mark.parametrize(
    ("num_samples", "num_microbatches", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 3, 1]), (9, 4, [3, 3, 3]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_sizes(num_samples, num_microbatches, sizes):
    parts = split_batch(nested(num_samples), num_microbatches)
    assert [num_samples_in(part) for part in parts] == sizes
    assert microbatch_weights(parts) == pytest.approx([size / num_samples for size in sizes])


def test_what_is_no_tensor_goes_everywhere_and_all_comes_back():
    batch = nested(5)
    parts = split_batch(batch, 2)
    assert parts[1]["more"][1][1:] == ["name", None]
    assert isinstance(parts[1]["pair"], Pair)
    assert parts[1]["pair"].right == 3
    assert parts[1]["temperature"].item() == 0.5
    merged = merge_outputs(parts, microbatch_weights(parts))
    assert torch.equal(merged["ids"], batch["ids"])
    assert torch.equal(merged["more"][0], batch["more"][0])
    assert merged["temperature"].item() == 0.5


def test_scalars_are_averaged_with_the_weights():
    merged = merge_outputs(
        [OrderedDict(loss=torch.tensor(1.0)), OrderedDict(loss=torch.tensor(4.0))], [0.75, 0.25]
    )
    assert isinstance(merged, OrderedDict)
    assert merged["loss"].item() == 1.75


def test_microbatches_are_views():
    batch = torch.zeros(4, 2)
    split_batch(batch, 2)[1].fill_(1)
    assert batch.sum() == 4


def test_fewer_samples_than_microbatches():
    with pytest.raises(ValueError, match="3 samples cannot be cut into 4 microbatches"):
        split_batch(torch.zeros(3), 4)


def test_different_numbers_of_samples_are_named():
    with pytest.raises(ValueError, match=r"batch\['x'\]: 4, batch\['y'\]\[0\]: 3"):
        split_batch({"x": torch.zeros(4), "y": [torch.zeros(3)]}, 2)


@pytest.mark.parametrize("batch", [None, {"x": 1}, torch.tensor(1.0)])
def test_nothing_to_cut(batch):
    with pytest.raises(ValueError, match="no tensor to cut"):
        split_batch(batch, 2)


def test_number_of_microbatches():
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        split_batch(torch.zeros(3), 0)
