"""A training that loses a worker or a host goes on from its last complete checkpoint, with the same losses.

The script is the one a user would write after docs/features/checkpoint.md: it loads at its start and saves
after each step. Each rank takes its part of a global batch that does not depend on how many ranks there are.
The losses of all starts are compared with plain torch in one process, which nothing has disturbed.
"""

import random
import re
import time

import psutil
import pytest
import torch

from tests.launcher.hosts.launch import Launch, wait_until_empty
from tests.launcher.hosts.side_by_side import Site, side_by_side

pytestmark = pytest.mark.cluster

BATCH = """
import torch

def model_and_optimizer():
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = torch.nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def global_batch(step):
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()
"""
TRAINS = f"""{BATCH}
import os, time
import torch.distributed as dist
import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.core import global_context as gpc

colossalai.launch_from_torch({{}}, verbose=False)
rank, num_ranks = dist.get_rank(), dist.get_world_size()
booster = Booster(plugin=TorchDDPPlugin())
model, optimizer, *_ = booster.boost(*model_and_optimizer())
resumed = booster.load("states", model, optimizer)
step = 0 if resumed is None else resumed.step
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"start {{attempt}} rank {{rank}} of {{num_ranks}}: {{os.getpid()}} at {{step}}")
finish = torch.tensor(0)
while not finish:
    optimizer.zero_grad()
    loss = loss_of(model, global_batch(step).chunk(num_ranks)[rank])
    booster.backward(loss, optimizer)
    optimizer.step()
    step += 1
    total = loss.detach() / num_ranks
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {{step}} loss {{total.item()!r}}")
    booster.save("states", model, optimizer, step=step)
    if rank == 0:
        print(f"saved {{step}}")
    finish.fill_(os.path.exists("finish"))
    dist.broadcast(finish, 0)
    time.sleep(0.02)
gpc.destroy()
"""
START = r"start {} rank (\d) of (\d): (\d+) at (\d+)$"


def undisturbed_losses(num_steps: int) -> list[float]:
    """Return the losses of plain torch on the same global batches."""
    names: dict = {}
    exec(BATCH, names)
    model, optimizer = names["model_and_optimizer"]()
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = names["loss_of"](model, names["global_batch"](step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def starts(job: Launch, attempt: int, num_ranks: int) -> tuple[dict[int, int], int]:
    """Wait for a start with so many ranks; return their processes by rank, and the step they begin at."""
    found = job.wait_for(START.format(attempt), num_ranks)
    assert [int(size) for _, size, _, _ in found] == [num_ranks] * num_ranks
    (step,) = {int(step) for *_, step in found}
    return {int(rank): int(pid) for rank, _, pid, _ in found}, step


def finish(job: Launch, *, resumed_at: int) -> None:
    """Let the job end a few steps later, and compare the losses of all its starts."""
    job.wait_for(rf"saved {resumed_at + 5}$")
    (job.folder / "finish").touch()
    assert job.wait() == 0, job.err
    before, after = re.split(r"^.*start 1 rank 0.*\n", job.out, flags=re.MULTILINE)
    # What was said to be saved is not lost, and nothing that was not saved is taken for done.
    last_saved = max(map(int, re.findall(r"saved (\d+)$", before, re.MULTILINE)))
    assert resumed_at in (last_saved, last_saved + 1)
    for text, first in ((before, 0), (after, resumed_at)):
        steps = re.findall(r"step (\d+) loss (\S+)$", text, re.MULTILINE)
        assert [int(step) for step, _ in steps] == list(range(first + 1, first + len(steps) + 1))
        losses = torch.tensor([float(loss) for _, loss in steps], dtype=torch.float64)
        wanted = torch.tensor(undisturbed_losses(first + len(steps))[first:], dtype=torch.float64)
        torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-10)


@side_by_side
def test_a_killed_worker(site: Site) -> None:
    job = site.start(TRAINS, "--max-restarts", "1")
    pids, step = starts(job, 0, 2)
    assert step == 0
    job.wait_for(r"saved 5$")
    time.sleep(random.Random(7).uniform(0.0, 0.2))  # anywhere in a step, or in its save
    psutil.Process(pids[1]).kill()
    _, step = starts(job, 1, 2)
    assert re.search(r"rank 1 on host2 \(pid \d+\) was killed by SIGKILL; restart 1 of 1", job.err)
    finish(job, resumed_at=step)
    wait_until_empty(site.network)


@side_by_side
def test_a_host_that_is_gone(site: Site) -> None:
    job = site.start(TRAINS, "--nnodes", "1:2")
    starts(job, 0, 2)
    job.wait_for(r"saved 5$")
    site.network.cut("host2")
    try:
        _, step = starts(job, 1, 1)
        finish(job, resumed_at=step)
    finally:
        site.network.mend("host2")
    assert "goes on with 1 of 2 nodes; host2: " in job.err
    wait_until_empty(site.network)  # sshd there has to notice that the head is gone
