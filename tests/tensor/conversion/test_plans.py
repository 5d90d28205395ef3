"""Plans of conversions: the documented table, and never costlier than what one could do instead."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.context import Mesh
from colossalai.tensor import ConversionPlanner, MessageCosts, ShardingLayout, ShardingSpec
from colossalai.tensor.conversion._direct import axes_between, busiest, transfers
from colossalai.tensor.conversion._layout import Extents
from colossalai.tensor.conversion._moves import one_step_moves
from colossalai.tensor.conversion._path import difference
from colossalai.tensor.shape_consistency import ShapeConsistencyManager
from tests.tensor.conversion.layouts import all_layouts, all_pairs
from tests.tiers import further, in_soak

SHAPE = (8, 8, 8)


def mesh_of(*extents, rank=0):
    return Mesh({str(number): size for number, size in enumerate(extents)}, rank=rank)


def layout(notation, mesh, partial=()):
    shape = SHAPE[: sum(letter in "RS" for letter in notation)]
    return ShardingLayout(ShardingSpec.from_notation(notation, shape, mesh), partial)


def notations(plan):
    return [each.spec.notation for each in plan.path]


# Source and target, the reachable specs by the op of the move, and the path that greedy search takes. The
# table of the documentation, whose rows have a target of one dimension more than the source where it slips.
TABLE = [
    (
        ("S01RR", "RS01R"),
        {"all_gather": {"S0RR"}, "shard": set(), "all_to_all": {"S0RS1", "S0S1R"}},
        ["S01RR", "S0RR", "RS0R", "RS01R"],
    ),
    (
        ("S0RR", "RS01R"),
        {
            "all_gather": {"RRR"},
            "shard": {"S01RR", "S0S1R", "S0RS1"},
            "all_to_all": {"RS0R", "RRS0"},
        },
        ["S0RR", "RS0R", "RS01R"],
    ),
    (
        ("RS0R", "RS01R"),
        {
            "all_gather": {"RRR"},
            "shard": {"RS01R", "S1S0R", "RS0S1"},
            "all_to_all": {"S0RR", "RRS0"},
        },
        ["RS0R", "RS01R"],
    ),
]


@pytest.mark.unit
@pytest.mark.parametrize(("pair", "one_step", "path"), TABLE)
def test_the_documented_table(pair, one_step, path):
    mesh = mesh_of(2, 2)
    source, target = (layout(notation, mesh) for notation in pair)
    found = ShapeConsistencyManager().get_all_one_step_transform_spec(source.spec)
    by_op = {op: {spec.notation for spec, (move, _) in found.items() if move.op == op} for op in one_step}
    assert by_op == one_step
    assert notations(ConversionPlanner(mesh).greedy(source, target, 4)) == path


@pytest.mark.unit
def test_the_manager_says_path_moves_and_cost():
    mesh = mesh_of(2, 2)
    source, target = layout("S0RR", mesh).spec, layout("RS01R", mesh).spec
    path, moves, cost = ShapeConsistencyManager().shape_consistency(source, target)
    assert path[0] == source
    assert path[-1] == target
    assert len(moves) == len(path) - 1
    assert cost == 1 + 8**3 * 4 / 8  # a rank keeps an eighth of the whole, and gets another one
    path, moves, cost = ShapeConsistencyManager().shape_consistency(source, source)
    assert (path, moves, cost) == ([source], [], 0.0)


def costs_of(planner, source, target):
    """What the chosen plan costs, and everything that one could do instead."""
    plan = planner.plan(source, target, 4)
    others = [planner.exact(source, target, 4), planner.greedy(source, target, 4)]
    if source.partial == target.partial:
        others.append(planner.direct(source, target, 4))
    return plan, [other for other in others if other is not None]


def assert_cheapest(planner, source, target):
    plan, others = costs_of(planner, source, target)
    assert plan.path[-1].placement == target.placement
    assert len(plan.path) == len(plan.steps) + 1
    for other in others:
        assert plan.cost <= other.cost, f"{source} -> {target}: {plan} against {other}"
    exact, greedy = others[:2]
    assert exact.cost <= greedy.cost
    return exact.cost < greedy.cost


@pytest.mark.each_value
@pytest.mark.unit
@pytest.mark.parametrize("extents", [(2, 2), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_no_plan_is_costlier_than_exact_greedy_or_direct(extents, num_dims):
    mesh = mesh_of(*extents)
    planner = ConversionPlanner(mesh)
    pairs = list(all_pairs(mesh, SHAPE[:num_dims]))
    if len(pairs) > 200:  # all of them: marker long
        pairs = random.Random(0).sample(pairs, 60)
    greedy_is_worse = sum(assert_cheapest(planner, source, target) for source, target in pairs)
    assert greedy_is_worse > 0 or num_dims == 1


@pytest.mark.unit
@pytest.mark.long
@pytest.mark.parametrize(
    ("extents", "num_dims"),
    [
        *itertools.product([(2, 2), (2, 4)], [1, 2, 3]),
        ((2, 2, 2), 1),
        in_soak((2, 2, 2), 2),
        in_soak((2, 2, 2), 3),
    ],
    ids=str,
)
def test_no_plan_of_all_pairs_is_costlier(extents, num_dims):
    mesh = mesh_of(*extents)
    planner = ConversionPlanner(mesh)
    for source, target in all_pairs(mesh, SHAPE[:num_dims]):
        assert_cheapest(planner, source, target)


class Seconds:
    """Measured costs: one axis ten times as slow as the other, and starts that count."""

    def cost(self, op, num_bytes, axes):
        slow = "0" in axes
        return 1e-4 * (3 if op == "all_to_all" else 1) + num_bytes * (1e-8 if slow else 1e-9) * len(axes)


@pytest.mark.unit
@pytest.mark.parametrize("stride", [3, further(1)])
def test_measured_costs_decide(stride):
    mesh = mesh_of(2, 4)
    counted, measured = ConversionPlanner(mesh), ConversionPlanner(mesh, Seconds())
    pairs = list(all_pairs(mesh, (64, 64)))
    for source, target in pairs[::stride]:
        assert_cheapest(measured, source, target)
    differ = [pair for pair in pairs if str(counted.plan(*pair, 8)) != str(measured.plan(*pair, 8))]
    assert differ
    manager = ShapeConsistencyManager(Seconds(), itemsize=8)
    source, target = next((a, b) for a, b in differ if not a.partial)
    assert manager.shape_consistency(source.spec, target.spec)[1:] == (
        list(measured.plan(source, target, 8).steps),
        measured.plan(source, target, 8).cost,
    )


@pytest.mark.unit
def test_more_alpha_takes_fewer_collectives():
    mesh = mesh_of(2, 2)
    source, target = layout("RR", mesh, ("0", "1")), layout("RR", mesh)
    costly = ConversionPlanner(mesh, MessageCosts(mesh.axes, alpha=1e9))
    assert [step.op for step in costly.plan(source, target, 4).steps] == ["all_reduce"]


@pytest.mark.unit
def test_plans_are_kept():
    mesh = mesh_of(2, 2)
    assert mesh.derived(ConversionPlanner) is mesh.derived(ConversionPlanner)
    planner = ConversionPlanner(mesh)
    pair = layout("S0R", mesh), layout("RS1", mesh)
    assert planner.plan(*pair, 4) is planner.plan(*pair, 4)


@pytest.mark.unit
@pytest.mark.parametrize("num_pairs", [15, further(60)])
def test_all_ranks_find_the_same_plans(num_pairs):
    plans = []
    for rank in range(8):
        mesh = mesh_of(2, 2, 2, rank=rank)
        planner = ConversionPlanner(mesh)
        pairs = random.Random(1).sample(list(all_pairs(mesh, SHAPE[:2])), num_pairs)
        plans.append([(str(planner.plan(*pair, 4)), planner.plan(*pair, 4).cost) for pair in pairs])
    assert all(each == plans[0] for each in plans)


@st.composite
def cuts(draw, sizes):
    """Draw a spec over axes of some sizes, with parts, of a shape that everything divides."""
    num_dims = draw(st.integers(1, 3))
    mesh = mesh_of(*sizes)
    world = mesh.world_size
    specs = []
    parts = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(num_dims))
    shape = tuple(world * number * 6 // (6 // number) for number in parts)
    for of_parts in (parts, draw(st.sampled_from([None, parts]))):
        dims = [[] for _ in range(num_dims)]
        for axis in draw(st.permutations(list(mesh.axes))):
            place = draw(st.integers(-1, num_dims - 1))
            if place >= 0:
                dims[place].append(axis)
        specs.append(ShardingSpec(shape, tuple(map(tuple, dims)), mesh, parts=of_parts))
    return specs


@pytest.mark.unit
@settings(max_examples=60)
@given(st.sampled_from([(2, 2), (2, 3), (2, 2, 2)]).flatmap(cuts))
def test_transfers_bring_each_rank_just_what_it_lacks(pair):
    source, target = pair
    moved = transfers(source, target)
    world = source.mesh.world_size
    for rank in range(world):
        wanted = torch.zeros(source.shape)
        for region in target.regions(rank):
            wanted[tuple(slice(part.offset, part.offset + part.size) for part in region)] += 1
        held = torch.zeros(source.shape)
        for region in source.regions(rank):
            held[tuple(slice(part.offset, part.offset + part.size) for part in region)] += 1
        got = torch.zeros(source.shape)
        for transfer in moved:
            if transfer.receiver == rank:
                transfer.box.of(got).add_(1)
                sent_by = [
                    all(
                        part.offset <= begin and begin + size <= part.offset + part.size
                        for part, begin, size in zip(
                            region, transfer.box.offsets, transfer.box.sizes, strict=True
                        )
                    )
                    for region in source.regions(transfer.sender)
                ]
                assert any(sent_by), "nobody sends what it has not"
                if transfer.sender != rank:
                    assert transfer.box.of(held).sum() == 0, "nobody is sent what it has"
        assert torch.equal(got, wanted)
    assert busiest(moved, world) <= max(source.mesh.world_size, 1) * torch.Size(target.local_shape).numel()


@pytest.mark.unit
def test_the_nearest_replica_sends():
    mesh = mesh_of(2, 2, 2)
    source, target = layout("S0R", mesh).spec, layout("RR", mesh).spec
    # Rank r lacks the half of the ranks that differ along axis 0: its neighbour along that axis alone.
    moved = [(t.sender, t.receiver) for t in transfers(source, target) if t.sender != t.receiver]
    assert sorted(moved) == sorted((rank ^ 4, rank) for rank in range(8))
    assert axes_between(transfers(source, target), mesh) == ("0",)
    # Columns over axis 2, now rows over axis 2: within pairs of neighbours, whatever the replicas have.
    moved = transfers(layout("RS2", mesh).spec, layout("S2R", mesh).spec)
    assert axes_between(moved, mesh) == ("2",)


@pytest.mark.unit
def test_equally_near_replicas_share_the_work():
    mesh = mesh_of(2, 2, 2)
    source, target = layout("S0R", mesh).spec, layout("S1R", mesh).spec
    moved = transfers(source, target)
    sent = [0] * 8
    for transfer in moved:
        if transfer.sender != transfer.receiver:
            sent[transfer.sender] += transfer.box.numel
    assert max(sent) == busiest(moved, 8)
    received = [0] * 8
    for transfer in moved:
        if transfer.sender != transfer.receiver:
            received[transfer.receiver] += transfer.box.numel
    assert max(sent) <= max(received)


@pytest.mark.unit
def test_the_difference_is_what_is_to_be_gathered_summed_and_sharded():
    mesh = mesh_of(2, 2)
    pairs = {
        ("S0R", "RR"): 1,
        ("RR", "S0R"): 0.5,
        ("S01R", "S0S1"): 1.5,
        ("S10R", "S01R"): 3,
        ("S0R", "S0R"): 0,
    }
    for (one, other), wanted in pairs.items():
        assert difference(layout(one, mesh).placement, layout(other, mesh).placement) == wanted
    assert difference(layout("S0R", mesh, ("1",)).placement, layout("RR", mesh).placement) == 2


@pytest.mark.unit
def test_moves_fit_the_shape():
    """No path passes through a cut that the ranks do not divide."""
    mesh = mesh_of(2, 2)
    for each in all_layouts(mesh, (4, 4)):
        extents = Extents((2, 4), mesh.axes, 4)
        if extents.shape[0] % extents.num_ranks(each.placement.dims[0]):
            continue
        for move in one_step_moves(each.placement, extents, joined=True):
            assert all(
                size % extents.num_ranks(axes) == 0
                for size, axes in zip(extents.shape, move.target.dims, strict=True)
            )
    source = ShardingLayout(ShardingSpec((2, 2), (("0",), ("1",)), mesh))
    target = ShardingLayout(ShardingSpec((2, 2), (("1",), ("0",)), mesh))
    assert ConversionPlanner(mesh).plan(source, target, 4).path[-1] == target
