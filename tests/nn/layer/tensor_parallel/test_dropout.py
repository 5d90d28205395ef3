"""Dropout draws alike on ranks that hold the same slice, and not on ranks that hold different ones."""

import pytest
import torch
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai.context import ParallelMode, random_state, set_mode, set_random_state
from colossalai.core import global_context as gpc
from colossalai.nn.layer import Cut, ParallelDropout, next_linear, restart
from tests.nn.modes import MODES, launch, run_in_turn
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def mask_of(layer):
    return (layer(torch.ones(64)) > 0).tolist()


def masks(name):
    """Return (what cuts the activation, this rank's place in it, its mask) at several points of a model."""
    mode = launch(name)
    set_mode(ParallelMode.DATA)  # as an assembled model has it
    points = [restart(mode), next_linear(8, 8, mode=mode).scheme.y, Cut(), Cut(batch=restart(mode).batch)]
    found = []
    for cut in points:
        axes = (*cut.batch, *cut.features)
        layer = ParallelDropout(0.5, cut=cut)
        found.append((axes, gpc.mesh.axis_rank(axes), mask_of(layer), mask_of(layer)))
    return found


@pytest.mark.parametrize("name", ["1d", "2d", further("2.5d"), "3d"])
def test_masks_differ_with_the_slices_alone(name):
    for point in zip(*run_ranks(masks, MODES[name]["size"], name), strict=True):
        for axes, place, mask, second_mask in point:
            assert mask != second_mask
            for _, other_place, other_mask, _ in point:
                assert (mask == other_mask) == (place == other_place), axes


def follows_the_flow(name):
    """`col_nn.Dropout` takes the cut that the layer before it leaves, also one of the batch alone."""
    launch(name)
    restart("2d")
    col_nn.Linear2D(8, 8, gather_output=True)
    layer = col_nn.Dropout(0.5)
    assert layer.cut == Cut(batch=("col",))
    return gpc.mesh.axis_rank("col"), mask_of(layer)


def data_parallel():
    config = {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch_from_torch(config, verbose=False)
    return [mask_of(ParallelDropout(0.5, cut=cut)) for cut in (Cut(features=("tp",)), Cut(batch=("tp",)))]


def test_replicas_draw_differently():
    for point in zip(*run_ranks(data_parallel, 4), strict=True):
        assert len(set(map(tuple, point))) == 4


def saved_state(name):
    """What a partly cut activation draws follows from the state in force, which a checkpoint has."""
    launch(name)
    layer = ParallelDropout(0.5, cut=Cut(batch=("col",)))
    before = random_state()
    first, second = mask_of(layer), mask_of(layer)
    assert first != second
    set_random_state(before)
    assert [mask_of(layer), mask_of(layer)] == [first, second]


def test_dropout_behind_a_gathered_output_and_a_state_that_is_restored():
    results, _ = run_in_turn(4, "2d", follows_the_flow, saved_state)
    for place, mask in results:
        assert [mask == other for _, other in results] == [place == other for other, _ in results]


@pytest.mark.unit
def test_evaluation_and_a_process_alone():
    layer = ParallelDropout(0.5, cut=Cut(features=("tp",)))
    x = torch.ones(64)
    assert torch.equal(layer.eval()(x), x)
    torch.manual_seed(0)
    mine = layer.train()(x)
    torch.manual_seed(0)
    assert torch.equal(mine, nn.Dropout(0.5)(x))
