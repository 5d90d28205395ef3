"""`DeviceMesh` without a job: shapes, costs, files, and the search of a shape."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch

import colossalai
from colossalai.context import Mesh
from colossalai.device import OPERATIONS, AlphaBeta, DeviceMesh, MeshSpeed
from colossalai.device._profile import machine_of_job

pytestmark = pytest.mark.unit

GiB = 2**30


def mesh_of(*shape: int, **options: object) -> DeviceMesh:
    return DeviceMesh(torch.arange(math.prod(shape)), shape, **options)  # type: ignore[arg-type]


def measured_mesh(*shape: int) -> DeviceMesh:
    """Return a mesh as after `profile` on this computer, with one rank to pay for each of several."""
    mesh = mesh_of(*shape)
    alpha, beta = [1e-4] * len(shape), [1e-9] * len(shape)
    own = machine_of_job("cpu")
    machine = dataclasses.replace(
        own, hosts=own.hosts * mesh.num_devices, cores=own.cores * mesh.num_devices, backend="gloo"
    )
    mesh.speed = dataclasses.replace(MeshSpeed.of_links(shape, alpha, beta), machine=machine)
    return mesh


def test_the_documented_names() -> None:
    from colossalai.device.device_mesh import DeviceMesh as documented

    assert documented is DeviceMesh is colossalai.device.DeviceMesh


def test_shapes() -> None:
    mesh = DeviceMesh(torch.arange(16).reshape(2, 8), (4, 4))
    assert mesh.shape == (4, 4)
    assert mesh.num_devices == 16
    assert mesh.logical_mesh_id.tolist() == torch.arange(16).reshape(4, 4).tolist()
    assert isinstance(mesh.mesh, Mesh)
    assert mesh.mesh.axes == {"0": 4, "1": 4}
    assert DeviceMesh(torch.arange(6).reshape(2, 3)).shape == (2, 3)
    assert DeviceMesh(torch.arange(6), logical_mesh_id=torch.arange(6).reshape(3, 2)).shape == (3, 2)
    assert repr(mesh) == "DeviceMesh(shape=(4, 4), assumed costs)"
    assert repr(measured_mesh(2, 2)) == "DeviceMesh(shape=(2, 2), measured costs)"


def test_a_logical_order_is_that_of_the_grid() -> None:
    logical = torch.tensor([[3, 1], [0, 2]])
    mesh = DeviceMesh(torch.arange(4), logical_mesh_id=logical)
    assert mesh.mesh.ranks("0") == [3, 0] or mesh.mesh.rank != 0
    assert mesh.mesh.ranks(("0", "1")) == [3, 1, 0, 2]
    assert mesh.mesh.coordinate(2) == {"0": 1, "1": 1}
    assert mesh.flatten().logical_mesh_id.tolist() == [3, 1, 0, 2]
    filled = DeviceMesh(torch.tensor([[0, 2], [1, 3]]), (4, 1))
    assert filled.logical_mesh_id.flatten().tolist() == [0, 2, 1, 3]


def test_flatten_is_one_axis_as_slow_as_the_slowest() -> None:
    mesh = mesh_of(2, 4, mesh_alpha=[1e-3, 1e-6], mesh_beta=[1e-10, 1e-8])
    flat = mesh.flatten()
    assert (flat.shape, flat.mesh_alpha, flat.mesh_beta) == ((8,), (1e-3,), (1e-8,))
    assert flat.all_gather_cost(1e6, 0) == pytest.approx(7e-3 + 7 / 8 * 1e-8 * 1e6, rel=1e-12)
    assert flat.all_gather_cost(1e6, 0) == mesh.speed.cost("all_gather", 1e6, ("0", "1"))
    measured = measured_mesh(2, 2)
    assert measured.flatten().speed.machine == measured.speed.machine


def test_costs_by_their_documented_methods() -> None:
    mesh = mesh_of(2, 4, mesh_alpha=[1e-3, 1e-6], mesh_beta=[1e-8, 1e-10])
    for op in OPERATIONS[:-1]:
        cost = getattr(mesh, f"{op}_cost")
        for mesh_dim in (0, 1, -1, -2):
            assert cost(5e6, mesh_dim) == mesh.speed.cost(op, 5e6, str(mesh_dim % 2))
        for mesh_dim in (2, -3):
            with pytest.raises(ValueError, match=rf"mesh_dim={mesh_dim} of a mesh of shape \(2, 4\)"):
                cost(5e6, mesh_dim)
    assert mesh.all_reduce_cost(1e6, 1) == pytest.approx(6e-6 + 1.5 * 1e-10 * 1e6, rel=1e-12)
    assert mesh_of(4).all_gather_cost(100, 0) == 3 + 75  # units: 1 a message, 1 a byte


@pytest.mark.parametrize(
    ("physical", "options", "message"),
    [
        ([0, 1, 3], {}, r"physical_mesh_id has the ranks \[0, 1, 3\]: name each of 0, 1, 2, ... once"),
        ([], {}, "name each of 0, 1, 2, ... once"),
        ([0, 1, 2, 3], {"mesh_shape": (3, 2)}, r"mesh_shape=\(3, 2\) is not a shape of 4 ranks"),
        ([0, 1, 2, 3], {"mesh_shape": (-1, -4)}, r"mesh_shape=\(-1, -4\) is not a shape of 4 ranks"),
        (
            [0, 1, 2, 3],
            {"logical_mesh_id": torch.tensor([[0, 1]])},
            "name each rank of physical_mesh_id once",
        ),
        ([0, 1], {"mesh_shape": (2,), "logical_mesh_id": torch.tensor([[0, 1]])}, "has the shape"),
        ([0, 1], {"mesh_alpha": [1, 2]}, r"mesh_alpha=\[1.0, 2.0\] of a mesh of shape \(2,\)"),
        ([0, 1], {"mesh_beta": [-1]}, "give a finite number of 0 or more for each axis"),
        ([0, 1], {"init_process_group": True}, "init_process_group=True of a mesh of 2 ranks needs a job of"),
    ],
)
def test_mistakes_are_said(physical: list[int], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceMesh(torch.tensor(physical, dtype=torch.int64), **options)  # type: ignore[arg-type]


def test_without_a_job_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile\(\) of a mesh of 4 ranks needs a job of as many"):
        mesh_of(2, 2).profile()
    with pytest.raises(ValueError, match=r"assumed: measure them with profile\(\) first"):
        mesh_of(2, 2).save(tmp_path / "mesh.json")
    assert not list(tmp_path.iterdir())


def test_a_file_comes_back_in_any_shape(tmp_path: Path) -> None:
    saved = measured_mesh(2, 4)
    saved.save(tmp_path / "mesh.json")
    loaded = mesh_of(2, 4)
    assert loaded.load(tmp_path / "mesh.json") == loaded.speed == saved.speed
    other = mesh_of(8)
    other.load(str(tmp_path / "mesh.json"))
    assert other.all_reduce_cost(1e6, 0) == saved.speed.cost("all_reduce", 1e6, ("0", "1"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hosts", ["elsewhere"] * 4),
        ("cores", [1234] * 4),
        ("torch", "1.0.0"),
    ],
)
def test_the_file_of_another_machine_is_refused(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    measured_mesh(2, 2).save(path)
    content = json.loads(path.read_text())
    content["machine"][name] = value
    path.write_text(json.dumps(content))
    mesh = mesh_of(2, 2)
    shown = value if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=re.escape(f"was measured on another machine ({name}: {shown!r}, not ")
    ):
        mesh.load(path)
    assert mesh.speed.machine is None
    mesh.load(path, allow_other_machine=True)
    assert mesh.all_gather_cost(0, 0) == pytest.approx(1e-4, rel=1e-12)


def test_a_file_of_other_ranks_is_refused(tmp_path: Path) -> None:
    measured_mesh(2, 2).save(tmp_path / "mesh.json")
    for mesh in (mesh_of(8), DeviceMesh(torch.tensor([0, 2, 1, 3]))):
        with pytest.raises(ValueError, match=r"is of the ranks \[0, 1, 2, 3\] in this order, the mesh of \["):
            mesh.load(tmp_path / "mesh.json")
    with pytest.raises(ValueError, match=r"nosuch cannot be read: .*No such file"):
        mesh_of(4).load(tmp_path / "nosuch")


def test_the_search_finds_the_cheapest_of_all() -> None:
    """Two hosts of 8 ranks: what is sent often and in full stays within a host."""
    mesh = mesh_of(2, 8, mesh_alpha=[1e-4, 1e-6], mesh_beta=[1e-9, 1e-11])

    def seconds(shape: tuple[int, ...], roles: tuple[str, ...]) -> float:
        speed, ranks = mesh.speed.of_shape(shape), dict(zip(roles, shape, strict=True))
        tp, dp = str(roles.index("tp")), str(roles.index("dp"))
        return speed.cost("all_reduce", 96 * 2e8 / ranks["dp"], tp) + speed.cost(
            "all_reduce", 4 * GiB / ranks["tp"], dp
        )

    found = mesh.search_shape(
        [
            ("all_reduce", lambda ranks: 96 * 2e8 / ranks["dp"], "tp"),
            ("all_reduce", lambda ranks: 4 * GiB / ranks["tp"], "dp"),
        ]
    )
    shapes = [(extent, 16 // extent) for extent in (1, 2, 4, 8, 16)]
    tried = list(itertools.product(shapes, (("tp", "dp"), ("dp", "tp"))))
    assert found.seconds == pytest.approx(min(seconds(*each) for each in tried), rel=1e-12)
    assert found.seconds == pytest.approx(seconds(found.shape, found.roles), rel=1e-12)
    assert found.num_ranks == {"dp": 2, "tp": 8}
    assert found.roles == ("dp", "tp")
    assert sum(seconds(*each) > found.seconds for each in tried) == len(tried) - 1


def test_a_shape_can_be_forbidden() -> None:
    mesh = mesh_of(6)
    free = mesh.search_shape([("all_gather", 1e6, "x"), ("all_gather", 1.0, "y")])
    assert free.num_ranks == {"x": 1, "y": 6}
    found = mesh.search_shape(
        [("all_gather", lambda ranks: 1e6 if ranks["x"] > 2 else math.inf, "x"), ("all_gather", 1.0, "y")]
    )
    assert found.num_ranks == {"x": 3, "y": 2}
    assert mesh.search_shape([("all_reduce", 5.0, "only")]).shape == (6,)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([], "give at least one"),
        ([("gather", 1, "x")], "operation 'gather': choose one of all_gather"),
        ([("all_gather", -1, "x")], "num_bytes=-1: give 0 or more"),
        ([("all_gather", math.inf, "x")], "math.inf in every shape"),
    ],
)
def test_a_search_of_nothing_is_refused(operations: list[tuple[str, float, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_of(4).search_shape(operations)  # type: ignore[arg-type]


def test_a_line_says_what_it_says() -> None:
    assert AlphaBeta(1e-3, 1e-6).seconds(500) == 1e-3 + 500 * 1e-6
