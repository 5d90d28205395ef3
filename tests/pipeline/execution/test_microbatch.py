"""Batches are cut and put together again, whatever they are made of."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace

import pytest
import torch

from colossalai.pipeline.execution._microbatches import (
    RepeatedTensors,
    cut_batch,
    merge_outputs,
    microbatch_weights,
    num_samples_in,
    split_batch,
)
from colossalai.pipeline.execution._payload import shape_digests, take_apart

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


@dataclass(frozen=True)
class Result:
    """What a model may return."""

    logits: torch.Tensor
    loss: float
    aux: dict
    note: str = "kept"


def test_dataclasses_are_cut_and_put_together():
    batch = Result(torch.arange(10.0).view(5, 2), 0.5, {"ids": torch.arange(5)})
    assert num_samples_in(batch) == 5
    parts = split_batch(batch, 2)
    assert [len(part.logits) for part in parts] == [3, 2]
    parts = [replace(part, loss=loss) for part, loss in zip(parts, (1.0, 6.0), strict=True)]
    merged = merge_outputs(parts, [3, 2])
    assert isinstance(merged, Result)
    assert torch.equal(merged.logits, batch.logits)
    assert torch.equal(merged.aux["ids"], batch.aux["ids"])
    assert (merged.loss, merged.note) == (3.0, "kept")


def test_numbers_are_means_over_samples():
    def merged(*values):
        return merge_outputs(list(values), [3, 1])

    assert merged(1.0, 5.0) == 2.0
    assert merged(0.1, 0.1) == 0.1
    assert torch.equal(merged(torch.tensor([1.0]), torch.tensor([5.0])), torch.tensor([2.0]))
    assert merged(torch.ones(1, 1), torch.full((1, 1), 5.0)).shape == (1, 1)
    assert merged(torch.zeros(6, 2), torch.zeros(2, 2)).shape == (8, 2)  # two rows for each sample
    table = torch.randn(1, 4, 7)  # of positions, say: the same for every microbatch
    assert torch.equal(merged(table, table.clone()), table)
    assert merged((3, None, "x", True), (3, None, "x", True)) == (3, None, "x", True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"n": 3}, {"n": 4}], r"output\['n'\] is 3, and differs between microbatches\. Return tensors"),
        ([[object()], [object()]], r"output\[0\] is a object"),
        ([torch.zeros(5, 2), torch.ones(5, 2)], r"shape \(5, 2\), \(5, 2\), for \[3, 1\] samples"),
        ([torch.tensor(3), torch.tensor(4)], r"is a torch.int64 tensor of shape"),
        ([torch.zeros(3), None], "is of type NoneType and Tensor"),
        ([{"a": 1}, {"b": 1}], r"has parts \[\"\['a'\]\"\] and"),
        ([Result(torch.zeros(3), 1.0, {}, "a"), Result(torch.zeros(1), 1.0, {}, "b")], r"output.note is 'a'"),
    ],
)
def test_what_cannot_be_put_together_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        merge_outputs(values, [3, 1])


def test_shapes_in_dataclasses_tell_data_apart():
    small, large = (Result(torch.zeros(n, 2), 0.5, {}) for n in (3, 4))
    found = shape_digests([small, Result(torch.ones(3, 2), 0.5, {}), large])
    assert found[0] == found[1] != found[2]
    with pytest.raises(ValueError, match="a stage returned a Result, which cannot be sent"):
        take_apart(small)


@dataclass(frozen=True)
class Pieces:
    """What a pipeline takes: `batch_dim` names what is in it by these fields."""

    data: object
    label: object


def test_batch_dim_says_how_each_tensor_is_cut():
    weights, table = torch.arange(8.0), torch.arange(8.0)
    batch = Pieces(
        {
            "x": torch.arange(24).view(3, 8),
            "weights": weights,
            "more": {"table": table, "n": torch.tensor(1)},
        },
        (torch.arange(8), torch.arange(16).view(2, 8)),
    )
    cut = cut_batch(batch, 3, {"data['x']": 1, "weights": None, "more": None, "label[1]": 1})
    assert cut.sizes == [3, 3, 2]
    assert torch.equal(torch.cat([part.data["x"] for part in cut.parts], 1), batch.data["x"])
    assert torch.equal(torch.cat([part.label[1] for part in cut.parts], 1), batch.label[1])
    assert [part.label[0].tolist() for part in cut.parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert all(part.data["weights"] is weights for part in cut.parts)
    assert all(part.data["more"]["table"] is table for part in cut.parts)
    first = split_batch({"x": torch.zeros(3, 8), "n": torch.tensor(1)}, 2, 1)[0]  # one for all
    assert first["x"].shape == (3, 4)
    inner = cut_batch(batch, 4, {"x": 1, "data": None, "table": 0, "label": 0, "label[1]": 1})
    assert inner.parts[3].data["more"]["table"].tolist() == [6, 7]  # the innermost name counts


@pytest.mark.parametrize(
    ("batch_dim", "message"),
    [
        ({"wieghts": None}, r"batch_dim names 'wieghts', which is not in the batch: there are 'weights'"),
        ({"x": 2}, r"batch_dim is 2 for data\['x'\], a tensor of shape \(3, 8\), which has no such"),
        (1, r"batch_dim is 1 for data\['weights'\].* pass batch_dim=\{'weights': "),
        ({"x": 0}, r"number of samples \(dim 0\): data\['x'\]: 3, .* label: 8\. .*batch_dim=\{'label': "),
    ],
)
def test_a_batch_dim_that_does_not_fit_is_named(batch_dim, message):
    batch = Pieces({"x": torch.zeros(3, 8), "weights": torch.zeros(8)}, torch.zeros(8))
    with pytest.raises(ValueError, match=message):
        cut_batch(batch, 2, batch_dim)


def test_outputs_are_put_together_along_the_dimension_of_samples():
    whole = torch.arange(40).view(4, 5, 2)
    assert torch.equal(merge_outputs(list(whole.split(2, 1)), [2, 2, 1], 1), whole)


def fresh(step):
    """Return a batch as a loader makes it: what is the same in each is equal, and another tensor."""
    samples = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 3, generator=samples),
        "class_weights": torch.arange(8.0),
        "mask": torch.ones(8, 3),
        "label": torch.randint(2, (8,), generator=samples),
    }


def reported(batches, batch_dim=None):
    watch = RepeatedTensors()
    return [[each.name for each in watch.see(cut_batch(batch, 4, batch_dim).tensors)] for batch in batches]


def test_a_table_that_is_cut_like_samples_is_reported_once():
    assert reported(map(fresh, range(6))) == [[], [], [], ["class_weights"], [], []]
    assert not any(reported(map(fresh, range(6)), {"class_weights": 0}))
    twice = (Pieces(batch, batch) for batch in map(fresh, range(4)))  # each tensor is data and label
    assert reported(twice)[3] == ["class_weights"]
    one = fresh(0)
    assert not any(reported([one] * 20))  # a loop over one batch
    assert not any(reported([one, one, one, fresh(1), fresh(2)], {"class_weights": None}))
    assert not any(reported({**fresh(step), "class_weights": torch.ones(8)} for step in range(6)))


def test_a_buffer_that_is_filled_anew_is_not_a_table():
    buffer = torch.zeros(8, 3)

    def batches():
        for step in range(6):
            yield {"x": buffer.copy_(fresh(step)["x"]), "label": fresh(step)["label"]}

    assert not any(reported(batches()))
