"""A job on two hosts whose ranks are killed at random moments, again and again; it has to come through.

python -m tests.launcher.hosts.kills --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.launcher.hosts.launch import START_S, launch, wait_until_empty
from tests.launcher.hosts.network import Network

# Each step is a collective; the number of steps that are done is the checkpoint.
TRAINS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
done = int(open("checkpoint").read()) if os.path.exists("checkpoint") else 0
agreed = [None, None]
dist.all_gather_object(agreed, done)
assert agreed[0] == agreed[1], agreed
print(f"attempt {attempt} rank {rank}: {os.getpid()} starts at {done}")
while not os.path.exists("finish") or done % 10:
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4
    done += 1
    if rank == 0:
        with open("checkpoint.part", "w") as file:
            file.write(str(done))
        os.replace("checkpoint.part", "checkpoint")
    flag = torch.tensor(int(os.path.exists("finish")))
    dist.broadcast(flag, 0)
    if flag:
        break
    time.sleep(0.02)
print(f"rank {rank} ends at {done}")
dist.destroy_process_group()
"""


def kill_again_and_again(network: Network, folder: Path, *, kills: int, seed: int, log: bool = False) -> None:
    """Kill a rank or an agent `kills` times and see that the job goes on each time, and ends well."""
    choose = random.Random(seed)
    words = ("--no-preflight", "--host", "host1,host2", "--max-restarts", str(kills), "job.py")
    job = launch(network, folder, *words, script=TRAINS)
    try:
        for attempt in range(kills + 1):
            began = time.monotonic()
            pattern = rf"attempt {attempt} rank (\d): (\d+) starts at (\d+)$"
            ranks = {int(rank): int(pid) for rank, pid, _ in job.wait_for(pattern, 2)}
            if log:
                print(f"start {attempt} after {time.monotonic() - began:.1f} s", flush=True)
            if attempt == kills:
                break
            time.sleep(choose.uniform(0.0, 0.5))
            if choose.random() < 0.25:
                job.agent(choose.choice(network.hosts[:2])).kill()
            else:
                psutil.Process(ranks[choose.choice((0, 1))]).kill()
        (folder / "finish").touch()
        assert job.wait(START_S) == 0, job.err
        wait_until_empty(network)
    finally:
        job.end()
    starts = [int(done) for done in re.findall(r"rank 0: \d+ starts at (\d+)$", job.out, re.MULTILINE)]
    assert starts == sorted(starts)
    assert len(starts) == kills + 1
    restarts = re.findall(r"restart (\d+) of", job.err)
    assert restarts == [str(number) for number in range(1, kills + 1)], job.err


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    network = Network(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            kill_again_and_again(network, Path(folder), kills=options.kills, seed=options.seed, log=True)
            print(f"{options.kills} kills of {options.kills} were clean, in {time.monotonic() - began:.0f} s")
    finally:
        network.close()


if __name__ == "__main__":
    sys.exit(main())
