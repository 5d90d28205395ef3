"""Layers that are applied in another order than they are built in: told, or refused, never a wrong number."""

import os
import pickle

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.communication import ledger, split_forward_gather_backward
from colossalai.core import global_context as gpc
from colossalai.nn.layer import Cut, current_cut, first_cut, mark_cut, recorded_cut
from tests.nn.modes import MODES, distance, launch, run_in_turn, slice_like, whole
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

WIDTH = 8


class Attention(nn.Module):
    """Query, key and value from layers of their own."""

    def __init__(self, *, told=False):
        super().__init__()
        self.norm = col_nn.LayerNorm(WIDTH)
        said = {"after": self.norm} if told else {}
        self.query = col_nn.Linear(WIDTH, WIDTH, **said)
        self.key = col_nn.Linear(WIDTH, WIDTH, **said)
        self.value = col_nn.Linear(WIDTH, WIDTH, **said)
        self.out = col_nn.Linear(WIDTH, WIDTH)  # behind the value, as it was built

    def forward(self, x):
        x = self.norm(x)
        return self.out(torch.sigmoid(self.query(x)) * self.key(x) + self.value(x))


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    forward = Attention.forward


def attention(name):
    """A model that says what its layers are applied to equals torch's; one that does not is refused."""
    mode = launch(name)
    torch.manual_seed(0)
    twin = TorchAttention()
    torch.manual_seed(0)
    model = Attention(told=True)
    x = torch.randn(8, 3, WIDTH)
    own = slice_like(x, first_cut(mode)).requires_grad_()
    x.requires_grad_()
    dy = torch.randn(8, 3, WIDTH)
    twin(x).backward(dy)
    y = model(own)
    assert recorded_cut(y) == model.out.output_cut
    y.backward(slice_like(dy, model.out.output_cut))
    errors = [distance(own.grad, slice_like(x.grad, first_cut(mode)))]
    for part, param in model.named_parameters():
        errors.append(distance(whole(param, param.grad), twin.get_parameter(part).grad))
    with torch.no_grad():
        errors.append(distance(model(own), slice_like(twin(x), model.out.output_cut)))
    assert max(errors) < 1e-12
    wrong = Attention()
    for mode_of_grad in (torch.enable_grad, torch.no_grad):
        with mode_of_grad(), pytest.raises(ValueError, match=REFUSALS[name]):
            wrong(own)


REFUSALS = {
    "1d": r"last dimension must be 4.*; it was built behind Linear1D\(8, 8\) \[layer \d\]: .*after=that",
    "3d": r"Linear3D\(8, 8\) \[layer \d\] takes .* as it was built behind Linear3D\(8, 8\) \[layer \d\], but "
    r"its input comes from LayerNorm3D\(8\) \[layer \d\], cut as .*after=that_layer",
}


def order_3d(name):
    launch(name)
    first, second, third = (col_nn.Linear(WIDTH, WIDTH) for _ in range(3))
    x = slice_like(torch.randn(8, WIDTH), first_cut("3d"))
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), ledger() as book:
            hidden = third(torch.relu(second(first(x).relu()) + x))  # the order of construction
            assert type(torch.relu(hidden).chunk(2)[0]) is type(hidden)
            sent = book.count()
            with pytest.raises(ValueError, match=r"comes from no layer, as the input of a model does"):
                second(x)
            with pytest.raises(ValueError, match=r"Linear3D.*2\] takes .*its input comes from Linear3D.*2\]"):
                second(second(first(x)))
            more = book.count()
            with pytest.raises(ValueError, match=r"\[layer 3\] takes .*its input comes from .*\[layer 1\]"):
                third(first(x) + x)  # a sum of two slices that have nothing to do with each other
        assert more - sent == 2 * sent // 3
    frozen = first.requires_grad_(False)(x)
    assert frozen.grad_fn is None
    with pytest.raises(ValueError, match=r"\[layer 3\] takes .*its input comes from .*\[layer 1\]"):
        third(frozen * 2.0)
    with open(os.devnull, "wb") as file:
        torch.save(frozen, file)
    assert "RecordedTensor" not in str(pickle.dumps(frozen))


