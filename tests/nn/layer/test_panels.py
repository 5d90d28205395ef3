"""A product in panels holds one panel of each operand beside its own slices and the result, and no more.

One process of a fake group does what a rank does: what is received is never written, but memory is taken.
"""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colossalai.context import Mesh
from colossalai.nn.layer import HEAD_SCHEMES, LINEAR_SCHEMES, product
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
