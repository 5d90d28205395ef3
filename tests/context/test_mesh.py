"""The groups of every parallel mode, against their closed forms, on meshes of up to 64 ranks."""

import copy
import math
import pickle
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import colossalai
from colossalai.context import Config, Mesh, ParallelContext, ParallelMode, make_group, read_layout
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

M = ParallelMode


def context_of(rank, world_size, parallel):
    context = ParallelContext()
    context.load_config(Config(parallel=parallel))
    context.init_parallel_groups(rank=rank, world_size=world_size)
    return context


def line(start, step, count):
    return [start + step * i for i in range(count)]


def expected_common(rank, world, pp, tp):
    """Ranks count tensor neighbours first, then stages, then replicas."""
    inner = pp * tp
    return {
        M.GLOBAL: line(0, 1, world),
        M.DATA: line(rank % inner, inner, world // inner),
        M.PIPELINE: line(rank - rank % inner + rank % tp, tp, pp),
        M.TENSOR: line(rank - rank % tp, 1, tp),
        M.MODEL: line(rank - rank % inner, 1, inner),
    }


def expected_tensor(rank, mode, tp, depth):
    base, local = rank - rank % tp, rank % tp
    if mode == "1d":
        return {M.PARALLEL_1D: line(base, 1, tp)}
    if mode == "sequence":
        return {M.SEQUENCE: line(base, 1, tp)}
    if mode == "2d":
        q = math.isqrt(tp)
        return {
            M.PARALLEL_2D_ROW: line(base + local // q * q, 1, q),
            M.PARALLEL_2D_COL: line(base + local % q, q, q),
        }
    if mode == "2.5d":
        q = math.isqrt(tp // depth)
        layer = base + local // (q * q) * q * q
        return {
            M.PARALLEL_2P5D_ROW: line(layer + local % (q * q) // q * q, 1, q),
            M.PARALLEL_2P5D_COL: line(layer + local % q, q, q),
            M.PARALLEL_2P5D_DEP: line(base + local % (q * q), q * q, depth),
            M.PARALLEL_2P5D_XZ: line(base + local % q, q, depth * q),
        }
    q = round(tp ** (1 / 3))
    out, inp, wgt = local // (q * q), local // q % q, local % q
    return {
        M.PARALLEL_3D_INPUT: line(base + out * q * q + wgt, q, q),
        M.PARALLEL_3D_WEIGHT: line(base + out * q * q + inp * q, 1, q),
        M.PARALLEL_3D_OUTPUT: line(base + inp * q + wgt, q * q, q),
        M.PARALLEL_3D_INPUT_X_WEIGHT: line(base + out * q * q, 1, q * q),
        M.PARALLEL_3D_OUTPUT_X_WEIGHT: [base + o * q * q + inp * q + w for o in range(q) for w in range(q)],
    }


@pytest.mark.unit
@pytest.mark.parametrize(
    ("mode", "world", "pp", "tp", "depth"),
    [
        ("1d", 16, 2, 4, 1),
        ("sequence", 12, 1, 3, 1),
        ("2d", 36, 2, 9, 1),
        ("2d", 16, 2, 4, 1),
        ("2.5d", 32, 2, 8, 2),
        ("2.5d", 36, 1, 12, 3),
        ("3d", 32, 2, 8, 1),
        ("3d", 54, 1, 27, 1),
    ],
)
def test_groups_of_every_mode(mode, world, pp, tp, depth):
    tensor = {"size": tp, "mode": mode} | ({"depth": depth} if mode == "2.5d" else {})
    for rank in range(world):
        context = context_of(rank, world, {"pipeline": pp, "tensor": tensor})
        expected = expected_common(rank, world, pp, tp) | expected_tensor(rank, mode, tp, depth)
        for parallel_mode, ranks in expected.items():
            assert context.is_initialized(parallel_mode)
            assert context.get_ranks_in_group(parallel_mode) == ranks, parallel_mode
            assert context.get_world_size(parallel_mode) == len(ranks)
            assert context.get_local_rank(parallel_mode) == ranks.index(rank)
            assert context.is_first_rank(parallel_mode) == (rank == ranks[0])
            assert context.is_last_rank(parallel_mode) == (rank == ranks[-1])
            following = ranks[(ranks.index(rank) + 1) % len(ranks)]
            assert context.get_next_global_rank(parallel_mode) == following
            assert ranks[(ranks.index(context.get_prev_global_rank(parallel_mode)) + 1) % len(ranks)] == rank
        assert (context.data_parallel_size, context.pipeline_parallel_size) == (world // pp // tp, pp)
        assert context.tensor_parallel_size == tp


@pytest.mark.unit
def test_sequence_dp_joins_data_and_sequence():
    context = context_of(3, 8, {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}})
    assert context.get_ranks_in_group(M.SEQUENCE_DP) == [2, 3, 6, 7]


@pytest.mark.unit
def test_sequences_are_an_axis_beside_the_tensor_axes():
    parallel = {"pipeline": 2, "sequence": 2, "tensor": {"size": 4, "mode": "2d"}}
    for rank in range(32):
        context = context_of(rank, 32, parallel)
        base, local = rank - rank % 8, rank % 8
        stage = base % 16 + local % 4
        expected = expected_tensor(rank, "2d", 4, 1) | {
            M.TENSOR: line(rank - rank % 4, 1, 4),
            M.SEQUENCE: line(base + local % 4, 4, 2),
            M.SEQUENCE_DP: [first + 16 * replica for replica in range(2) for first in line(stage, 4, 2)],
            M.PIPELINE: line(rank - rank % 16 + local, 8, 2),
            M.DATA: line(rank % 16, 16, 2),
            M.GLOBAL: [*range(32)],
        }
        for parallel_mode, ranks in expected.items():
            assert context.get_ranks_in_group(parallel_mode) == ranks, parallel_mode
        assert (context.sequence_parallel_size, context.tensor_parallel_size) == (2, 4)
        assert (context.sequence_attention, context.tensor_mode) == ("ring", "2d")


@pytest.mark.unit
def test_both_spellings_of_sequence_parallelism_are_one_layout():
    spellings = (
        {"tensor": {"size": 4, "mode": "sequence"}},
        {"sequence": 4},
        {"sequence": {"size": 4, "attention": "ring"}},
        {"sequence": {"size": 4}, "tensor": {"size": 4, "mode": "sequence"}},
        {"sequence": {"attention": "ring"}, "tensor": {"size": 4, "mode": "sequence"}},
    )
    layouts = [read_layout(parallel).over(8) for parallel in spellings]
    assert all(layout == layouts[0] for layout in layouts)
    ulysses = read_layout(
        {"sequence": {"attention": "ulysses"}, "tensor": {"size": 4, "mode": "sequence"}}
    ).over(8)
    assert (ulysses.attention, ulysses.sequence, ulysses.mode) == ("ulysses", 4, None)


@pytest.mark.unit
def test_experts_are_a_second_view_of_the_data_axis():
    context = context_of(5, 16, {"tensor": {"size": 2, "mode": "1d"}, "moe": {"size": 4}})
    assert context.get_ranks_in_group(M.DATA) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert context.get_ranks_in_group(M.MOE_MODEL) == [1, 3, 5, 7]
    assert context.get_ranks_in_group(M.MOE_DATA) == [5, 13]


@pytest.mark.unit
def test_stages():
    first, last = (context_of(rank, 4, {"pipeline": 4}) for rank in (0, 3))
    assert first.is_pipeline_first_stage()
    assert not first.is_pipeline_last_stage()
    assert last.is_pipeline_last_stage()
    assert not last.is_pipeline_first_stage()


@pytest.mark.unit
def test_a_mode_that_the_job_has_not_is_named():
    context = context_of(0, 4, {"tensor": {"size": 4, "mode": "2d"}})
    assert not context.is_initialized(M.PARALLEL_1D)
    with pytest.raises(ValueError, match="PARALLEL_1D is not part of this job"):
        context.get_ranks_in_group(M.PARALLEL_1D)


@pytest.mark.unit
def test_nothing_launched_is_said():
    with pytest.raises(RuntimeError, match="nothing has been launched"):
        ParallelContext().get_global_rank()


@pytest.mark.unit
def test_axes_are_taken_in_grid_order_whatever_the_order_asked():
    mesh = Mesh({"dp": 2, "pp": 2, "tp": 2}, rank=5)
    assert mesh.ranks(("tp", "dp")) == mesh.ranks(("dp", "tp")) == [0, 1, 4, 5]
    assert mesh.axis_rank(("dp", "tp")) == 3
    assert mesh.axis_size(("dp", "tp")) == 4
    with pytest.raises(ValueError, match="no mesh axis"):
        mesh.ranks("rows")


@pytest.mark.unit
def test_ranks_may_fill_the_grid_in_any_order():
    order = [7, 2, 0, 5, 1, 6, 4, 3]
    for place, rank in enumerate(order):
        mesh = Mesh({"a": 2, "b": 4}, rank=rank, order=order)
        assert mesh.coordinate(rank) == {"a": place // 4, "b": place % 4}
        assert mesh.ranks("b") == order[place // 4 * 4 :][:4]
        assert mesh.ranks("a") == order[place % 4 :: 4]
        assert mesh.axis(("a", "b")).rank == place
        assert mesh.axis_rank("b") == mesh.axis("b").rank == place % 4
    for wrong in ([0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="name each of the ranks 0 to 3 once"):
            Mesh({"a": 4}, rank=0, order=wrong)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("parallel", "shown"),
    [
        ({}, "dp=8"),
        ({"pipeline": 2}, "dp=4, pp=2"),
        ({"moe": 2}, "edp=4, ep=2"),
        ({"moe": 8}, "ep=8"),
        ({"tensor": {"size": 8, "mode": "1d"}}, "tp=8"),
    ],
)
def test_plain_data_parallelism_is_shown_as_what_it_is(parallel, shown):
    assert repr(context_of(3, 8, parallel).mesh) == f"Mesh({shown}; rank 3 of 8)"


def uneven_groups() -> list[list[int]]:
    """Ask for groups such that ranks have made different numbers of them when they meet."""
    colossalai.launch_from_torch({"parallel": {"pipeline": 4}}, verbose=False)
    mesh, rank = gpc.mesh, gpc.get_global_rank()
    seen = []
    for members in ((0, 3), (0, 1), (1, 2), (2, 3), (3, 2), (0, 1, 2, 3)[::-1]):
        if rank in members:
            value = torch.tensor([rank])
            torch.distributed.all_reduce(value, group=mesh.group_of(members))
            seen.append(value.item())
    again = Mesh(mesh.axes, rank=rank, views={"dp": ("edp", "ep")})  # a second one makes groups of its own
    if rank in (0, 3):
        torch.distributed.barrier(group=again.group_of((0, 3)))
    gpc.destroy()
    return seen


def made_again_and_again(num_times):
    """Make a group, use it and destroy it; ranks come to it at different times."""
    colossalai.launch_from_torch({}, verbose=False)
    rank = dist.get_rank()
    delays = random.Random(rank)
    found = []
    for number in range(num_times):
        time.sleep(delays.choice((0.0, 0.0, 0.02)))
        group = make_group((0, 1), purpose="again")
        value = torch.tensor([float(number + rank)])
        dist.all_reduce(value, group=group)
        found.append(value.item())
        dist.destroy_process_group(group)
    gpc.destroy()
    return found


@pytest.mark.dist
def test_a_group_does_not_meet_what_an_earlier_one_has_left() -> None:
    """Addresses and names of memory lie in the store, where those of a group that is gone stay."""
    expected = [2.0 * number + 1 for number in range(30)]
    assert run_ranks(made_again_and_again, 2, 30) == [expected, expected]


@pytest.mark.dist
def test_groups_meet_whatever_else_their_members_have_made() -> None:
    assert run_ranks(uneven_groups, 4) == [[3, 1, 6], [1, 3, 6], [3, 5, 5, 6], [3, 5, 5, 6]]


def test_all_groups_are_what_their_ranks_find():
    axes, views = {"edp": 2, "ep": 2, "pp": 3, "tp": 2}, {"dp": ("edp", "ep")}
    order = random.Random(0).sample(range(24), 24)
    meshes = [Mesh(axes, rank=rank, views=views, order=order) for rank in range(24)]
    assert meshes[0].replica_axes == ("pp", "tp")
    for names in ((), ("dp",), ("pp",), ("ep", "tp"), ("pp", "tp"), tuple(axes)):
        groups = meshes[0].all_ranks(names)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(24))
        assert all(meshes[rank].ranks(names) == ranks for ranks in groups for rank in ranks)


def test_axes_keep_their_group_until_the_mesh_forgets_it() -> None:
    """A collective looks up no group; yet no group outlives the job, and no copy of an axis holds one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = Mesh({"dp": 2, "tp": 2}, rank=0)
        axis = mesh.axis("tp")
        again = copy.deepcopy(axis)
        assert axis.group is again.group is mesh.group("tp") is vars(axis)["group"]
        assert "group" not in vars(pickle.loads(pickle.dumps(axis)))
        view = Mesh({"dp": 2, "pp": 2}, rank=0)
        view.axis("dp").group  # noqa: B018 (made)
        view.take_groups_of(mesh)
        assert "group" not in vars(view.axis("dp"))
        assert view.axis("pp").group is axis.group
        mesh.forget_groups()
        assert not any("group" in vars(each) for each in (axis, again, view.axis("pp")))
    finally:
        dist.destroy_process_group()
