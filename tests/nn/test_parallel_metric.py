"""Accuracy over cut logits: what one process counts, ties included."""

import pytest
import torch

import colossalai.nn as col_nn
from colossalai.communication import ledger
from colossalai.nn.layer import HEAD_SCHEMES, head_cut, restart
from tests.nn.modes import MODES, SUFFIXES, launch, run_in_turn, slice_like
from tests.tiers import further

pytestmark = pytest.mark.dist

CLASSES = 16


def batches():
    """Yield logits with many equal highest scores, and labels of which a part is right."""
    generator = torch.Generator().manual_seed(9)
    for shape in [(8,), (8, 5)]:
        logits = torch.randint(3, (*shape, CLASSES), generator=generator).double()
        labels = logits.argmax(-1)
        wrong = torch.randint(2, shape, generator=generator).bool()
        yield logits, torch.where(wrong, torch.randint(CLASSES, shape, generator=generator), labels)
    yield torch.zeros(8, CLASSES), torch.zeros(8, dtype=torch.int64)  # the first of equals: all right
    yield torch.zeros(8, CLASSES), torch.full((8,), CLASSES // 2)  # the first of another rank: all wrong


def counts(name):
    mode = launch(name)
    metrics = {"classes cut": col_nn.Accuracy(cut=HEAD_SCHEMES[mode][0].y)}
    if mode != "1d":
        metrics["classes whole"] = getattr(col_nn, f"Accuracy{SUFFIXES[mode]}")()
    for limit in (1, CLASSES):
        restart(mode)
        col_nn.Classifier(8, CLASSES, vocab_parallel_limit=limit)
        metrics[f"of the classifier, {limit=}"] = col_nn.Accuracy()
        assert metrics[f"of the classifier, {limit=}"].cut == head_cut(mode)
    return {
        what: [metric(slice_like(logits, metric.cut), labels).item() for logits, labels in batches()]
        for what, metric in metrics.items()
    }


def refusals(name):
    launch(name)
    with ledger() as book:
        metric = col_nn.Accuracy2D()
        with pytest.raises(
            ValueError, match=r"Accuracy2D cuts dimension 0 of .* is 7, which the 2 ranks along col"
        ):
            metric(torch.zeros(4, CLASSES), torch.zeros(7))
        with pytest.raises(ValueError, match=r"\(4, 16\) do not fit labels of shape \(2,\)"):
            metric(torch.zeros(4, CLASSES), torch.zeros(4))
        with pytest.raises(ValueError, match=r"Accuracy3D needs a job launched with .*mode='3d'"):
            col_nn.Accuracy3D()
    assert book.count() == 0


@pytest.mark.parametrize("name", ["1d", "2d", further("2.5d"), further("3d")])
def test_counts_are_those_of_one_process(name):
    """And, in 2d, what is refused before any collective."""
    wanted = [int((logits.argmax(-1) == labels).sum()) for logits, labels in batches()]
    assert wanted[2:] == [8, 0]
    assert 0 < wanted[1] < 40
    by_rank, *_ = run_in_turn(MODES[name]["size"], name, counts, *[refusals] * (name == "2d"))
    for found in by_rank:
        assert all(numbers == wanted for numbers in found.values()), found
