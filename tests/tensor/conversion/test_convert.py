"""Conversions over ranks: values and gradients are slices of the whole, bit for bit."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import colossalai
from colossalai.communication import ledger
from colossalai.context import Mesh
from colossalai.tensor import (
    ConversionPlanner,
    PaddedSpec,
    ShapeConsistencyManager,
    ShardingLayout,
    ShardingSpec,
    convert,
    set_spec,
    spec_of,
)
from tests.launched import on_ranks
from tests.ranks import run_ranks
from tests.tiers import further

MESHES = {4: [(2, 2), (4,)], 8: [(2, 2, 2), (2, 4), (4, 2)]}
SHAPES = [(8,), (16, 8), (8, 24), (2, 8, 4), (8, 2, 3, 8)]


def mesh_over(extents):
    rank = torch.distributed.get_rank()
    return Mesh({f"a{number}": size for number, size in enumerate(extents)}, rank=rank)


@functools.cache
def whole(shape, seed):
    """Return whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).double()


def term(layout, value, seed):
    """Return this rank's term of a value, in whole numbers; the terms of all ranks of a sum add up to it."""
    axes = layout.partial
    if not axes:
        return layout.spec.cut(value)
    mesh = layout.spec.mesh
    mine, count = mesh.axis_rank_in_order(axes), mesh.axis_size(axes)
    others = [whole(tuple(value.shape), seed + 1 + number) for number in range(1, count)]
    part = others[mine - 1] if mine else value - sum(others)
    return layout.spec.cut(part)


def check(source, target, value, seed, **options):
    """Convert, and compare value and gradient with slices of the whole."""
    slice_ = term(source, value, seed).requires_grad_()
    result = convert(slice_, source, target, **options)
    assert result.is_contiguous()
    if target.partial:  # the terms that stay apart still add up
        total = convert(result.detach(), target, target.spec)
        assert torch.equal(total, target.spec.cut(value))
    else:
        assert torch.equal(result, target.spec.cut(value))
    weight = whole(tuple(value.shape), seed + 100)
    (result * target.spec.cut(weight)).sum().backward()
    assert torch.equal(slice_.grad, source.spec.cut(weight)), f"gradient of {source} -> {target}"


@st.composite
def conversions(draw, extents):
    axes = [f"a{number}" for number in range(len(extents))]
    sizes = dict(zip(axes, extents, strict=True))
    shape = draw(st.sampled_from(SHAPES))
    layouts = []
    for is_target in (False, True):
        dims, partial, count = [[] for _ in shape], [], [1 for _ in shape]
        for axis in draw(st.permutations(axes)):
            place = draw(st.integers(-2, len(shape) - 1))
            if place >= 0 and shape[place] % (count[place] * sizes[axis]) == 0:
                dims[place].append(axis)
                count[place] *= sizes[axis]
            elif place == -2 and (not is_target or axis in layouts[0][1]):
                partial.append(axis)
        layouts.append((tuple(map(tuple, dims)), tuple(partial)))
    return shape, *layouts, draw(st.integers(0, 5))


def run_conversions(examples):
    colossalai.launch_from_torch({}, verbose=False)
    meshes = {}
    for extents, (shape, *layouts, seed) in examples:
        mesh = meshes.setdefault(extents, mesh_over(extents))
        source, target = (
            ShardingLayout(ShardingSpec(shape, dims, mesh), partial) for dims, partial in layouts
        )
        check(source, target, whole(shape, seed), seed)


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "num_examples"), [(4, 20), further(4, 150), further(8, 150)])
def test_values_and_gradients_are_slices_of_the_whole(world_size, num_examples):
    """Hypothesis draws; the ranks are started once for all that it draws."""
    examples = []

    @settings(max_examples=num_examples, database=None)
    @given(st.sampled_from(MESHES[world_size]).flatmap(lambda e: st.tuples(st.just(e), conversions(e))))
    def draw(example):
        examples.append(example)

    draw()
    run_ranks(run_conversions, world_size, examples)


def run_parts(pairs):
    colossalai.launch_from_torch({}, verbose=False)
    mesh = mesh_over((2, 2))
    for shape, before, after in pairs:
        source, target = (
            ShardingLayout(ShardingSpec(shape, dims, mesh, parts=parts), partial)
            for dims, parts, partial in (before, after)
        )
        check(source, target, whole(shape, 3), 3)
    source = PaddedSpec((8, 4), (("a0",), ()), mesh, unpadded=(7, 4))
    target = PaddedSpec((8, 4), ((), ("a1", "a0")), mesh, unpadded=(7, 4))
    value = whole((7, 4), 0)
    assert torch.equal(convert(source.slice_of(value), source, target), target.slice_of(value))


