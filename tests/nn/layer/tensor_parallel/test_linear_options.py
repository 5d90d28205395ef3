"""Linear layers whose output is gathered or whose input is whole, and what they refuse."""

from functools import partial

import pytest
import torch
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer import LINEAR_SCHEMES, Cut, current_cut, product, restart
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
    slice_like,
)
from tests.ranks import run_ranks
from tests.tiers import further

SIZES = (8, 24)


def against_torch(build, x_cut, y_cut):
    """Compare a layer whose input and output are cut as given with torch's of the same random state."""
    torch.manual_seed(1)
    twin = nn.Linear(*SIZES)
    torch.manual_seed(1)
    layer = build(*SIZES)
    return compare(layer, twin, torch.randn(8, 3, SIZES[0]), x_cut=x_cut, y_cut=y_cut)


def gathered(name):
    mode = launch(name)
    cut = restart(mode)
    kind = getattr(col_nn, f"Linear{SUFFIXES[mode]}")
    batch = {"3d": ("wgt", "out")}.get(mode, cut.batch)
    errors = against_torch(lambda *sizes: kind(*sizes, gather_output=True), cut, Cut(batch=batch))
    assert current_cut(mode) == Cut(batch=batch)
    return errors


def columns_and_rows():
    launch("1d")
    whole, cut = Cut(), Cut(features=("tp",))
    cases = {
        "columns": (col_nn.Linear1D_Col, whole, cut),
        "columns, gathered": (lambda *sizes: col_nn.Linear1D_Col(*sizes, gather_output=True), whole, whole),
        "rows": (col_nn.Linear1D_Row, cut, whole),
        "rows of a whole input": (
            lambda *sizes: col_nn.Linear1D_Row(*sizes, parallel_input=False),
            whole,
            whole,
        ),
    }
    return by_case({case: against_torch(*row) for case, row in cases.items()})


@pytest.mark.dist
def test_columns_and_rows_by_name():
    assert_small(run_ranks(columns_and_rows, 2))


