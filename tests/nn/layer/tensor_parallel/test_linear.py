"""The linear layer in every mode: documented shapes, values, gradients, and the bytes of the formula."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from colossalai.communication import copy_forward_reduce_backward, ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer import mark_cut, next_linear, restart
from tests.nn.modes import MODES, assert_small, compare, in_one_process, launch, run_in_turn, slice_like
from tests.tiers import further

SHAPES = {  # weight 1, weight 2, input, after layer 1, after layer 2, as documented
    "1d": [(512, 256), (256, 512), (16, 256), (16, 512), (16, 256)],
    "2d": [(128, 512), (512, 128), (8, 128), (8, 512), (8, 128)],
    "2.5d": [(128, 512), (512, 128), (4, 128), (4, 512), (4, 128)],
    "3d": [(128, 256), (512, 64), (4, 128), (4, 512), (4, 128)],
}


@pytest.mark.mesh
@pytest.mark.parametrize("name", SHAPES)
def test_documented_shapes(name):
    with in_one_process(name) as mode:
        cut = restart(mode)
        layers = [next_linear(256, 1024, mode=mode), next_linear(1024, 256, mode=mode)]
        x = slice_like(torch.randn(16, 256), cut)
        hidden = layers[0](x)
        found = [layers[0].weight, layers[1].weight, x, hidden, layers[1](hidden)]
    assert [tuple(tensor.shape) for tensor in found] == SHAPES[name]


def parity(name, *, num_layers, bias, in_panels):
    """Layers between a (batch, seq, features) input and a weighted sum, against torch.nn.Linear."""
    mode = launch(name)
    sizes = list(itertools.pairwise([8, 16, 24, 8][: num_layers + 1]))
    torch.manual_seed(1)
    twins = nn.Sequential(*(nn.Linear(a, b, bias) for a, b in sizes))
    torch.manual_seed(1)
    cut = restart(mode)
    layers = nn.Sequential(*(next_linear(a, b, bias, mode=mode) for a, b in sizes))
    for layer in layers:
        layer.in_panels = in_panels
    return compare(layers, twins, torch.randn(8, 3, 8), x_cut=cut, y_cut=layers[-1].scheme.y)


@pytest.mark.mesh
@pytest.mark.parametrize("name", MODES)
def test_bytes_are_those_of_the_formula(name):
    p = MODES[name]["size"]
    depth = MODES[name].get("depth", 1)
    q = round(p ** (1 / 3)) if name == "3d" else 2
    with in_one_process(name, rank=p - 1) as mode:
        x = slice_like(torch.randn(16, 8), restart(mode)).requires_grad_()
        for sizes in [(8, 24), (24, 8)]:
            layer = next_linear(*sizes, bias=False, mode=mode)
            with ledger() as book:
                y = layer(x)
                y.backward(torch.ones_like(y))
            x_bytes, w_bytes, y_bytes = x.nbytes, layer.weight.nbytes, y.nbytes
            formula = {
                "1d": 2 * (p - 1) / p * (x_bytes if mode == "1d" and layer.scheme.copy_x else y_bytes),
                "2d": 3 * (q - 1) * (x_bytes + w_bytes),
                "2.5d": 3 * (q - 1) * (x_bytes + w_bytes) + 2 * (depth - 1) / depth * w_bytes,
                "3d": 2 * (q - 1) * (x_bytes + w_bytes + y_bytes),
            }[mode]
            assert book.num_bytes() == pytest.approx(formula)
            x = mark_cut(y.detach(), layer.output_cut).requires_grad_()


@pytest.mark.mesh
def test_what_does_not_fit_is_refused():
    with in_one_process("2d") as mode:
        restart(mode)
        with pytest.raises(ValueError, match=r"the weight of Linear2D: dimension .* is 7, which the 2"):
            next_linear(8, 7, mode=mode)
        with pytest.raises(
            ValueError, match=r"its last dimension must be 4, the 8 features over 2 ranks along \('row',\)"
        ):
            next_linear(8, 8, mode=mode)(torch.ones(2, 8))
        assert copy_forward_reduce_backward(torch.ones(1), gpc.mesh.axis("dp")).item() == 1


def cases_of(name, *, all_of_them=False):
    """Yield what is compared with torch's layers in a mode; only 2d and 2.5d have panels."""
    for (num_layers, bias), panels in (((2, True), True), ((3, False), False)):
        for in_panels in (True, False) if all_of_them else (panels or name not in ("2d", "2.5d"),):
            yield partial(parity, num_layers=num_layers, bias=bias, in_panels=in_panels)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("name", ["2d", "2.5d"])
def test_with_and_without_panels(name):
    for errors in run_in_turn(MODES[name]["size"], name, *cases_of(name, all_of_them=True)):
        assert_small(errors)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["1d", further("1d-4"), "2d", "2.5d", "3d"])
def test_values_and_gradients(name):
    for errors in run_in_turn(MODES[name]["size"], name, *cases_of(name)):
        assert_small(errors)
