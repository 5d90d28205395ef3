"""Time from the command to the first step on two hosts: `colossalai run` against plain torchrun.

    python benchmarks/start_time.py --json benchmarks/results/start_time.json

All run the same script, as root, on the hosts of tests/launcher/hosts/network.py: network namespaces with a
real sshd each. torchrun is started on both hosts over ssh at the same moment. The first step is an all-reduce
over gloo. Each round starts each variant once, in an order that rotates; figures are medians.

Start this script directly, not with `colossalai run`: it starts its jobs. As a rank of a job, or on a machine
that cannot have such hosts, it prints a message and exits.
"""

import argparse
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.rounds import report

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.launcher.hosts.network import ROOT, Network, reason_to_skip

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("stepped at", time.time())
dist.destroy_process_group()
"""
TORCHRUN = "-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --master_addr host1 --master_port 29500"
BASELINE = "torchrun over ssh"


def ways() -> dict[str, list[str]]:
    """Return the compared commands; each runs job.py of the working directory on both hosts."""
    run = [sys.executable, "-m", "colossalai.cli", "run", "--host", "host1,host2", "--nproc_per_node", "1"]
    return {
        BASELINE: ["sh", "-c", _torchrun()],
        "colossalai run": [*run, "job.py"],
        "colossalai run --no-preflight": [*run, "--no-preflight", "job.py"],
    }


def _torchrun() -> str:
    """Return a shell line that starts torchrun on both hosts and waits for both."""
    parts = []
    for rank in (0, 1):
        command = f"{shlex.quote(sys.executable)} {TORCHRUN} --node_rank {rank} job.py"
        parts.append(f'ssh host{rank + 1} "cd $PWD && OMP_NUM_THREADS=1 {command}" &')
    return " ".join([*parts, "wait"])


def first_step(network: Network, command: list[str], folder: str) -> float:
    """Return the seconds until both ranks have finished a step."""
    began = time.time()
    done = network.run("host1", command, cwd=folder, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    # Lines of torchrun's ranks can be interleaved.
    steps = [float(found) for found in re.findall(r"\d{10}\.\d+", done.stdout)]
    if done.returncode != 0 or len(steps) != 2:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return max(steps) - began


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant, one value per round."""
    commands = ways()
    names = list(commands)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    network = Network(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "job.py").write_text(SCRIPT)
            first_step(network, commands[BASELINE], folder)  # fills the disk's cache; not timed
            for number in range(rounds):
                shift = number % len(names)
                for name in names[shift:] + names[:shift]:
                    seconds[name].append(first_step(network, commands[name], folder))
    finally:
        network.close()
    return seconds


def rows_of(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each variant: its median, the difference from torchrun's, and the extremes."""
    baseline = statistics.median(seconds[BASELINE])
    return [
        {
            "variant": name,
            "seconds": round(statistics.median(times), 2),
            "above_torchrun": round(statistics.median(times) - baseline, 2),
            "range": [round(min(times), 2), round(max(times), 2)],
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="starts of each way (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if "RANK" in os.environ:
        if os.environ["RANK"] == "0":
            print("skipped: this benchmark starts its jobs by itself; run python benchmarks/start_time.py")
        return
    if reason := reason_to_skip():
        print(f"skipped: this machine cannot have such hosts: {reason}")
        return
    report(
        "From Enter to the first step, two hosts, one rank on each",
        rows_of(measure(args.rounds)),
        settings=vars(args) | {"hosts": 2},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
