"""Ranks with process numbers of their own (containers) share files in /dev/shm: it may be small or full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

pytestmark = pytest.mark.cluster  # mounts and namespaces are root's

RANK = """
import os
import sys
import torch, torch.distributed as dist
import colossalai
from colossalai.communication.shared_memory import transport_of

rank = int(sys.argv[1])
dist.init_process_group("shared_memory", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
tensor = torch.arange(1 << 20, dtype=torch.float32) * (rank + 1)  # 4 MiB
dist.all_reduce(tensor)
assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.float32) * 3)
error = ""
try:
    if rank == 0:
        dist.send(torch.arange(1 << 18), 1)
    else:
        found = torch.zeros(1 << 18, dtype=torch.int64)  # 2 MiB
        dist.recv(found, 0)
        assert torch.equal(found, torch.arange(1 << 18))
except Exception as problem:
    error = str(problem)
os.write(1, f"rank {rank}: {transport_of()}{error}\\n".encode())  # a line at once: both write to one pipe
dist.barrier()
dist.destroy_process_group()
"""

# A mount of our own, seen by both ranks; each of them is process 1 of a namespace.
BOTH = """
set -e
mount -t tmpfs {options} tmpfs /dev/shm
{then}
for rank in 0 1; do unshare --pid --fork "$0" rank.py $rank store & done
wait
ls -A /dev/shm | sed 's/^/left: /'
"""


def _run(folder: Path, options: str, then: str = "") -> tuple[str, str]:
    (folder / "rank.py").write_text(RANK)
    script = BOTH.format(options=options, then=then)
    found = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, sys.executable],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout, found.stderr


@pytest.mark.parametrize("options", ["-o size=64M", "-o size=1M"])
def test_a_small_one_does_with_smaller_parts(options: str, tmp_path: Path) -> None:
    out, err = _run(tmp_path, options)
    assert sorted(out.splitlines()) == ["rank 0: shared memory", "rank 1: shared memory"], err


@pytest.mark.parametrize(
    ("options", "then", "why"),
    [
        (
            "-o size=1M",
            "head -c 1M /dev/zero > /dev/shm/full; rm -f /dev/shm/none",
            "No space left on device",
        ),
        ("-o size=16k", "", "No space left on device"),
        ("-o ro", "", "Read-only file system"),
    ],
    ids=["full", "tiny", "read-only"],
)
def test_where_there_is_none_it_is_gloo_and_a_line(options: str, then: str, why: str, tmp_path: Path) -> None:
    out, err = _run(tmp_path, options, then)
    said = [line for line in out.splitlines() if not line.endswith(" full")]
    assert sorted(said) == ["rank 0: gloo", "rank 1: gloo"], err
    assert "talk over gloo, not through its memory" in err + out
    assert why in err + out