@pytest.mark.dist
def test_parts_and_padding():
    run_ranks(
        run_parts,
        4,
        [
            ((24, 4), ((("a0",), ()), (3, 1), ()), (((), ("a1",)), (3, 1), ())),
            ((24, 4), ((("a0", "a1"), ()), (3, 1), ()), ((("a0", "a1"), ()), None, ())),
            ((24, 4), (((), ("a0",)), (3, 1), ("a1",)), ((("a1",), ()), None, ())),
            ((24, 4), (((), ()), (3, 1), ("a0", "a1")), ((("a1", "a0"), ()), (3, 1), ("a0",)[:0])),
        ],
    )


@on_ranks(4)
def test_gradients_memory_manager_and_ledger():
    mesh = mesh_over((2, 2))
    spec = lambda notation: ShardingSpec.from_notation(notation, (8, 8), mesh)  # noqa: E731
    value = whole((8, 8), 0)
    # A replica that ranks use differently: the terms of its gradient are added on the way back.
    slice_ = spec("S0R").cut(value).requires_grad_()
    result = convert(slice_, spec("S0R"), spec("RR"), partial_grads=("a0", "a1"))
    (result * mesh.rank).sum().backward()
    assert torch.equal(slice_.grad, torch.full((4, 8), 0.0 + 1 + 2 + 3, dtype=torch.float64))
    same = spec("S0R").cut(value).requires_grad_()
    result = convert(same, spec("S0R"), spec("S0R"), partial_grads=("a1",))
    (result * mesh.rank).sum().backward()
    assert torch.equal(same.grad, torch.full((4, 8), 2.0 * (mesh.rank // 2 * 2) + 1, dtype=torch.float64))
    # Gradients of gradients go the same ways.
    slice_ = spec("S01R").cut(value).requires_grad_()
    result = convert(slice_, spec("S01R"), spec("RS10"))
    (grad,) = torch.autograd.grad((result**3).sum(), slice_, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), slice_)
    assert torch.equal(grad, 3 * slice_**2)
    assert torch.equal(second, 6 * slice_)
    # Nothing to do; no memory shared with the whole; strides of any kind.
    assert convert(slice_, spec("S01R"), spec("S01R")) is slice_
    full = value.clone()
    part = convert(full, spec("RR"), spec("S0R"))
    full.zero_()
    assert torch.equal(part, spec("S0R").cut(value))
    strided = spec("S0R").cut(value).t().contiguous().t()
    assert torch.equal(convert(strided, spec("S0R"), spec("RS1")), spec("RS1").cut(value))
    # The manager knows the cut by the tensor.
    carried = spec("S0R").cut(value)
    set_spec(carried, spec("S0R"))
    manager = ShapeConsistencyManager()
    moved = manager.apply(manager.apply(carried, spec("S10R")), spec("RS0"))
    assert spec_of(moved) == spec("RS0")
    assert torch.equal(moved, spec("RS0").cut(value))
    assert torch.equal(manager.apply(value.clone(), spec("S1S0")), spec("S1S0").cut(value))
    # What the ledger counts is what the plan says.
    planner = ConversionPlanner(mesh)
    for pair in (("S0R", "RS1"), ("S01R", "S10R"), ("S0S1", "S1S0"), ("S01R", "RR"), ("RS1", "S1R")):
        source, target = map(spec, pair)
        plan = planner.plan(ShardingLayout(source), ShardingLayout(target), 8)
        with ledger() as book:
            convert(source.cut(value), source, target)
        collectives = [step for step in plan.steps if str(step)[:5] not in ("copy", "shard")]
        assert book.count() == len(collectives), (pair, str(plan))
        assert book.num_bytes() <= plan.cost - len(collectives)


@pytest.mark.unit
def test_what_is_no_conversion_is_refused():
    mesh, other = (Mesh({"a0": 2, "a1": 2}, rank=0) for _ in range(2))
    spec = ShardingSpec((8, 8), (("a0",), ()), mesh)
    slice_ = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"a slice of shape \(8, 8\) where the layout has \(4, 8\)"):
        convert(torch.zeros(8, 8), spec, spec)
    with pytest.raises(ValueError, match="over one mesh"):
        convert(slice_, spec, ShardingSpec((8, 8), (("a0",), ()), other))
    with pytest.raises(ValueError, match="PaddedSpec"):
        convert(slice_, spec, ShardingSpec((8, 16), (("a0",), ()), mesh))
    with pytest.raises(ValueError, match="stored_as is None and"):
        convert(slice_, spec, ShardingSpec((8, 8), (("a0",), ()), mesh, stored_as=(1, 0)))
    with pytest.raises(ValueError, match="is not taken apart"):
        convert(slice_, spec, ShardingLayout(spec, ("a1",)))
    with pytest.raises(ValueError, match="hold no terms of one sum"):
        ShardingLayout(spec, ("a0",))
    with pytest.raises(ValueError, match="names axes of its mesh"):
        ShardingLayout(spec, ("tp",))
    source = ShardingLayout(ShardingSpec((8, 8), ((), ()), mesh), ("a0",))
    with pytest.raises(ValueError, match="sums along"):
        ConversionPlanner(mesh).direct(source, ShardingLayout(spec), 4)
