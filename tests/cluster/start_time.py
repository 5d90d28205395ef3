"""From Enter to the first step on two hosts: `colossalai run` against plain torchrun.

    python -m tests.cluster.start_time --rounds 3

All run the same script, as root, on the hosts of network.py. torchrun is started on both hosts over ssh at
the same moment. The first step is an all-reduce over gloo.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.network import ROOT, Network

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("stepped at", time.time())
dist.destroy_process_group()
"""
TORCHRUN = "-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --master_addr host1 --master_port 29500"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    run = [sys.executable, "-m", "colossalai.cli", "run", "--host", "host1,host2", "--nproc_per_node", "1"]
    ways = {
        "torchrun over ssh": ["sh", "-c", _torchrun()],
        "colossalai run": [*run, "job.py"],
        "colossalai run --no-preflight": [*run, "--no-preflight", "job.py"],
    }
    network = Network(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.py").write_text(SCRIPT)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way, command in ways.items():
                    seconds[way].append(_first_step(network, command, folder))
    finally:
        network.close()
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    for way, median in medians.items():
        print(f"{way:32} {median:6.2f} s   {median - medians['torchrun over ssh']:+.2f} s")
    if options.json:
        Path(options.json).write_text(json.dumps({"seconds": seconds, "medians": medians}, indent=1) + "\n")


def _torchrun() -> str:
    """Return a shell line that starts torchrun on both hosts and waits for both."""
    one = "cd {folder} && OMP_NUM_THREADS=1 {python} {torchrun} --node_rank {rank} job.py"
    parts = []
    for rank in (0, 1):
        line = one.format(folder="$0", python=shlex.quote(sys.executable), torchrun=TORCHRUN, rank=rank)
        parts.append(f'ssh host{rank + 1} "{line}" &')
    return " ".join([*parts, "wait"])


def _first_step(network: Network, command: list[str], folder: str) -> float:
    """Return the seconds until the last of both ranks has made a step."""
    words = [*command, folder] if command[0] == "sh" else command
    began = time.time()
    done = network.run("host1", words, cwd=folder, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    # torchrun's ranks write into each other's lines.
    steps = [float(found) for found in re.findall(r"\d{10}\.\d+", done.stdout)]
    if done.returncode != 0 or len(steps) != 2:
        raise SystemExit(f"{shlex.join(words)} failed:\n{done.stdout}\n{done.stderr}")
    return max(steps) - began


if __name__ == "__main__":
    main()
