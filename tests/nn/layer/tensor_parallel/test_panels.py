"""A product in panels holds one panel of each operand beside its own slices and the result, and no more.

One process of a fake group does what a rank does: what is received is never written, but memory is taken.
"""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colossalai.cli._benchmark._measure import saved_bytes
from colossalai.context import Mesh
from colossalai.nn.layer import HEAD_SCHEMES, LINEAR_SCHEMES, product
from colossalai.nn.layer.tensor_parallel._panels import _add_product, _zeros_of_sum
from tests.nn.live_bytes import LiveBytes

pytestmark = pytest.mark.mesh

Q, DEPTH = 4, 2
BATCH, IN, OUT = 6, 10, 14  # of a rank's slices: no two operands have the same size


@pytest.fixture(params=[0, 5, 15, 31])
def mesh(request):
    """The mesh of one rank of a 2.5d grid, of which each layer is a 2d one."""
    axes = {"edp": 1, "ep": 1, "pp": 1, "dep": DEPTH, "col": Q, "row": Q}
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=DEPTH * Q * Q)
    yield Mesh(axes, rank=request.param)
    dist.destroy_process_group()


def peaks(x, w, scheme, mesh, *, in_panels):
    """Return the peaks of the forward, of the backward, and the bytes of the output."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    with LiveBytes(x, w) as forward:
        y = product(x, w, scheme, mesh, in_panels=in_panels)
    dy = torch.ones_like(y)
    with LiveBytes(x, w, y, dy) as backward:
        gradients = torch.autograd.grad(y, [x, w], dy)
    assert [g.shape for g in gradients] == [x.shape, w.shape]
    return forward.peak, backward.peak, y.nbytes


@pytest.mark.parametrize("mode", ["2d", "2.5d"])
def test_a_linear_layer_holds_one_panel_of_each_operand(mesh, mode):
    x, w = torch.ones(BATCH, 3, IN), torch.ones(IN, OUT)
    scheme = LINEAR_SCHEMES[mode][0]
    forward, backward, y_bytes = peaks(x, w, scheme, mesh, in_panels=True)
    panels = x.nbytes + w.nbytes
    assert y_bytes + panels / 2 < forward <= y_bytes + panels
    assert panels <= backward <= x.nbytes + w.nbytes + panels  # both gradients and the panels
    forward, backward, _ = peaks(x, w, scheme, mesh, in_panels=False)
    assert forward >= y_bytes + Q * panels
    assert backward >= panels + Q * panels


@pytest.mark.parametrize("mode", ["2d", "2.5d"])
def test_a_classifier_holds_one_panel_of_the_weight_and_one_of_the_output(mesh, mode):
    x, v = torch.ones(BATCH, 3, IN), torch.ones(OUT, IN)  # the weight is stored (classes, features)
    scheme = HEAD_SCHEMES[mode][0]
    forward, backward, y_bytes = peaks(x, v.t(), scheme, mesh, in_panels=True)
    assert y_bytes < forward <= y_bytes + v.nbytes + y_bytes
    assert x.nbytes + v.nbytes < backward <= x.nbytes + v.nbytes + v.nbytes + y_bytes
    forward, _, _ = peaks(x, v.t(), scheme, mesh, in_panels=False)
    assert forward >= Q * (y_bytes + v.nbytes)


def test_a_transposed_operand_costs_no_second_panel(mesh):
    """What is received is in one piece of memory even if this rank's slice is not."""
    x, w = torch.ones(IN, BATCH).t(), torch.ones(OUT, IN).t()
    forward, backward, y_bytes = peaks(x, w, LINEAR_SCHEMES["2d"][0], mesh, in_panels=True)
    assert forward <= y_bytes + x.nbytes + w.nbytes
    assert backward <= 2 * (x.nbytes + w.nbytes)


@pytest.mark.parametrize("in_panels", [True, False])
def test_what_is_kept_for_the_backward(mesh, in_panels):
    x, w = torch.ones(BATCH, 3, IN, requires_grad=True), torch.ones(IN, OUT, requires_grad=True)
    with saved_bytes([]) as kept:
        product(x, w, LINEAR_SCHEMES["2d"][0], mesh, in_panels=in_panels)
    assert kept.num_bytes == (x.nbytes + w.nbytes) * (1 if in_panels else Q)


@pytest.mark.parametrize("rank", [0, 7])
def test_the_3d_product_keeps_gathered_operands(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    axes = {"edp": 1, "ep": 1, "pp": 1, "out": 2, "inp": 2, "wgt": 2}
    x, w = torch.ones(BATCH, 3, IN, requires_grad=True), torch.ones(IN, OUT, requires_grad=True)
    with saved_bytes([]) as kept:
        product(x, w, LINEAR_SCHEMES["3d"][0], Mesh(axes, rank=rank))
    dist.destroy_process_group()
    assert kept.num_bytes == 2 * (x.nbytes + w.nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    """Many panels that are all alike: a sum in half precision would stop growing."""
    size = 1024
    x, w = torch.full((1, 1), 1.0, dtype=dtype), torch.full((1, 1), 1.01, dtype=dtype)
    total = _zeros_of_sum(x, (1, 1))
    for _ in range(size):
        _add_product(total, x, w)
    assert total.item() == pytest.approx(size * w.item(), rel=1e-5)
