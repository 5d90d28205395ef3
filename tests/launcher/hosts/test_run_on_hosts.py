"""`colossalai run` on several hosts: what the ranks get, where their lines go, and how hosts are chosen."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colossalai.launcher._environment import READ_VARIABLES
from tests.launcher.hosts.launch import Launch, launch, wait_until_empty
from tests.launcher.hosts.network import Network

pytestmark = pytest.mark.cluster

SEES = """
import json, os, socket, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "NCCL_DEBUG", "MINE", "OTHER"]
seen = {name: os.environ.get(name) for name in names}
seen |= {"host": socket.gethostname(), "argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable}
print(json.dumps({**seen, "stdin": sys.stdin.read(), "torch": "torch" in sys.modules}))
sys.stdout.flush()
os.write(2, b"no end of line")
"""

# Every write is a piece of a line, and those of four ranks come at the same time.
CHATTERS = """
import os, sys, time
letter = "abcd"[int(os.environ["RANK"])]
for line in range(200):
    for piece in range(4):
        os.write(1, letter.encode() * 30)
    os.write(1, b"\\n")
os.write(2, b"10%\\r20%\\r\\n" + bytes([255, 10]))
"""

REDUCES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
print(f"the sum is {total.item():g}")
dist.destroy_process_group()
"""


@pytest.fixture
def begin(network: Network, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start jobs that are ended with the test."""
    launches: list[Launch] = []

    def start(*args: str, **settings: str) -> Launch:
        launches.append(launch(network, tmp_path, *args, **settings))
        return launches[-1]

    yield start
    for one in launches:
        one.end()


def test_a_host_file_gives_ranks_the_place_and_the_variables_of_the_caller(
    begin: Callable[..., Launch], tmp_path: Path, network: Network
):
    import json
    import sys

    (tmp_path / "hosts").write_text("host3\nhost1 slots=2  # first\nhost2:1\n")
    job = begin(
        *("--hostfile", "hosts", "--exclude", "host3", "--env", "MINE=a b 'c' $d", "--log-dir", "logs"),
        *("job.py", "--flag", "$HOME ${local_rank} 'x'"),
        script=SEES,
        NCCL_DEBUG="WARN",
        OTHER="is not forwarded over ssh",
    )
    assert job.wait() == 0, job.err
    lines = re.findall(r"^\[(host\d):(\d)\] (\{.*\})$", job.out, re.MULTILINE)
    assert sorted((rank, host) for host, rank, _ in lines) == [("0", "host1"), ("1", "host1"), ("2", "host2")]
    for host, rank, text in lines:
        on_first = host == "host1"
        assert json.loads(text) == {
            "RANK": rank,
            "LOCAL_RANK": rank if on_first else "0",
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "2" if on_first else "1",
            "MASTER_ADDR": "host1",
            "NCCL_DEBUG": "WARN",
            "MINE": "a b 'c' $d",
            "OTHER": "is not forwarded over ssh" if on_first else None,
            "host": host,
            "argv": ["--flag", "$HOME ${local_rank} 'x'"],
            "cwd": str(tmp_path),
            "python": sys.executable,
            "stdin": "",
            "torch": False,
        }
        logged = (tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert sorted(logged) == sorted([text, "no end of line"])
    assert sorted(re.findall(r"^\[(host\d:\d)\] no end of line$", job.err, re.MULTILINE)) == [
        "host1:0",
        "host1:1",
        "host2:2",
    ]
    wait_until_empty(network)


def test_lines_are_whole(begin: Callable[..., Launch]):
    job = begin("--no-preflight", "--host", "host1:2,host2:2", "job.py", script=CHATTERS)
    assert job.wait() == 0, job.err
    lines = sorted(job.out.splitlines())
    expected = [f"[host{rank // 2 + 1}:{rank}] {'abcd'[rank] * 120}" for rank in range(4) for _ in range(200)]
    assert lines == expected
    raw = (job.folder / "stderr").read_bytes().splitlines()
    assert sorted(raw) == sorted(
        line for place in (b"host1:0", b"host1:1", b"host2:2", b"host2:3")
        for line in (b"[%s] 10%%" % place, b"[%s] 20%%" % place, b"[%s] \xff" % place)
    )  # fmt: skip


def test_ranks_of_three_hosts_meet(begin: Callable[..., Launch]):
    job = begin("--no-preflight", "--host", "host[1-3]", "--master_port", "29517", "job.py", script=REDUCES)
    assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[host{n}:{n - 1}] the sum is 6" for n in (1, 2, 3)]


def test_a_dry_run_prints_commands_that_a_shell_takes(begin: Callable[..., Launch], network: Network):
    job = begin(
        *(
            "--host",
            "host2,host3",
            "--ssh-port",
            "2222",
            "--include",
            "host3",
            "--env",
            "A=it's",
            "--dry-run",
        ),
        *("-m", "job", "x y"),
        script="raise AssertionError('started')",
    )
    assert job.wait() == 0, job.err
    variables, comment, command = job.out.splitlines()
    assert variables.startswith("# over stdin: ")
    assert """A='it'"'"'s'""" in variables
    assert comment == "# host3"
    assert command.startswith("ssh -T -o BatchMode=yes ")
    assert " -p 2222 -- host3 " in command
    printed = network.run("host1", ["sh", "-c", f"ssh() {{ printf '%s\\n' \"$@\"; }}; {command}"]).stdout
    remote = printed.splitlines()[-1]
    words = network.run("host1", ["sh", "-c", f"sh() {{ printf '%s\\n' \"$2\"; }}; {remote}"]).stdout
    assert words.startswith(f"cd {job.folder} && {READ_VARIABLES} && {sys.executable} ")
    assert words.endswith("--module -- job 'x y'; exit $?\n")
    assert network.pids("host3") == []


@pytest.mark.parametrize(
    ("host", "sshd", "expected"),
    [
        ("host1,nowhere", True, "nowhere: ssh: Could not resolve hostname nowhere"),
        ("host1,host3", False, "host3: ssh: connect to host host3 port 22: Connection refused"),
    ],
)
def test_without_preflight_a_host_that_is_not_there_is_named_and_nothing_is_left(
    begin: Callable[..., Launch], network: Network, host: str, sshd: bool, expected: str
):
    if not sshd:
        network.stop_sshd("host3")
    try:
        job = begin("--no-preflight", "--host", host, "job.py", script="open('started', 'w')")
        assert job.wait() == 1
    finally:
        if not sshd:
            network.start_sshd("host3")
    assert f"colossalai run: not all nodes could be started: {expected}" in job.err
    assert not (job.folder / "started").exists()
    wait_until_empty(network)


def test_a_taken_port_of_the_first_host_is_named_by_its_holder(
    begin: Callable[..., Launch], network: Network
):
    listener = network.start("host1", ["python3", "-c", LISTENS], stdout=-1)
    assert listener.stdout is not None
    assert listener.stdout.readline() == b"up\n"
    job = begin("--no-preflight", "--host", "host1,host2", "--master_port", "29500", "job.py")
    assert job.wait() == 1
    assert f"port 29500 is held by python3 (pid {listener.pid}," in re.sub(
        r"python3\.\d+", "python3", job.err
    )
    listener.kill()
    listener.communicate()
    wait_until_empty(network)


LISTENS = """
import socket, time
listener = socket.create_server(("", 29500))
print("up", flush=True)
time.sleep(3600)
"""