def told(name):
    """What can be said, what is refused when it is built, and what was moved by hand."""
    launch(name)
    start = first_cut("3d")
    first = col_nn.Linear(WIDTH, WIDTH)
    beside = col_nn.Linear(WIDTH, WIDTH, input_cut=first.input_cut)
    assert beside.scheme == first.scheme
    with pytest.raises(ValueError, match="got input_cut= and after=: pass only one"):
        col_nn.Linear(WIDTH, WIDTH, input_cut=start, after=first)
    with pytest.raises(ValueError, match=r"after=ReLU, which does not know how its output is cut"):
        col_nn.Linear(WIDTH, WIDTH, after=nn.ReLU())
    with pytest.raises(ValueError, match="does not take an input cut as"):
        col_nn.Linear(WIDTH, WIDTH, input_cut=Cut(batch=("inp",)))
    with pytest.raises(
        ValueError, match=r"takes 16 features, but Linear3D\(8, 8\).*leaves 8, cut as .*after="
    ):
        col_nn.Linear(16, WIDTH)
    by_hand = col_nn.Linear(WIDTH, WIDTH, after=beside)
    x = slice_like(torch.randn(8, WIDTH), start)
    assert torch.equal(by_hand(x), by_hand(x))  # nothing is known of it but what was said
    moved = split_forward_gather_backward(beside(x), gpc.mesh.axis("wgt"), 0)
    assert recorded_cut(moved) is None
    with pytest.raises(ValueError, match=r"its input comes from mark_cut, cut as"):
        by_hand(mark_cut(beside(x), start))
    head = col_nn.Classifier(WIDTH, 4, after=beside)
    assert head.output_cut == Cut(batch=beside.output_cut.batch)
    assert current_cut("3d") == start
    losses = {"its own": col_nn.CrossEntropyLoss(), "told": col_nn.CrossEntropyLoss(cut=head.output_cut)}
    col_nn.Classifier(WIDTH, 4, input_cut=start)  # another one, built last but not applied
    labels = torch.randint(4, (8,))
    found = [loss(head(beside(x)), labels) for loss in losses.values()]
    assert torch.equal(*found)
    with torch.no_grad():
        assert type(losses["told"](head(beside(x)), labels)) is torch.Tensor
        for late in (col_nn.CrossEntropyLoss(), col_nn.metric.Accuracy()):
            with pytest.raises(
                ValueError, match=r"got the output of Classifier3D\(8, 4\).*cut=layer.output_cut"
            ):
                late(head(beside(x)), labels)


@pytest.mark.parametrize(
    ("name", "functions"), [("1d", (attention,)), ("3d", (attention, order_3d, told))], ids=["1d", "3d"]
)
def test_layers_that_share_an_input_their_order_and_what_can_be_said(name, functions):
    run_in_turn(MODES[name]["size"], name, *functions)


def dropouts():
    """One dropout at two points of a model draws alike on the ranks that hold the same, at each of them."""
    launch("1d")
    up = col_nn.Linear(WIDTH, WIDTH)
    dropout = col_nn.Dropout(0.5)
    down = col_nn.Linear(WIDTH, WIDTH)
    x = torch.ones(4, WIDTH)
    return [(dropout(y) == 0).tolist() for y in (up(x), down(up(x)))]


def test_a_dropout_that_is_applied_twice():
    first, second = run_ranks(dropouts, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]


@pytest.mark.unit
def test_without_a_mode_all_is_plain():
    layer = col_nn.Linear(4, 4)
    follower = col_nn.Linear(4, 4, after=layer)
    assert type(follower) is nn.Linear
    assert type(col_nn.LayerNorm(4, input_cut=Cut())) is nn.LayerNorm
    with pytest.raises(ValueError, match="there is no tensor mode that cuts anything"):
        col_nn.Linear(4, 4, input_cut=Cut(features=("tp",)))
