"""`DeviceMesh` in a job: groups, what `profile` measures, and files that all ranks agree about."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.communication import all_gather, ledger
from colossalai.core import global_context as gpc
from colossalai.device import OPERATIONS, PROFILE_SIZES, DeviceMesh, _profile, measure_operation
from tests.harness.clocks import ReadClock
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

ORDER = [3, 1, 0, 2]
LARGE = 1 << 20


def gathered_along_each_axis(backend: str) -> dict[str, list[int]]:
    """Gather the ranks along every axis of a mesh whose ranks are in no row-major order."""
    colossalai.launch_from_torch({}, backend=backend, verbose=False)
    mesh = DeviceMesh(torch.tensor(ORDER), (2, 2), init_process_group=True).mesh
    own = torch.tensor([dist.get_rank()])
    num_groups = len(mesh._groups)
    found = {
        "*".join(axes): all_gather(own, 0, mesh.axis(axes)).tolist() for axes in (("0",), ("1",), ("0", "1"))
    }
    assert len(mesh._groups) == num_groups == 3, "they were there before"
    dist.barrier()
    mesh.forget_groups()
    gpc.destroy()
    return found


@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
def test_groups_have_the_logical_order(backend: str) -> None:
    found = run_ranks(gathered_along_each_axis, 4, backend)
    rows, columns = {3: [3, 1], 1: [3, 1], 0: [0, 2], 2: [0, 2]}, {3: [3, 0], 0: [3, 0], 1: [1, 2], 2: [1, 2]}
    for rank, ranks in enumerate(found):
        assert ranks == {"0": columns[rank], "1": rows[rank], "0*1": ORDER}


def groups_are_taken() -> None:
    """A mesh of the job has groups already: the device mesh uses these and makes none."""
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    mesh = DeviceMesh(torch.arange(4), (2, 2))
    mesh.mesh.take_groups_of(gpc.mesh)
    assert mesh.mesh.group("1") is gpc.mesh.group("tp")
    assert mesh.mesh.group("0") is gpc.mesh.group("dp")
    assert mesh.flatten().mesh.group("0") is dist.group.WORLD
    with pytest.raises(ValueError, match=r"profile\(\) of a mesh of 2 ranks needs a job of as many.* of 4"):
        DeviceMesh(torch.arange(2)).profile()
    gpc.destroy()


def test_groups_of_the_job_are_taken() -> None:
    run_ranks(groups_are_taken, 4)


def profiled(folder: str, num_sizes: int) -> dict[str, Any]:
    """Profile, save, load, and load what another machine could have saved."""
    _profile.PROFILE_SIZES = PROFILE_SIZES[:num_sizes]
    colossalai.launch_from_torch({}, verbose=False)
    mesh = DeviceMesh(torch.arange(4), (2, 2))
    speed = mesh.profile()
    assert speed is mesh.speed
    path = Path(folder) / "mesh.json"
    mesh.save(path)
    text = mesh.to_json()
    loaded = DeviceMesh(torch.arange(4), (4, 1))
    loaded.load(path)
    assert loaded.speed.lines == speed.lines
    refusals = []
    if dist.get_rank() == 0:
        content = json.loads(text)
        content["machine"] |= {"backend": "smoke signals", "hosts": ["a", "b", "c", "d"]}
        path.write_text(json.dumps(content))
    for other in (path, Path(folder) / "nosuch"):
        try:
            mesh.load(other)
        except ValueError as error:
            refusals.append(str(error))
    assert loaded.load(path, allow_other_machine=True).machine != speed.machine
    gpc.destroy()
    return {"text": text, "refusals": refusals}


@pytest.mark.parametrize("num_sizes", [3, further(len(PROFILE_SIZES))])
def test_a_profile_is_the_same_on_all_ranks(num_sizes: int, tmp_path: Path) -> None:
    found = run_ranks(profiled, 4, str(tmp_path), num_sizes)
    assert all(each == found[0] for each in found)
    content = json.loads(found[0]["text"])
    kinds = [each["extents_and_strides"] for each in content["groups"]]
    assert sorted(kinds) == [[[2, 1]], [[2, 2]], [[4, 1]]]
    for group in content["groups"]:
        assert set(group["operations"]) == set(OPERATIONS)
        for line in group["operations"].values():
            assert line["alpha"] + line["beta"] > 0
            assert line["error"] > 0
    other, missing = found[0]["refusals"]
    assert "another machine (hosts: ('a', 'b', 'c', 'd'), not " in other
    assert "backend: 'smoke signals', not " in other
    assert "nosuch cannot be read" in missing


def times_of_unequal_ranks() -> list[Any]:
    """Measure where rank 2 alone takes time, 5 s between two readings, and count what is sent."""
    colossalai.launch_from_torch({}, verbose=False)
    mesh = DeviceMesh(torch.arange(4), (2, 2)).mesh
    clock = ReadClock(step=5.0 if dist.get_rank() == 2 else 0.0).clock
    with ledger() as book:
        times = measure_operation("all_to_all", mesh.axis("1"), [1000, 2 * LARGE], clock=clock)
    sent = [entry.num_bytes for entry in book.entries if entry.op == "all_to_all"]
    gpc.destroy()
    return [times, sent]


def test_times_are_those_of_the_slowest_rank() -> None:
    found = run_ranks(times_of_unequal_ranks, 4)
    times, sent = found[0]
    assert all(each == found[0] for each in found)
    # The calls of a round share the 5 s between two readings.
    assert times == {1000: 5.0 / 2, 2 * LARGE: 5.0}
    assert sent.count(LARGE) == 2, "above 1 MB: once untimed, and once"
    # The clock of rank 2 runs away, so patience ends after the fewest rounds; on all ranks, or they hang.
    assert sent.count(500) == 1 + 3 * (1 + 2)


def sizes_that_ranks_do_not_divide() -> list[int]:
    colossalai.launch_from_torch({}, verbose=False)
    axis = DeviceMesh(torch.arange(3)).mesh.axis("0")
    for op in OPERATIONS:
        assert list(measure_operation(op, axis, [1024, 5])) == [1032, 12], op
    gpc.destroy()
    return list(PROFILE_SIZES)


def test_sizes_are_rounded_up() -> None:
    sizes = run_ranks(sizes_that_ranks_do_not_divide, 3)[0]
    assert (sizes[0], sizes[-1], len(sizes)) == (1 << 10, 1 << 24, 8)
