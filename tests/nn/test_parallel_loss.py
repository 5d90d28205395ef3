"""Cross entropy over cut logits against torch's in one process."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.communication import ledger
from colossalai.nn.layer import Cut, head_cut, restart
from colossalai.nn.loss import ParallelCrossEntropyLoss
from tests.nn.modes import (
    MODES,
    SUFFIXES,
    TOLERANCE,
    assert_small,
    distance,
    gradient_errors,
    launch,
    run_in_turn,
    slice_like,
)
from tests.tiers import further, pairwise

pytestmark = pytest.mark.dist

CLASSES, IGNORED = 16, -100


def labels_of_case(case):
    """Return labels of a batch of 8 sequences of 3."""
    labels = torch.randint(CLASSES, (8, 3))
    if case == "some ignored":
        labels[torch.rand(8, 3) < 0.4] = IGNORED
    if case == "a whole slice ignored":  # of the batch: the first rank, or the first two, have nothing
        labels[:4] = IGNORED
    if case == "one class":  # all of them on one rank
        labels.fill_(CLASSES - 1)
    return labels


CASES = ("all counted", "some ignored", "a whole slice ignored", "one class")


def against_torch(mode, labels, *, vocab_parallel, **options):
    kind = getattr(col_nn, f"{'VocabParallel' * vocab_parallel}CrossEntropyLoss{SUFFIXES[mode]}")
    criterion = kind(**options)
    logits_whole = 10.0 * torch.randn(8, 3, CLASSES)
    logits_twin = logits_whole.clone().requires_grad_()
    wanted = nn.functional.cross_entropy(logits_twin.flatten(0, 1), labels.flatten(), **options)
    (3.0 * wanted).backward()
    logits = slice_like(logits_whole, criterion.cut).requires_grad_()
    loss = criterion(logits, labels)
    (3.0 * loss).backward()
    if options.get("reduction") != "sum":
        total, count = kind(with_count=True, **options)(logits.detach(), labels)
        assert torch.equal(total / count, loss.detach())
    gradient = slice_like(logits_twin.grad, criterion.cut)
    return {"loss": distance(loss, wanted) / wanted.item(), "gradient": distance(logits.grad, gradient)}


OPTIONS = (CASES, [True, False], ["mean", "sum"], [0.0, 0.1])


def all_cases(name, *, cells):
    mode = launch(name)
    torch.manual_seed(7)
    errors = {}
    for case, vocab_parallel, reduction, label_smoothing in cells:
        if mode == "1d" and not vocab_parallel:
            continue  # there the logits are whole, and the loss is torch's
        found = against_torch(
            mode,
            labels_of_case(case),
            vocab_parallel=vocab_parallel,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        label = f"({case}, {vocab_parallel=}, {reduction}, {label_smoothing})"
        errors |= {f"{what} {label}": error for what, error in found.items()}
    labels = labels_of_case("all counted")
    found = against_torch(mode, labels, vocab_parallel=True, ignore_index=int(labels[0, 0]))
    return errors | {f"{what} (a class ignored)": error for what, error in found.items()}


def follows_the_classifier(name):
    """The loss of the current mode takes the logits as the classifier that was built last leaves them."""
    mode = launch(name)
    torch.manual_seed(8)
    logits, labels = torch.randn(8, CLASSES), torch.randint(CLASSES, (8,))
    wanted = nn.functional.cross_entropy(logits, labels)
    errors = {}
    for limit in (1, CLASSES):
        restart(mode)
        col_nn.Classifier(8, CLASSES, vocab_parallel_limit=limit)
        found = col_nn.CrossEntropyLoss()(slice_like(logits, head_cut(mode)), labels)
        errors[f"{limit=}"] = distance(found, wanted)
    return errors


def large_logits(name):
    """Exponents are taken of differences from the largest logit of all ranks."""
    launch(name)
    logits = torch.zeros(8, CLASSES)
    logits[:, CLASSES - 1] = 1e4
    criterion = col_nn.VocabParallelCrossEntropyLoss1D()
    loss = criterion(slice_like(logits, criterion.cut), torch.zeros(8, dtype=torch.int64))
    assert loss.item() == pytest.approx(1e4, abs=TOLERANCE)


def sent_bytes(name):
    """The logits are never gathered: three numbers for each position, and the sum and count of the batch."""
    launch(name)
    criterion = col_nn.VocabParallelCrossEntropyLoss2D()
    logits = slice_like(torch.randn(8, 3, CLASSES), criterion.cut).requires_grad_()
    with ledger() as book:
        criterion(logits, torch.zeros(8, 3, dtype=torch.int64)).backward()
    positions_of_a_rank = 4 * 3
    assert book.num_bytes(axis="row") == 3 * positions_of_a_rank * 8  # 2 (p-1)/p is 1
    assert book.num_bytes(axis="col") == 2 * 8
    assert book.count("all_reduce") == 5


def refusals(name):
    launch(name)
    with ledger() as book:
        criterion = col_nn.VocabParallelCrossEntropyLoss2D()
        logits = torch.zeros(4, 3, CLASSES // 2)
        for label in (-1, CLASSES):  # in the part of the batch of one rank alone: all ranks say it
            labels = torch.zeros(8, 3, dtype=torch.int64)
            labels[7, 2] = label
            with pytest.raises(
                ValueError, match=rf"CrossEntropyLoss2D got labels from {min(label, 0)} to {max(label, 0)}"
            ):
                criterion(logits, labels)
        with pytest.raises(
            ValueError, match=r"CrossEntropyLoss2D cuts dimension 0 of .* is 7, which the 2 ranks along col"
        ):
            criterion(logits, torch.zeros(7, 3, dtype=torch.int64))
        with pytest.raises(
            ValueError, match=r"CrossEntropyLoss2D got logits of shape \(4, 3, 8\).* \(4, 2\)"
        ):
            criterion(logits, torch.zeros(8, 2, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"reduction is 'none'; it must be 'mean' or 'sum'"):
            col_nn.CrossEntropyLoss2D(reduction="none")
        with pytest.raises(ValueError, match=r"label_smoothing is 1.5; it must be from 0 to 1"):
            col_nn.CrossEntropyLoss2D(label_smoothing=1.5)
        with pytest.raises(ValueError, match=r"CrossEntropyLoss3D needs a job launched with .*mode='3d'"):
            col_nn.CrossEntropyLoss3D()
    assert book.count() == 0


def nothing_counts(name):
    """As torch: the mean over no label is not a number, the sum is zero; the gradient of the sum is zero."""
    launch(name)
    labels = torch.full((8,), IGNORED)
    mean, total = (ParallelCrossEntropyLoss(reduction=r, cut=Cut(batch=("col",))) for r in ("mean", "sum"))
    logits = torch.randn(4, CLASSES).requires_grad_()
    total(logits, labels).backward()
    assert mean(logits, labels).isnan().item()
    assert logits.grad.abs().max().item() == 0.0


def padded_classes(name, *, classes):
    """Classes that the ranks do not divide: the padding of the classifier is no class."""
    mode = launch(name)
    torch.manual_seed(9)
    x, labels = torch.randn(8, 8), torch.randint(classes, (8,))
    torch.manual_seed(5)
    twin = nn.Linear(8, classes)
    wanted = nn.functional.cross_entropy(twin(x), labels, label_smoothing=0.1)
    wanted.backward()
    torch.manual_seed(5)
    restart(mode)
    layer = col_nn.Classifier(8, classes, vocab_parallel_limit=1)
    loss = col_nn.CrossEntropyLoss(label_smoothing=0.1)(layer(slice_like(x, layer.scheme.x)), labels)
    loss.backward()
    return {"loss": distance(loss, wanted), **gradient_errors(layer, twin)}


OF_ONE_MODE = {"1d": [large_logits], "2d": [sent_bytes, refusals, nothing_counts]}


@pytest.mark.parametrize("name", ["1d", "2d", *map(further, ("2.5d", "3d"))])  # 3d: tests/parity
def test_values_and_gradients(name):
    """Of all cases, behind classifiers, with classes that are padded; and what one mode stands for."""
    compared = [
        partial(all_cases, cells=pairwise(*OPTIONS)),
        follows_the_classifier,
        *(partial(padded_classes, classes=n) for n in (13, 9)),
    ]
    found = run_in_turn(MODES[name]["size"], name, *compared, *OF_ONE_MODE.get(name, []))
    for _, reports in zip(compared, found, strict=False):
        assert_small(reports)


@pytest.mark.long
@pytest.mark.parametrize("name", MODES)
def test_values_and_gradients_of_all_options(name):
    (reports,) = run_in_turn(
        MODES[name]["size"], name, partial(all_cases, cells=list(itertools.product(*OPTIONS)))
    )
    assert_small(reports)
