"""Ring attention against attention in one process: values, gradients, dropout, memory and bytes."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossalai.communication import ledger
from colossalai.context import Mesh, ParallelMode, get_seeds, set_mode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.sequence_parallel import (
    own_positions,
    ring_attention,
    zigzag_gather,
    zigzag_positions,
    zigzag_split,
)
from colossalai.nn.layer.sequence_parallel._tiles import Rules
from tests.harness.fake_job import fake_job
from tests.nn.layer.sequence_parallel.whole import (
    BATCH,
    HEAD,
    PADDINGS,
    SEQ,
    error_of,
    launch,
    whole_tensors,
)
from tests.ranks import run_ranks
from tests.tiers import further

HEADS = 3


def parity(size, tile_size, causal, order):
    axis = launch(size)
    scale = 0.3 if tile_size == 1 else None
    how = {"heads": HEADS, "causal": causal, "order": order, "scale": scale, "tile_size": tile_size}
    return {padding: error_of(ring_attention, axis, padding=padding, **how) for padding in PADDINGS}


@pytest.mark.dist
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "tile_size"), [(1, 3), (2, 1024), (4, 1024), (4, 1)])
def test_values_and_gradients(size, tile_size, causal, order):
    for worst in run_ranks(parity, size, size, tile_size, causal, order):
        for kind, error in worst.items():
            assert error < 1e-10, kind


def visible_pairs(order, size, tile_size):
    """For each rank and step of the ring the pairs of positions in the tiles that are computed, and seen."""
    found = []
    for rank in range(size):
        rules = Rules(
            order=order,
            axis_rank=rank,
            axis_size=size,
            sub_seq=SEQ // size,
            tile_size=tile_size,
            causal=True,
            scale=1.0,
            dropout_p=0.0,
            dropout_seed=0,
        )
        for step in range(size):
            pairs = [
                (query, key)
                for queries, keys in rules.tiles((rank - step) % size)
                for query in range(queries.start, queries.start + queries.size)
                for key in range(keys.start, keys.start + keys.size)
            ]
            found.append((rank, step, len(pairs), {pair for pair in pairs if pair[1] <= pair[0]}))
    return found


@pytest.mark.unit
@pytest.mark.parametrize("tile_size", [1, 2, 512])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_what_is_hidden_is_left_out(order, tile_size):
    found = visible_pairs(order, 4, tile_size)
    assert set().union(*(seen for *_, seen in found)) == {(q, k) for q in range(SEQ) for k in range(q + 1)}
    side = min(tile_size, 2 if order == "zigzag" else 4)
    tiles_in_a_row = SEQ // side
    assert (
        sum(computed for _, _, computed, _ in found) == tiles_in_a_row * (tiles_in_a_row + 1) // 2 * side**2
    )


@pytest.mark.unit
def test_zigzag_gives_all_ranks_the_same_work():
    work = {(rank, step): len(seen) for rank, step, _, seen in visible_pairs("zigzag", 4, 512)}
    for step in range(4):
        assert len({work[rank, step] for rank in range(4)}) == 1
    contiguous = {(rank, step): len(seen) for rank, step, _, seen in visible_pairs("contiguous", 4, 512)}
    assert contiguous[0, 1] == 0


def half_precision(dtype):
    """With sums in float32, the result is that of exact attention of the rounded inputs, rounded once."""
    axis = launch(2)
    q, k, v, grad = whole_tensors(HEADS, dtype)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scaled_dot_product_attention(*exact).backward(grad.double())
    rows = zigzag_positions(SEQ, axis)
    inputs = [tensor[:, :, rows].requires_grad_() for tensor in (q, k, v)]
    out = ring_attention(*inputs, axis=axis)
    grads = torch.autograd.grad(out, inputs, grad[:, :, rows], retain_graph=True)
    with torch.autocast("cpu", dtype=dtype):  # it does not reach the sums
        assert torch.equal(ring_attention(*inputs, axis=axis), out)
        out.backward(grad[:, :, rows])
    assert all(torch.equal(tensor.grad, first) for tensor, first in zip(inputs, grads, strict=True))
    for tensor, whole in zip(inputs, exact, strict=True):
        assert tensor.grad.dtype == dtype
        error = (tensor.grad.double() - whole.grad[:, :, rows]).abs().max()
        assert error < 2 * torch.finfo(dtype).eps * whole.grad.abs().max()


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    run_ranks(half_precision, 2, dtype)


def dropped(size, order, tile_size):
    axis = launch(size)
    set_mode(ParallelMode.TENSOR)  # as an assembled model has it
    torch.manual_seed(100 + axis.rank)  # the first rank draws for all
    mine = own_positions(SEQ, axis, order=order)
    q, k, v, grad = (tensor[:, :, mine] for tensor in whole_tensors(HEADS))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    found = []
    for _ in range(2):
        out = ring_attention(*inputs, axis=axis, causal=True, dropout_p=0.3, order=order, tile_size=tile_size)
        out.backward(grad)
        found += [out.detach(), *(tensor.grad for tensor in inputs)]
        for tensor in inputs:
            tensor.grad = None
    return mine, found


def assembled(size, order, tile_size):
    """The whole results of two calls, put together in the order of the sequence."""
    by_rank = run_ranks(dropped, size, size, order, tile_size)
    whole = [torch.empty(BATCH, HEADS, SEQ, HEAD, dtype=torch.float64) for _ in by_rank[0][1]]
    for mine, found in by_rank:
        for tensor, part in zip(whole, found, strict=True):
            tensor[:, :, mine] = part
    return whole


@pytest.mark.dist
def test_dropout_does_not_depend_on_ranks_order_or_tiles():
    one = assembled(1, "contiguous", 1024)
    assert not torch.allclose(one[0], one[4])  # two calls, two masks
    for size, order, tile_size in [(1, "zigzag", 5), (2, "zigzag", 1024), (4, "contiguous", 3)]:
        for tensor, expected in zip(assembled(size, order, tile_size), one, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


def alone():
    mesh = Mesh({"tp": 1}, rank=0)
    return mesh.axis("tp")


@pytest.mark.unit
def test_dropout_has_the_gradient_of_its_forward():
    q, k, v, _ = (tensor[:1, :1, :6].requires_grad_() for tensor in whole_tensors(HEADS))

    def run(*inputs):
        torch.manual_seed(3)
        return ring_attention(*inputs, axis=alone(), causal=True, dropout_p=0.4, tile_size=4)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.unit
def test_dropout_keeps_the_mean():
    """Uniform weights 1/n over values of 1: the result is the kept part of n weights over (1 - p)."""
    assert ParallelMode.DATA not in get_seeds()
    torch.manual_seed(0)
    n, p = 512, 0.25
    zero, one = torch.zeros(2, 2, n, 4), torch.ones(2, 2, n, 4)
    out = ring_attention(zero, zero, one, axis=alone(), dropout_p=p, tile_size=128)[..., 0]
    deviation = (p / (1 - p) / n) ** 0.5  # of one row
    assert abs(out.mean().item() - 1) < 4 * deviation / out.numel() ** 0.5
    assert 0.9 < out.std().item() / deviation < 1.1
    assert out.amax() < 1 + 6 * deviation
    rows = out.flatten(0, 1)
    correlation = torch.corrcoef(rows)[~torch.eye(4, dtype=torch.bool)]
    assert correlation.abs().max() < 5 / n**0.5  # samples and heads have masks of their own


@pytest.mark.unit
def test_dropped_weights_are_independent_of_each_other():
    torch.manual_seed(1)
    n = 256
    zero = torch.zeros(1, 1, n, n)
    kept = ring_attention(zero, zero, torch.eye(n)[None, None], axis=alone(), dropout_p=0.5)[0, 0] > 0
    signs = kept.double() * 2 - 1  # (queries, keys)
    bound = 6 / n**0.5  # of about 32,000 correlations, each of standard deviation n**-0.5
    for products in (signs @ signs.t() / n, signs.t() @ signs / n):
        assert products.fill_diagonal_(0).abs().max() < bound
    for delta in (1, 2, 7, 64):
        assert abs((signs[delta:, delta:] * signs[:-delta, :-delta]).mean()) < 6 / n


class LargestTile(TorchDispatchMode):
    """Remembers the largest product of the last two dimensions of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                self.largest = max(self.largest, tensor.shape[-1] * tensor.shape[-2])
        return result