class Apart(nn.Module):
    """Adds the bias that a layer was told to leave to its caller."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.layer = layer

    def named_parameters(self, *args, **kwargs):
        return self.layer.named_parameters(*args, **kwargs)

    def forward(self, x):
        y, bias = self.layer(x)
        return y + bias


def biases_apart(name):
    """`skip_bias_add` gives the output and the bias, which together are the layer."""
    mode = launch(name)
    kind = getattr(col_nn, f"Linear{SUFFIXES[mode]}")
    cases = {}
    for gather in (False, True):
        cut = restart(mode)
        options = {"input_cut": cut, "gather_output": gather}
        left = kind(*SIZES, **options).output_cut
        build = partial(kind, **options, skip_bias_add=True)
        cases[gather] = against_torch(lambda *sizes, build=build: Apart(build(*sizes)), cut, left)
    without = kind(*SIZES, bias=False, skip_bias_add=True, input_cut=cut)
    assert without(slice_like(torch.ones(8, SIZES[0]), cut))[1] is None
    return by_case(cases)


def in_chunks():
    """Parts of the output are summed while the next ones are computed: the same values, in more messages."""
    launch("1d")
    builds = {num_chunks: partial(col_nn.Linear1D_Row, stream_chunk_num=num_chunks) for num_chunks in (3, 24)}
    cut = Cut(features=("tp",))
    errors = by_case({num_chunks: against_torch(build, cut, Cut()) for num_chunks, build in builds.items()})
    layer = col_nn.Linear1D_Row(8, 24, stream_chunk_num=3)
    with ledger() as book, torch.no_grad():
        layer(torch.ones(2, 4))
    assert book.count("all_reduce") == 3
    for wrong in (0, 25):
        with pytest.raises(ValueError, match=rf"stream_chunk_num is {wrong}; it must be from 1 to 24"):
            col_nn.Linear1D_Row(8, 24, stream_chunk_num=wrong)
    return errors


@pytest.mark.dist
def test_a_row_layer_that_sums_in_chunks():
    assert_small(run_ranks(in_chunks, 2))


def all_classes(name):
    """A vocabulary-parallel classifier whose output is gathered has the logits of all classes, unpadded."""
    mode = launch(name)
    torch.manual_seed(1)
    twin = nn.Linear(8, 15)
    torch.manual_seed(1)
    cut = restart(mode)
    layer = getattr(col_nn, f"VocabParallelClassifier{SUFFIXES[mode]}")(8, 15, gather_output=True)
    x = torch.randn(8, 8)
    wanted = slice_like(twin(x), Cut(batch=layer.scheme.y.batch))
    return {"y": distance(layer(slice_like(x, cut)), wanted)}


@pytest.mark.mesh
def test_what_does_not_fit_along_one_dimension_is_refused_before_any_collective():
    with in_one_process("1d") as mode, ledger() as book:
        restart(mode)
        with pytest.raises(ValueError, match=r"Linear2D needs a job launched with .*mode='2d'.* is '1d'"):
            col_nn.Linear2D(*SIZES)
        with pytest.raises(
            ValueError, match=r"weight of Linear1D_Col: dimension 0 .* is 7, .* 2 ranks along tp"
        ):
            col_nn.Linear1D_Col(8, 7)
        with pytest.raises(
            ValueError, match=r"weight of Linear1D_Row: dimension 1 .* is 7, .* 2 ranks along tp"
        ):
            col_nn.Linear1D_Row(7, 8)
        with pytest.raises(
            ValueError, match=r"Linear1D_Row .*\(3, 8\).* 4, the 8 features over 2 ranks along"
        ):
            col_nn.Linear1D_Row(8, 8)(torch.ones(3, 8))
        for features in (7, 4):  # the first would be right for one rank of the two
            with pytest.raises(ValueError, match=rf"Linear1D_Row .*\(3, {features}\).* must be 8"):
                col_nn.Linear1D_Row(8, 8, parallel_input=False)(torch.ones(3, features))
        assert book.count() == 0


@pytest.mark.mesh
def test_what_does_not_fit_along_three_dimensions_is_refused_before_any_collective():
    with in_one_process("3d") as mode, ledger() as book:
        restart(mode)
        with pytest.raises(
            ValueError, match=r"weight of Linear3D: dimension 1 .* is 6, .* 4 ranks along inp x wgt"
        ):
            col_nn.Linear3D(8, 6)
        with pytest.raises(
            ValueError, match=r"weight of Linear3D: dimension 0 .* is 7, .* 2 ranks along out"
        ):
            col_nn.Linear3D(7, 8)
        with pytest.raises(ValueError, match=r"Linear3D .*\(4, 8\).* 4, the 8 features over 2 .*'out'"):
            col_nn.Linear3D(8, 8)(torch.ones(4, 8))
        assert book.count() == 0


def refusals_without_a_mode():
    colossalai.launch_from_torch({}, verbose=False)
    assert gpc.tensor_mode is None
    with pytest.raises(ValueError, match=r"Linear1D needs a job launched with .*mode='1d'.* is None"):
        col_nn.Linear1D(*SIZES)
    assert type(col_nn.Linear(*SIZES)) is nn.Linear


@pytest.mark.dist
def test_without_a_mode_layers_that_need_one_are_refused():
    run_ranks(refusals_without_a_mode, 1)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["1d", "2d", further("2.5d"), further("3d")])
def test_an_output_that_is_gathered_and_a_bias_that_is_left_to_the_caller(name):
    functions = [gathered, biases_apart, *[all_classes] * (name in ("1d", "3d"))]
    for reports in run_in_turn(MODES[name]["size"], name, *functions):
        assert_small(reports)


def half_precision_errors(dtype):
    """Return how far the products of mode "2d" and of one process in half precision are from float64's."""
    launch("2d")
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(64, size, generator=generator) for size in (256, 128))
    w = torch.randn(256, 128, generator=generator)
    exact = [x @ w, dy @ w.t(), x.t() @ dy]
    x, dy, w = (tensor.to(dtype) for tensor in (x, dy, w))
    alone = [x @ w, dy @ w.t(), x.t() @ dy]
    cut = Cut(batch=("col",), features=("row",))
    own_x, own_w, own_dy = (slice_like(tensor, cut).requires_grad_() for tensor in (x, w, dy))
    y = product(own_x, own_w, LINEAR_SCHEMES["2d"][0], gpc.mesh)
    found = [y.detach(), *torch.autograd.grad(y, [own_x, own_w], own_dy)]
    assert {part.dtype for part in found} == {dtype}
    return [
        ((part.double() - slice_like(right, cut)).norm().item(), (one.double() - right).norm().item())
        for part, one, right in zip(found, alone, exact, strict=True)
    ]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_twice_as_one_process(dtype):
    for parts in zip(*run_ranks(half_precision_errors, 4, dtype), strict=True):  # y, dx, dw
        error = sum(own**2 for own, _ in parts) ** 0.5
        assert error <= 2 * parts[0][1]
