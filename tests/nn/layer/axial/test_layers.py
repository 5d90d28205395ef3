"""Layers of axial models: those of ESMFold with the same weights, and plain sums over all positions."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.esm import modeling_esmfold as esmfold

from colossalai.nn.layer.axial import (
    ColumnAttention,
    GatedAttention,
    GlobalColumnAttention,
    OuterProductMean,
    RowAttention,
    SharedDropout,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)

pytestmark = pytest.mark.unit

BATCH, ROWS, RESIDUES, DIM, PAIR_DIM, HEADS, HEAD_DIM = 2, 3, 5, 12, 8, 3, 4


def drawn(module: nn.Module) -> nn.Module:
    """Return a layer in float64 with random parameters, as new ones have outputs of 0."""
    torch.manual_seed(0)
    for param in module.double().parameters():
        nn.init.normal_(param, std=0.5)
    return module


def inputs(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return values, and a mask of which two thirds are True."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return values, torch.rand(*shape[:-1], generator=generator) < 0.67


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def copy_attention(theirs: nn.Module, own: GatedAttention) -> None:
    """Give the layer of ESMFold the weights of the own one."""
    for name in "qkvgo":
        full = {"q": "query", "k": "key", "v": "value", "g": "gate", "o": "out"}[name]
        getattr(theirs, f"linear_{name}").load_state_dict(getattr(own, full).state_dict())


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
def test_triangle_attention_is_that_of_esmfold(starting: bool, is_masked: bool) -> None:
    own = drawn(TriangleAttention(DIM, HEADS, HEAD_DIM, starting=starting))
    theirs = esmfold.EsmFoldTriangleAttention(DIM, HEAD_DIM, HEADS, starting=starting).double()
    theirs.layer_norm.load_state_dict(own.norm.state_dict())
    theirs.linear.load_state_dict({**theirs.linear.state_dict(), "weight": own.bias.weight})
    copy_attention(theirs.mha, own.attention)
    pair, mask = inputs(BATCH, RESIDUES, RESIDUES, DIM)
    mask[..., 0] = True
    given = mask if is_masked else None
    check(own(pair, given), theirs(pair, None if given is None else given.double()))


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
def test_triangle_multiplication_is_that_of_esmfold(outgoing: bool, is_masked: bool) -> None:
    own = drawn(TriangleMultiplication(DIM, outgoing=outgoing))
    config = SimpleNamespace(pairwise_state_dim=DIM)
    theirs = esmfold.EsmFoldTriangleMultiplicativeUpdate(config, _outgoing=outgoing).double()
    names = {
        "norm": "layer_norm_in",
        "left": "linear_a_p",
        "left_gate": "linear_a_g",
        "right": "linear_b_p",
        "right_gate": "linear_b_g",
        "product_norm": "layer_norm_out",
        "out": "linear_z",
        "gate": "linear_g",
    }
    for name, other in names.items():
        getattr(theirs, other).load_state_dict(getattr(own, name).state_dict())
    pair, mask = inputs(BATCH, RESIDUES, RESIDUES, DIM)
    given = mask if is_masked else None
    check(own(pair, given), theirs(pair, None if given is None else given.double()))


def attend(layer: GatedAttention, x: Tensor, bias: Tensor) -> Tensor:
    """Return the update of each position of one sequence (n, dim), by sums over all pairs of positions."""
    heads = (HEADS, HEAD_DIM)
    query, key, value = (linear(x).unflatten(-1, heads) for linear in (layer.query, layer.key, layer.value))
    scores = torch.einsum("ihd,jhd->hij", query, key) / HEAD_DIM**0.5 + bias
    mean = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value).flatten(-2)
    result: Tensor = layer.out(mean * layer.gate(x).sigmoid())
    return result


def test_attention_along_rows() -> None:
    own = drawn(RowAttention(DIM, HEADS, HEAD_DIM, PAIR_DIM))
    assert isinstance(own, RowAttention)
    x, mask = inputs(BATCH, ROWS, RESIDUES, DIM)
    pair, _ = inputs(BATCH, RESIDUES, RESIDUES, PAIR_DIM, seed=1)
    found = own(x, pair, mask)
    for sample in range(BATCH):
        bias = own.pair_bias(own.pair_norm(pair[sample])).permute(2, 0, 1)
        for row in range(ROWS):
            of_keys = torch.where(mask[sample, row], 0.0, -1e9)
            check(found[sample, row], attend(own.attention, own.norm(x[sample, row]), bias + of_keys))
    with pytest.raises(ValueError, match="has a pair_dim, and no pair was given: pass both or neither"):
        own(x)
    with pytest.raises(ValueError, match="has no pair_dim, and pair was given: pass both or neither"):
        RowAttention(DIM, HEADS, HEAD_DIM)(x, pair)
    assert torch.isfinite(own(x, pair, torch.zeros_like(mask))).all()


def test_attention_along_columns() -> None:
    own = drawn(ColumnAttention(DIM, HEADS, HEAD_DIM))
    x, mask = inputs(BATCH, ROWS, RESIDUES, DIM)
    found = own(x, mask)
    for sample in range(BATCH):
        for column in range(RESIDUES):
            of_keys = torch.where(mask[sample, :, column], 0.0, -1e9)
            wanted = attend(own.attention, own.norm(x[sample, :, column]), of_keys)
            check(found[sample, :, column], wanted)


def test_global_attention_along_columns() -> None:
    own = drawn(GlobalColumnAttention(DIM, HEADS, HEAD_DIM))
    x, mask = inputs(BATCH, ROWS, RESIDUES, DIM)
    mask[:, 0] = True
    found = own(x, mask)
    for sample in range(BATCH):
        for column in range(RESIDUES):
            values = own.norm(x[sample, :, column])
            exists = mask[sample, :, column]
            query = own.query(values[exists].mean(0)).unflatten(-1, (HEADS, HEAD_DIM))
            scores = (query @ own.key(values[exists]).mT) / HEAD_DIM**0.5
            mean = (scores.softmax(-1) @ own.value(values[exists])).flatten()
            check(found[sample, :, column], own.out(mean * own.gate(values).sigmoid()))


def test_outer_product_mean() -> None:
    own = drawn(OuterProductMean(DIM, PAIR_DIM, 6))
    x, mask = inputs(BATCH, ROWS, RESIDUES, DIM)
    found = own(x, mask)
    normed = own.norm(x)
    left, right = own.left(normed), own.right(normed)
    for sample in range(BATCH):
        for i in range(RESIDUES):
            for j in range(RESIDUES):
                both = mask[sample, :, i] & mask[sample, :, j]
                products = (left[sample, :, i, :, None] * right[sample, :, j, None, :])[both].sum(0)
                check(found[sample, i, j], own.out(products.flatten()) / (both.double().sum() + 1e-3))


def test_transition_and_new_layers() -> None:
    """A new layer adds nothing, so a deep model begins as the identity."""
    x, _ = inputs(BATCH, RESIDUES, RESIDUES, DIM)
    for layer in (
        Transition(DIM),
        RowAttention(DIM, HEADS, HEAD_DIM),
        ColumnAttention(DIM, HEADS, HEAD_DIM),
        GlobalColumnAttention(DIM, HEADS, HEAD_DIM),
        TriangleAttention(DIM, HEADS, HEAD_DIM, starting=True),
        TriangleMultiplication(DIM, outgoing=False),
    ):
        assert not layer.double()(x).any()
    assert not OuterProductMean(DIM, PAIR_DIM).double()(x).any()
    own = drawn(Transition(DIM, 2))
    hidden = torch.relu(own.norm(x) @ own.hidden.weight.T + own.hidden.bias)
    check(own(x), hidden @ own.out.weight.T + own.out.bias)


def test_sums_beyond_float16() -> None:
    """Autocast to float16 computes sums over sequences and over third residues in float32."""
    torch.manual_seed(0)
    x, pair = torch.randn(1, 300, 3, DIM), torch.randn(1, 64, 64, DIM)
    x[:], pair[:] = x[:, :1], pair[:, :1]  # all rows are alike: no sums cancel
    for layer, value in (
        (OuterProductMean(DIM, PAIR_DIM), x),
        (TriangleMultiplication(DIM, outgoing=True), pair),
        (TriangleMultiplication(DIM, outgoing=False), pair),
    ):
        for linear in (layer.left, layer.right):
            nn.init.normal_(linear.weight, std=20)
        nn.init.normal_(layer.out.weight, std=1e-3)
        wanted = layer(value)
        with torch.autocast("cpu", torch.float16):
            found = layer(value)
        assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_shapes_are_checked() -> None:
    x, pair = torch.randn(BATCH, ROWS, RESIDUES, DIM), torch.randn(BATCH, RESIDUES, RESIDUES, PAIR_DIM)
    rows = RowAttention(DIM, HEADS, HEAD_DIM, PAIR_DIM)
    with pytest.raises(ValueError, match=r"pair has the shape \(1, 5, 5, 8\); it must be \(2, 5, 5, 8\)"):
        rows(x, pair[:1])
    with pytest.raises(ValueError, match=r"bias has the shape \(5, 5\); it must be \(2, 3, 5, 5\)"):
        GatedAttention(DIM, HEADS, HEAD_DIM)(x, torch.zeros(RESIDUES, RESIDUES))
    mask = torch.ones(BATCH, 1, RESIDUES)
    with pytest.raises(ValueError, match=r"mask has the shape \(2, 1, 5\); it must be \(2, 3, 5\)"):
        rows(x, pair, mask)
    for layer in (
        ColumnAttention(DIM, HEADS, HEAD_DIM),
        GlobalColumnAttention(DIM, HEADS, HEAD_DIM),
        OuterProductMean(DIM, PAIR_DIM),
    ):
        with pytest.raises(ValueError, match=r"mask has the shape \(2, 1, 5\); it must be \(2, 3, 5\)"):
            layer(x, mask)
        with pytest.raises(ValueError, match=r"x has the shape .* it must be \(batch, rows, columns, 12\)"):
            layer(x[0])
    for layer in (
        TriangleAttention(PAIR_DIM, HEADS, HEAD_DIM, starting=False),
        TriangleMultiplication(PAIR_DIM, outgoing=True),
    ):
        with pytest.raises(ValueError, match=r"pair has the shape .* it must be \(batch, residues, 5, 8\)"):
            layer(pair[:, :, :4])
        with pytest.raises(ValueError, match=r"mask has the shape \(2, 1, 5\); it must be \(2, 5, 5\)"):
            layer(pair, mask)


def test_initial_values() -> None:
    """The gates of new layers are sigmoid(1)."""
    assert TriangleMultiplication(DIM, outgoing=True).left.out_features == DIM
    layer = TriangleMultiplication(DIM, 5, outgoing=True)
    assert layer.left.out_features == 5
    for gate in (layer.left_gate, layer.right_gate, layer.gate, GatedAttention(DIM, HEADS, HEAD_DIM).gate):
        assert not gate.weight.any()
        assert (gate.bias == 1).all()


@pytest.mark.parametrize("dim", [1, 2])
def test_shared_dropout(dim: int) -> None:
    layer = SharedDropout(0.5, dim)
    torch.manual_seed(0)
    found = layer(torch.ones(BATCH, 8, 8, DIM))
    assert {*found.unique().tolist()} == {0.0, 2.0}
    assert torch.equal(found, found.select(dim, 0).unsqueeze(dim).expand_as(found))
    assert found.select(dim, 0).unique(dim=1).shape[1] > 1
    assert layer.eval()(found) is found
    with pytest.raises(ValueError, match="p is 2; it must be a probability"):
        SharedDropout(2, dim)
