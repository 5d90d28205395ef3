"""The launch functions under real launchers, on one host and on two, where the meeting place is left out.

With host and port, and `launch_from_torch`, they are run by test_multi_node_page.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.hosts import openmpi
from tests.launcher.hosts.network import ROOT, Network
from tests.launcher.hosts.slurm import Slurm

pytestmark = pytest.mark.cluster

needs_mpirun = pytest.mark.skipif(bool(openmpi.reason_to_skip()), reason=openmpi.reason_to_skip())

SCRIPT = """
import os, socket, sys
import torch, torch.distributed as dist
import colossalai

getattr(colossalai, f"launch_from_{sys.argv[1]}")({}, verbose=False, timeout=60)
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()} on {socket.gethostname()}: {total}\\n".encode())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(SCRIPT)
    return tmp_path


def srun(slurm: Slurm, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return slurm.run(["srun", *words, sys.executable, "job.py", "slurm"], cwd=folder, env=_environment())


def mpirun(network: Network, folder: Path, hosts: str) -> subprocess.CompletedProcess[str]:
    environment = _environment()
    forwarded = [word for name in environment for word in ("-x", name)]
    command = ["mpirun", *forwarded, "-H", hosts, "-np", "2", sys.executable, "job.py", "openmpi"]
    return network.run("host1", command, cwd=folder, env=environment | openmpi.SETTINGS)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def assert_ran(done: subprocess.CompletedProcess[str], *hosts: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} on {host}: 3" for rank, host in enumerate(hosts)
    ]


def test_srun_on_two_nodes(slurm: Slurm, folder: Path):
    assert_ran(srun(slurm, folder, "-N", "2", "-n", "2"), "host1", "host2")


def test_srun_on_one_node_that_is_another_than_srun_runs_on(slurm: Slurm, folder: Path):
    assert_ran(srun(slurm, folder, "-w", "host2", "-N", "1", "-n", "2"), "host2", "host2")


@needs_mpirun
def test_mpirun_on_two_nodes(network: Network, folder: Path):
    assert_ran(mpirun(network, folder, "host1:1,host2:1"), "host1", "host2")


@needs_mpirun
def test_mpirun_on_one_node_that_is_another_than_mpirun_runs_on(network: Network, folder: Path):
    assert_ran(mpirun(network, folder, "host2:2"), "host2", "host2")


@needs_mpirun
def test_mpirun_that_runs_elsewhere_than_rank_0_needs_a_host(network: Network, folder: Path):
    done = mpirun(network, folder, "host2:1,host3:1")
    assert done.returncode != 0
    assert "ValueError: rank 0 runs on host2 and mpirun on another host, at 10.77.0.1, so that" in done.stderr
