"""`colossalai run` inside an allocation of a real SLURM; on two nodes it is run by test_multi_node_page."""

import re
import sys
from pathlib import Path

import pytest

from tests.launcher.hosts.network import ROOT
from tests.launcher.hosts.slurm import Slurm

pytestmark = pytest.mark.cluster

RUN = (sys.executable, "-m", "colossalai.cli", "run", "--no-preflight", "job.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script."""
    (tmp_path / "job.py").write_text(
        "import os, socket; print('rank', os.environ['RANK'], os.environ['WORLD_SIZE'], socket.gethostname())"
    )
    return tmp_path


def test_in_an_allocation_of_this_machine_it_needs_no_ssh(slurm: Slurm, folder: Path):
    words = ["salloc", "-w", "host1", *RUN[:-1], "--nproc_per_node", "2", "job.py"]
    done = slurm.run(words, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 2 host1", "rank 1 2 host1"]


def test_started_by_srun_on_every_node_it_says_what_to_do(slurm: Slurm, folder: Path):
    done = slurm.run(["srun", "-N", "2", "-n", "2", *RUN], cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert len(re.findall("start it once, in the batch script without srun", done.stderr)) == 2
