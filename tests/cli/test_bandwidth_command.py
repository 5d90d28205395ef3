"""`colossalai check --bandwidth`: ranks measure truly, and what they found is shown or written."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner, Result

from colossalai.cli import main
from colossalai.cli._bandwidth import _command, _worker
from colossalai.device import OPERATIONS, DeviceMesh
from colossalai.launcher import Job
from tests.launcher.command import START_S, start
from tests.ranks import run_ranks


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["check", *args], env={"COLUMNS": "80"})


def launch_forked(job: Job) -> int:
    """Run the ranks of a job, in a twentieth of the time."""
    assert job.target == _worker.__name__
    run_ranks(_worker.main, job.num_procs or 0, *job.args)
    return 0


@pytest.mark.dist
@pytest.mark.long  # `make test` has what ranks measure as JSON, and a table of many ranks
def test_ranks_measure_and_a_table_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_command, "launch", launch_forked)
    result = invoke("--bandwidth", "--mesh", "1x2")
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.startswith("1x2 ranks on ")
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if any(op in line for op in OPERATIONS)]
    assert [op for row in rows for op in row if op in OPERATIONS] == [*OPERATIONS]
    labels = [" ".join(row[: row.index(OPERATIONS[0])]) for row in rows if OPERATIONS[0] in row]
    assert labels == ["2 adjacent"]
    assert all(row[-1].endswith("%") for row in rows)


@pytest.mark.dist
def test_json_is_a_file_that_a_mesh_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_command, "launch", launch_forked)
    result = invoke("--bandwidth", "--nproc_per_node", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["shape"] == [2]
    (tmp_path / "mesh.json").write_text(result.stdout)
    mesh = DeviceMesh(torch.arange(2))
    mesh.load(tmp_path / "mesh.json")
    assert 0 < mesh.all_reduce_cost(1e6, 0) < 60


@pytest.mark.unit
def test_a_table_of_many_ranks_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    line = {"alpha": 123.456, "beta": 1e-5, "error": 9.99}
    free = {"alpha": 1e-6, "beta": 0.0, "error": 0.0}
    operations = {op: free if op == "all_gather" else line for op in OPERATIONS}
    machine = {
        "hosts": ["h"] * 512,
        "cores": [96] * 512,
        "device": "cpu",
        "backend": "gloo",
        "torch": "2.13.0",
    }
    group = {"extents_and_strides": [[128, 128]], "operations": operations}
    _command.show_bandwidth({"machine": machine, "shape": [128, 128], "groups": [group]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "128x128 ranks on h (96 cores), cpu, gloo, torch 2.13.0"
    assert max(map(len, lines)) <= 80
    rows = [" ".join(each.split()) for each in lines]
    assert "128 every 128 all_gather 1 us - 1 us 0%" in rows
    assert "point_to_point 123456.0 ms 0.00 133941.8 ms 999%" in rows


@pytest.mark.unit
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--bandwidth is measured between processes: give --nproc_per_node 2 or more"),
        (("--nproc_per_node", "1"), "give --nproc_per_node 2 or more"),
        (("--nproc_per_node", "0"), "0 is not in the range x>=1"),
        (("--mesh", "2x"), "--mesh 2x: give the ranks along each axis, such as 2x4"),
        (("--mesh", "0x4"), "--mesh 0x4: give the ranks along each axis"),
        (("--mesh", "2x2", "--nproc_per_node", "3"), "--mesh 2x2 has 4 ranks, --nproc_per_node is 3"),
        (("--mesh", "2x2", "--host", "a,b"), "hosts: these are options of colossalai check --doctor"),
        (("--doctor",), "choose a check"),
        (("-i",), "colossalai check --bandwidth measures the cost of communication"),
    ],
)
def test_a_mistake_is_said_before_anything_starts(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_command, "launch", lambda job: pytest.fail("started"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    result = invoke("--bandwidth", *args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.unit
def test_the_mesh_is_an_option_of_bandwidth_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("-i", "--doctor"):
        result = invoke(other, "--mesh", "2x2")
        assert result.exit_code == 2
        assert "mesh: these are options of colossalai check --bandwidth" in result.output
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    result = invoke("--bandwidth", "--mesh", "2x2")
    assert "4 processes, but this machine has 3 devices" in " ".join(result.output.split())


@pytest.mark.dist
@pytest.mark.long  # `make test` ends jobs of the launcher by SIGINT: tests/launcher/hosts/test_ends.py
def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    command = start(tmp_path / "job", "check", "--bandwidth", "--nproc_per_node", "2")
    try:
        parent, ranks, deadline = psutil.Process(command.process.pid), [], time.monotonic() + START_S
        while len(ranks) < 2 and command.process.poll() is None and time.monotonic() < deadline:
            ranks = [
                child for child in parent.children(recursive=True) if _worker.__name__ in child.cmdline()
            ]
            time.sleep(0.02)
        assert len(ranks) == 2, command.err
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(ranks, timeout=START_S)
        assert not alive
    finally:
        command.end()
