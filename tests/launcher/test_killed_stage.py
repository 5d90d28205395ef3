"""A stage of a pipeline is killed in the middle of a step: the job ends at once and says which one it was."""

import os
import signal
from pathlib import Path

import pytest

from tests.launcher.command import is_gone, start

pytestmark = [pytest.mark.dist, pytest.mark.long]  # tests/launcher/test_run.py kills a rank of any job

# Stage 1 stops in the forward of microbatch 5 of the second step, and says so.
TRAINS = """
import os, time
import torch
from torch import nn
import colossalai
from colossalai.builder import build_pipeline_model

class Stopping(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 8 + 6:
            os.write(1, b"stopped:0\\n")
            time.sleep(3600)
        return super().forward(x)

os.write(1, f"{os.environ['RANK']}:{os.getpid()}\\n".encode())  # one write: the ranks share the file
colossalai.launch_from_torch({"parallel": {"pipeline": 3}, "NUM_MICRO_BATCHES": 8}, verbose=False)
kinds = [nn.Linear, Stopping, nn.Linear]
model = build_pipeline_model(nn.Sequential(*(kind(8, 8) for kind in kinds)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
while True:
    engine.zero_grad()
    engine.execute_schedule(iter([torch.ones(2, 16, 8).unbind()]))
    engine.step()
"""

# The command, which waits for the errors of the neighbours however busy the machine is.
PATIENT = """
import sys
from colossalai.launcher import Job, launch
sys.exit(launch(Job(target="job.py", num_procs=3, peer_errors_s=3600.0)))
"""


def test_a_stage_that_is_killed_in_a_step_is_named(tmp_path: Path) -> None:
    command = start(tmp_path, script=TRAINS, driver=PATIENT)
    try:
        pids = dict(word.split(":") for word in command.wait_for_words(4))
        os.kill(int(pids["1"]), signal.SIGKILL)
        assert command.wait() == 128 + signal.SIGKILL
        assert all(is_gone(int(pids[rank])) for rank in "012")
    finally:
        command.end()
    assert f"colossalai run: rank 1 (pid {pids['1']}) was killed by SIGKILL" in command.err
    for neighbour in (0, 2):
        said = f"rank {neighbour} (pid {pids[str(neighbour)]}) failed with exit code 1: RuntimeError: "
        reason = f"stage 1 (rank 1) is gone while stage {neighbour} (rank {neighbour}) waited"
        assert f"{said}{reason}" in command.err
    assert "Traceback" not in command.err
