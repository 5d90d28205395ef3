"""Where the ranks of one machine listen: on its loopback, and nowhere else."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.cluster import GLOO
from colossalai.cluster._store_server import is_loopback, keep_gloo_here, let_gloo_choose, serve_store
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.launcher._agent import listen
from tests.launcher.command import start
from tests.ranks import run_ranks

_LISTENS = "0A"
_LOOPBACK_4 = "0100007F"


def listening(pids):
    """Return the addresses, as the kernel writes them, at which processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:  # closed by now
                continue
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == _LISTENS and row[9] in inodes}


@pytest.mark.unit
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_is_one(host):
    assert is_loopback(host)


@pytest.mark.unit
@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "localhost.example.org", "gpu-01", ""])
def test_any_other_is_not(host):
    assert not is_loopback(host)


@pytest.mark.unit
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback(host):
    store = serve_store(host, 0)
    store.set("a", "b")
    assert listening([os.getpid()]) == {_LOOPBACK_4}
    again = serve_store(host, store.port)  # of this very process: the same server
    assert again.get("a") == b"b"
    assert dist.TCPStore(host, store.port).get("a") == b"b"


@pytest.mark.unit
def test_a_taken_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on port {port}"):
            listen("127.0.0.1", port)


@pytest.mark.unit
def test_gloo_stays_here_only_if_all_do(monkeypatch):
    monkeypatch.delenv(GLOO, raising=False)
    assert not keep_gloo_here([b"one", b"other"])
    assert keep_gloo_here([b"one", b"one"])
    assert os.environ[GLOO] == "lo"
    let_gloo_choose()
    monkeypatch.setenv(GLOO, "eth7")
    assert not keep_gloo_here([b"one", b"one"])
    assert os.environ[GLOO] == "eth7"


def listens_where():
    os.environ.pop(GLOO, None)
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, backend="gloo", verbose=False)
    dist.all_reduce(torch.ones(1), group=gpc.get_group(ParallelMode.PIPELINE))
    dist.barrier()
    found = listening([os.getpid()])
    dist.barrier()
    gpc.destroy()
    return found, GLOO in os.environ


@pytest.mark.dist
def test_a_launched_job_listens_on_the_loopback_only():
    for found, is_left in run_ranks(listens_where, 2):
        assert found == {_LOOPBACK_4}
        assert not is_left


SCRIPT = """
import os, sys, time, pathlib, torch, colossalai
import torch.distributed as dist
colossalai.launch_from_torch({}, verbose=False)
dist.all_reduce(torch.ones(1))
print(os.getpid())
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.01)
"""


@pytest.mark.dist
@pytest.mark.long  # its two parts, a launched job and a store on the loopback, are above
def test_colossalai_run_listens_on_the_loopback_only(tmp_path):
    command = start(tmp_path, "run", "--nproc_per_node", "2", "job.py", str(tmp_path), script=SCRIPT)
    try:
        pids = command.wait_for_words(2)
        found = listening([*pids, command.process.pid])
        (tmp_path / "end").touch()
        assert command.wait() == 0
    finally:
        command.end()
    assert found == {_LOOPBACK_4}
