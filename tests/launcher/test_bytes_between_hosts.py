"""What passes between two hosts of two ranks each, by the counters of their connections."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.hosts.launch import launch
from tests.launcher.hosts.network import Network

pytestmark = pytest.mark.cluster
BYTES = 4 << 22

# The hosts of these tests have one kernel, so that all ranks would share its memory: here each has its own.
SUMS = """
import re, socket, subprocess, sys
import torch, torch.distributed as dist
import colossalai
from colossalai.communication.shared_memory import _islands, transport_of

place = _islands._location
_islands._location = lambda: {**place(), "kernel": socket.gethostname()}
colossalai.launch_from_torch(backend=sys.argv[1], verbose=False)

def num_sent():
    # Of data alone: interfaces count acknowledgements, too, and what is sent again, which hangs on the load.
    told = subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout
    total = 0
    for ends, counters in re.findall(r"^(\\S.*)\\n\\s+(.*)", told, re.MULTILINE):
        here, there = (end.rpartition(":")[0] for end in ends.split()[3:5])
        number = dict(re.findall(r"(bytes_\\w+):(\\d+)", counters))
        if here != there:
            total += int(number.get("bytes_sent", 0)) - int(number.get("bytes_retrans", 0))
    return total

rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
tensor = torch.randn(1 << 22, generator=generator)
# The ranks of a host read one counter: nobody may send before its neighbour has read it.
dist.barrier()
before = num_sent()
dist.barrier()
dist.all_reduce(tensor)
dist.barrier()
sent = num_sent() - before
terms = [torch.randn(1 << 22, generator=torch.Generator().manual_seed(other)) for other in range(4)]
in_order = (terms[0] + terms[1]) + (terms[2] + terms[3])
print(f"{transport_of()}; sent {sent}; off by {(tensor - in_order).abs().max().item()}", flush=True)
"""


def _sums_over(backend: str, network: Network, folder: Path) -> list[tuple[str, int, float]]:
    folder.mkdir()
    job = launch(
        network,
        folder,
        "--no-preflight",
        "--host",
        "host[1-2]",
        "--nproc_per_node",
        "2",
        "job.py",
        backend,
        script=SUMS,
    )
    try:
        assert job.wait() == 0, job.err
    finally:
        job.end()
    found = re.findall(r"^\[host\d:\d\] (.*); sent (\d+); off by (.*)$", job.out, re.MULTILINE)
    assert len(found) == 4, job.out
    return [(talk, int(sent), float(off)) for talk, sent, off in found]


def test_a_host_sends_what_one_rank_would(
    network: Network, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    over_gloo = _sums_over("gloo", network, tmp_path / "gloo")
    through_both = _sums_over("auto", network, tmp_path / "auto")
    for talk, sent, off in through_both:
        assert talk == "shared memory, and gloo between machines"
        assert BYTES < sent < 1.01 * BYTES
        assert off == 0.0
    assert {talk for talk, *_ in over_gloo} == {"gloo"}
    assert min(sent for _, sent, _ in over_gloo) > 1.49 * BYTES
    record_property("bytes over gloo alone", over_gloo[0][1])
