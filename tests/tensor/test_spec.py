"""Specs: boxes tile the tensor, slices gather to the whole, norms are of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.tensor import (
    ShardingSpec,
    cut_dims,
    global_grad_norm,
    gradient_sync,
    set_spec,
    spec_of,
)
from tests.launched import on_ranks

AXES = {"dp": 2, "col": 3, "row": 2}


@st.composite
def cuts(draw):
    """Draw which dimension each axis cuts, if any, of how many parts, and a shape that they divide."""
    num_dims = draw(st.integers(1, 3))
    dims = [[] for _ in range(num_dims)]
    parts = tuple(draw(st.integers(1, 3)) for _ in range(num_dims))
    shape = [draw(st.integers(1, 3)) * num_parts for num_parts in parts]
    for axis in draw(st.permutations(list(AXES))):
        target = draw(st.integers(-1, num_dims - 1))
        if target >= 0:
            dims[target].append(axis)
            shape[target] *= AXES[axis]
    return tuple(shape), tuple(map(tuple, dims)), parts


@pytest.mark.unit
@given(cuts())
def test_boxes_tile_the_tensor_once_for_each_replica(cut):
    shape, dims, parts = cut
    covered = torch.zeros(shape)
    spec = ShardingSpec(shape, dims, Mesh(AXES, rank=0), parts=parts)
    for rank in range(12):
        for region in spec.regions(rank):
            covered[tuple(slice(offset, offset + size) for offset, _, size in region)] += 1
    replicas = 12
    for axis in spec.axes:
        replicas //= AXES[axis]
    assert (covered == replicas).all()


@pytest.mark.unit
@given(cuts(), st.integers(0, 11))
def test_a_slice_is_that_of_the_box(cut, rank):
    shape, dims, parts = cut
    spec = ShardingSpec(shape, dims, Mesh(AXES, rank=rank), parts=parts)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    part = spec.cut(whole)
    assert tuple(part.shape) == spec.local_shape
    seen = torch.zeros(part.shape)
    for region in spec.regions():
        here = tuple(slice(local, local + size) for _, local, size in region)
        there = tuple(slice(offset, offset + size) for offset, _, size in region)
        assert torch.equal(part[here], whole[there])
        seen[here] += 1
    assert (seen == 1).all()


@pytest.mark.unit
@given(cuts(), st.integers(0, 11), st.randoms(use_true_random=False))
def test_what_is_stored_in_another_order_is_a_slice_of_the_permuted_whole(cut, rank, random):
    shape, dims, parts = cut
    order = tuple(random.sample(range(len(shape)), len(shape)))
    spec = ShardingSpec(shape, dims, Mesh(AXES, rank=rank), stored_as=order, parts=parts)
    stored = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = stored.permute([order.index(dim) for dim in range(len(shape))])
    assert spec.whole_shape == tuple(whole.shape)
    assert torch.equal(whole.permute(order), stored)
    assert torch.equal(spec.slice_of(whole), spec.cut(stored))
    assert spec.is_identity is False


@pytest.mark.unit
def test_refusals():
    mesh = Mesh(AXES, rank=0)
    with pytest.raises(ValueError, match="the 3 ranks along col do not divide"):
        ShardingSpec((4,), (("col",),), mesh)
    with pytest.raises(ValueError, match="an axis cuts twice"):
        ShardingSpec((9, 9), (("col",), ("col",)), mesh)
    with pytest.raises(ValueError, match="a spec of 1 dimensions"):
        ShardingSpec((9, 9), (("col",),), mesh)
    with pytest.raises(ValueError, match=r"is 2 parts of 4, which the 3 ranks along col do not divide"):
        ShardingSpec((8,), (("col",),), mesh, parts=(2,))
    with pytest.raises(ValueError, match=r"parts=\(3,\) for 2 dimensions"):
        ShardingSpec((6, 9), ((), ("col",)), mesh, parts=(3,))
    spec = ShardingSpec((6,), (("col",),), mesh)
    with pytest.raises(ValueError, match=r"the global shape is \(6,\)"):
        spec.cut(torch.zeros(5))
    with pytest.raises(ValueError, match=r"stored_as=\(0, 0\) does not name each of 2 dimensions once"):
        ShardingSpec((9, 9), ((), ()), mesh, stored_as=(0, 0))
    turned = ShardingSpec((6, 4), (("col",), ()), mesh, stored_as=(1, 0))
    with pytest.raises(ValueError, match=r"the global shape is \(4, 6\), not \(6, 4\)"):
        turned.slice_of(torch.zeros(6, 4))
    assert ShardingSpec((9,), ((),), mesh).is_identity
    assert not spec.is_identity
    with pytest.raises(ValueError, match="where the spec has"):
        set_spec(torch.zeros(6), spec)
    assert spec_of(torch.zeros(1)) is None
    assert cut_dims((5,), (("one",),), Mesh({"one": 1}, rank=0)).dims == ((),)


@on_ranks(4, {"parallel": {"tensor": {"size": 4, "mode": "2d"}}})
def test_slices_gather_to_the_whole_and_norms_are_of_the_whole():
    whole = torch.arange(24.0).reshape(4, 6)
    params = []
    for dims in ((("col",), ("row",)), (("row", "col"), ()), ((), ())):
        spec = ShardingSpec((4, 6), dims, gpc.mesh)
        param = torch.nn.Parameter(spec.cut(whole))
        set_spec(param, spec)
        param.grad = param.detach().clone()
        assert torch.equal(spec.gather(param.detach()), whole)
        turned = ShardingSpec((4, 3, 6), (dims[0], (), dims[1]), gpc.mesh, stored_as=(1, 2, 0))
        solid = torch.arange(72.0).reshape(6, 4, 3)
        assert torch.equal(turned.whole(turned.slice_of(solid)), solid)
        params.append(param)
    fused = ShardingSpec((6, 8), ((), ("row", "col")), gpc.mesh, parts=(1, 2))
    whole_fused = torch.arange(48.0).reshape(6, 8)
    assert torch.equal(fused.gather(fused.cut(whole_fused)), whole_fused)
    assert global_grad_norm(params).item() == pytest.approx((3 * whole.square().sum()).sqrt().item())


@pytest.mark.unit
def test_which_ranks_share_a_gradient():
    """Of the ranks that see other parts of the batch, those that hold the same slice; divided by all."""
    sizes = {"edp": 3, "ep": 2, "pp": 2, "tp": 2}
    for rank in range(24):
        mesh = Mesh(sizes, rank=rank, views={"dp": ("edp", "ep")})
        for replicas in (mesh.axis("dp"), mesh.axis(("dp", "tp"))):
            for cut in (
                (),
                ("ep",),
                ("edp",),
                ("tp",),
                ("pp",),
                ("ep", "tp"),
                ("edp", "ep"),
                ("edp", "ep", "tp"),
            ):
                tensor = torch.zeros(4, 4)
                if cut:
                    spec = cut_dims((4 * 12, 4), [cut, ()], mesh)
                    tensor = torch.zeros(spec.local_shape)
                    set_spec(tensor, spec)
                sync = gradient_sync(tensor, replicas)
                here = mesh.coordinate(rank)
                same = [
                    other
                    for other in replicas.ranks
                    if all(mesh.coordinate(other)[a] == here[a] for a in cut)
                ]
                assert (list(sync.axis.ranks), sync.divisor) == (same, replicas.size)
                if len(same) == replicas.size:
                    assert sync.axis is replicas  # and so its group, and the order of its sums


@pytest.mark.unit
def test_axes_of_one_rank_cut_nothing():
    mesh = Mesh({"edp": 2, "ep": 1}, rank=0, views={"dp": ("edp", "ep")})
    tensor = torch.zeros(4)
    set_spec(tensor, ShardingSpec((4,), (("ep",),), mesh))
    assert gradient_sync(tensor, mesh.axis("dp")).axis is mesh.axis("dp")
