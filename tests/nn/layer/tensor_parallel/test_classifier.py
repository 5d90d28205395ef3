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
    in_one_process,
    launch,
    run_in_turn,
    slice_like,
)
from tests.tiers import further

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


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("name", "whole_classes", "cut_classes"),
    [
        ("1d", ((16, 8), (8, 16)), ((8, 8), (8, 8))),
        ("2d", ((16, 4), (4, 16)), ((8, 4), (4, 8))),
        ("2.5d", ((16, 4), (2, 16)), ((8, 4), (2, 8))),
        ("3d", ((16, 4), (2, 16)), ((4, 4), (2, 8))),
    ],
)
def test_shapes(name, whole_classes, cut_classes):
    """What a rank holds of 16 classes of 8 features, and of the logits of a batch of 8."""
    for prefix, (of_weight, of_logits) in (("", whole_classes), ("VocabParallel", cut_classes)):
        with in_one_process(name) as mode:
            cut = restart(mode)
            layer = getattr(col_nn, f"{prefix}Classifier{SUFFIXES[mode]}")(FEATURES, CLASSES)
            y = layer(slice_like(torch.randn(8, FEATURES), cut))
        assert (tuple(layer.weight.shape), tuple(y.shape)) == (of_weight, of_logits)


@pytest.mark.mesh
def test_what_does_not_fit_is_refused_before_any_collective():
    with in_one_process("2d") as mode, ledger() as book:
        restart(mode)
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


@pytest.mark.dist
@pytest.mark.parametrize("name", ["1d", "2d", further("2.5d"), further("3d")])
def test_values_and_gradients(name):
    (errors,) = run_in_turn(MODES[name]["size"], name, all_cases)
    assert_small(errors)
