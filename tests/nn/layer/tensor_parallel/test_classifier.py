"""Classifiers in every mode against torch's linear layer in one process, tied to an embedding or not."""

import itertools

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.communication import ledger
from colossalai.nn.layer import head_cut, restart
from colossalai.tensor import spec_of
from tests.nn.modes import (
    MODES,
    SUFFIXES,
    assert_small,
    by_case,
    compare,
    launch,
    run_in_turn,
    slice_like,
)
from tests.tiers import further

pytestmark = pytest.mark.dist

FEATURES, CLASSES = 8, 16


def untied(mode, kind, *, bias, in_panels):
    torch.manual_seed(5)
    twin = nn.Linear(FEATURES, CLASSES, bias)
    torch.manual_seed(5)
    restart(mode)
    layer = kind(FEATURES, CLASSES, bias=bias, in_panels=in_panels)
    x = torch.randn(8, 3, FEATURES)
    return compare(layer, twin, x, x_cut=layer.scheme.x, y_cut=head_cut(mode))


def tied(mode, kind, embedding_kind, *, in_panels):
    """One weight at both ends: its gradient is the sum of what both find."""
    torch.manual_seed(6)
    twin = nn.Sequential(nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES))
    twin[1].weight = twin[0].weight
    torch.manual_seed(6)
    embedding = embedding_kind(CLASSES, FEATURES)
    layer = nn.Sequential(embedding, kind(FEATURES, CLASSES, embedding.weight, in_panels=in_panels))
    assert layer[1].weight is embedding.weight
    with torch.no_grad():
        layer[1].bias.copy_(spec_of(layer[1].bias).slice_of(twin[1].bias))
    return compare(layer, twin, torch.randint(CLASSES, (8, 3)), y_cut=head_cut(mode))


def all_cases(name):
    mode = launch(name)
    cases = {}
    for prefix, in_panels in itertools.product(["", "VocabParallel"], [True, False]):
        kind = getattr(col_nn, f"{prefix}Classifier{SUFFIXES[mode]}")
        embedding = getattr(col_nn, f"{prefix}Embedding{SUFFIXES[mode]}")
        for bias in (True, False):
            cases[f"{prefix} {in_panels=} {bias=}"] = untied(mode, kind, bias=bias, in_panels=in_panels)
        cases[f"{prefix} {in_panels=} tied"] = tied(mode, kind, embedding, in_panels=in_panels)
    return by_case(cases)


def shapes(name):
    """What a rank holds of 16 classes of 8 features, and of the logits of a batch of 8."""
    mode = launch(name)
    found = []
    for prefix in ("", "VocabParallel"):
        cut = restart(mode)
        layer = getattr(col_nn, f"{prefix}Classifier{SUFFIXES[mode]}")(FEATURES, CLASSES)
        y = layer(slice_like(torch.randn(8, FEATURES), cut))
        found.append((tuple(layer.weight.shape), tuple(y.shape)))
    return found


def refusals(name):
    mode = launch(name)
    restart(mode)
    with ledger() as book:
        with pytest.raises(
            ValueError, match=r"the weight of Classifier2D: dimension 1 .* is 7, .* along row"
        ):
            col_nn.Classifier2D(7, CLASSES)
        padded = col_nn.VocabParallelEmbedding2D(CLASSES - 1, FEATURES)
        with pytest.raises(
            ValueError, match=r"VocabParallelClassifier2D cannot share a weight of .*\(15, 8\)"
        ):
            col_nn.VocabParallelClassifier2D(FEATURES, CLASSES, padded.weight)
        whole_rows = col_nn.Embedding2D(CLASSES, FEATURES)
        with pytest.raises(
            ValueError, match=r"VocabParallelClassifier2D cannot share a weight of .*\(16, 8\)"
        ):
            col_nn.VocabParallelClassifier2D(FEATURES, CLASSES, whole_rows.weight)
        layer = col_nn.Classifier2D(FEATURES, CLASSES)
        with pytest.raises(ValueError, match=r"Classifier2D .*\(4, 8\).* must be 4, the 8 features over 2"):
            layer(torch.ones(4, FEATURES))
        with pytest.raises(ValueError, match=r"Classifier3D needs a job launched with .*mode='3d'"):
            col_nn.Classifier3D(FEATURES, CLASSES)
    assert book.count() == 0


@pytest.mark.parametrize(
    ("name", "whole_classes", "cut_classes"),
    [
        ("1d", ((16, 8), (8, 16)), ((8, 8), (8, 8))),
        ("2d", ((16, 4), (4, 16)), ((8, 4), (4, 8))),
        further("2.5d", ((16, 4), (2, 16)), ((8, 4), (2, 8))),
        further("3d", ((16, 4), (2, 16)), ((4, 4), (2, 8))),
    ],
)
def test_shapes_values_and_gradients(name, whole_classes, cut_classes):
    """And, in 2d, what is refused before any collective."""
    size = MODES[name]["size"]
    found, errors, *_ = run_in_turn(size, name, shapes, all_cases, *[refusals] * (name == "2d"))
    assert list(found) == [[whole_classes, cut_classes]] * size
    assert_small(errors)
