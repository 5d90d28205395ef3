"""Layer normalization in every mode against torch's in one process."""

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.communication import ledger
from colossalai.nn.layer import next_linear, restart
from colossalai.tensor import spec_of
from tests.nn.modes import (
    MODES,
    SUFFIXES,
    assert_small,
    by_case,
    compare,
    distance,
    in_one_process,
    launch,
    run_in_turn,
    same_start,
    slice_like,
)
from tests.tiers import further

FEATURES = 16


def against_torch(mode, *, bias, after_linear):
    """Compare at the start of a model, or behind a linear layer, which cuts otherwise in 1d and 3d."""
    restart(mode)
    before = next_linear(FEATURES, FEATURES, mode=mode) if after_linear else None
    layer = getattr(col_nn, f"LayerNorm{SUFFIXES[mode]}")(FEATURES, bias=bias, after=before)
    twin = nn.LayerNorm(FEATURES, bias=bias)
    same_start(layer, twin)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, param in twin.named_parameters():
            own = layer.get_parameter(name)
            own.copy_(spec_of(own).slice_of(param.normal_()))
    x = torch.randn(8, 3, FEATURES) + 5.0
    return compare(layer, twin, x, x_cut=layer.cut, y_cut=layer.cut)


def all_cases(name):
    mode = launch(name)
    return by_case(
        {
            f"{bias=}, {after_linear=}": against_torch(mode, bias=bias, after_linear=after_linear)
            for bias in (True, False)
            for after_linear in (False, True)
        }
    )


def half_precision(name):
    """Statistics of bfloat16 are taken in float32: a large common offset does not drown the variance."""
    mode = launch(name)
    layer = col_nn.LayerNorm(64, dtype=torch.bfloat16)
    torch.manual_seed(0)
    x_whole = (torch.randn(8, 64) + 30.0).to(torch.bfloat16)
    wanted = nn.functional.layer_norm(x_whole.double(), (64,))
    y = layer(slice_like(x_whole, restart(mode)))
    assert y.dtype is torch.bfloat16
    return distance(y.double(), slice_like(wanted, layer.cut))


@pytest.mark.mesh
def test_what_does_not_fit_is_refused_before_any_collective():
    with in_one_process("2d") as mode, ledger() as book:
        restart(mode)
        with pytest.raises(
            ValueError, match=r"the weight of LayerNorm2D: dimension 0 .* is 15, .* 2 ranks along row"
        ):
            col_nn.LayerNorm2D(15)
        layer = col_nn.LayerNorm2D(16)
        with pytest.raises(ValueError, match=r"LayerNorm2D .*\(4, 16\).* 8, the 16 features .*\('row',\)"):
            layer(torch.ones(4, 16))
        with pytest.raises(ValueError, match=r"LayerNorm3D needs a job launched with .*mode='3d'.* is '2d'"):
            col_nn.LayerNorm3D(16)
        assert book.count() == 0


OF_ONE_MODE = {"2d": [half_precision], "3d": [half_precision]}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["1d", "2d", *map(further, ("2.5d", "3d"))])  # 3d: tests/parity
def test_values_and_gradients(name):
    """And statistics in float32."""
    errors, *more = run_in_turn(MODES[name]["size"], name, all_cases, *OF_ONE_MODE.get(name, []))
    assert_small(errors)
    for error in more[0] if more else ():
        assert error <= 2**-7  # half a unit in the last place of bfloat16 from 2 to 4