def memory(size, tile_size):
    axis = launch(size)
    sub_seq = 64 // size
    inputs = [torch.randn(1, 2, sub_seq, 2, requires_grad=True) for _ in range(3)]
    padding = torch.zeros(1, sub_seq, dtype=torch.bool)
    saved = []

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    options = {"axis": axis, "dropout_p": 0.1, "key_padding_mask": padding, "tile_size": tile_size}
    with LargestTile() as mode, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = ring_attention(*inputs, **options)
        # The backward runs in a thread of its own for accelerators only: here the mode sees it.
        out.sum().backward()
    return mode.largest, sum(saved)


@pytest.mark.dist
@pytest.mark.parametrize(("size", "tile_size", "side"), [(4, 1024, 8), further(2, 1024, 16), (2, 8, 8)])
def test_no_rank_holds_a_row_of_scores(size, tile_size, side):
    sub_seq = 64 // size
    for largest, saved in run_ranks(memory, size, size, tile_size):
        assert largest == max(side * side, sub_seq * 2)
        assert largest < sub_seq * 64
        assert saved == 4 * 2 * sub_seq * 2 + 2 * sub_seq + sub_seq  # q, k, v, out; logsumexp; padding


@pytest.mark.mesh
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("size", "with_padding"), [(1, True), (2, True), (4, False), (256, True)])
def test_bytes_are_those_of_the_formula(size, with_padding, dtype):
    inputs = [torch.randn(2, 3, 4, 5, dtype=dtype, requires_grad=True) for _ in range(3)]
    padding = torch.zeros(2, 4, dtype=torch.bool) if with_padding else None
    with fake_job({"parallel": {"sequence": {"size": size}}}, size):
        axis = gpc.axis(ParallelMode.SEQUENCE)
        with ledger() as forward:
            out = ring_attention(*inputs, axis=axis, key_padding_mask=padding)
        with ledger() as backward:
            out.backward(torch.ones_like(out))
    n, e, m = inputs[1].numel(), dtype.itemsize, padding.nbytes if with_padding else 0
    a = max(e, 4)
    assert forward.num_bytes("shift", axis.name) == forward.num_bytes() == (size - 1) * (2 * n * e + m)
    assert backward.num_bytes("shift") == backward.num_bytes() == (size - 1) * (2 * n * e + m + 2 * n * a)


def order_of_the_sequence():
    axis = launch(4)
    whole = torch.randn(2, 16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = whole.clone().requires_grad_()
    mine = zigzag_split(x, 1, axis)
    at = zigzag_positions(16, axis)
    r = axis.rank
    assert at.tolist() == [2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r]
    assert torch.equal(mine, whole[:, at])
    again = zigzag_gather(mine, 1, axis)
    assert torch.equal(again, whole)
    (again * whole).sum().backward()
    torch.testing.assert_close(x.grad, whole)
    with pytest.raises(ValueError, match="a sequence of 12 positions over 4 ranks"):
        zigzag_split(whole[:, :12], 1, axis)


@pytest.mark.dist
def test_zigzag_order():
    run_ranks(order_of_the_sequence, 4)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(1, 1, 4, 3)}, "must have one shape"),
        ({"v": torch.ones(1, 1, 4, 2, dtype=torch.float64)}, "one type"),
        ({"key_padding_mask": torch.ones(1, 4)}, r"must be bool of shape \(batch, sub_seq\) = \(1, 4\)"),
        ({"key_padding_mask": torch.ones(1, 8, dtype=torch.bool)}, r"of shape \(1, 8\)"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"order": "striped"}, "order is 'striped'"),
        ({"tile_size": 0}, "tile_size is 0"),
        ({name: torch.ones(1, 1, 3, 2) for name in "qkv"}, "a rank holds 3 positions"),
    ],
)
def test_what_does_not_fit(change, message):
    options = {name: torch.ones(1, 1, 4, 2) for name in "qkv"} | {"axis": alone()} | change
    with pytest.raises(ValueError, match=message):
        ring_attention(options.pop("q"), options.pop("k"), options.pop("v"), **options)
