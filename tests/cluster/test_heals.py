"""A job that may be restarted comes through kills and lost hosts."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.command import wait_until
from tests.cluster.kills import kill_again_and_again
from tests.cluster.launch import Launch, launch, wait_until_empty
from tests.cluster.network import Network

pytestmark = pytest.mark.cluster

GONE_S = 30.0

WAITS = """
import os, time
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
print("rank", *(os.environ[name] for name in names))
while not os.path.exists("finish"):
    time.sleep(0.02)
"""


@pytest.fixture
def begin(network: Network, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start a job on host1 and host2 that is ended with the test."""
    launches: list[Launch] = []

    def start(*args: str, hosts: str = "host1,host2") -> Launch:
        words = ("--no-preflight", "--host", hosts, *args, "job.py")
        launches.append(launch(network, tmp_path, *words, script=WAITS))
        return launches[-1]

    yield start
    for one in launches:
        one.end()


def test_killed_ranks_and_agents_are_started_again(network: Network, tmp_path: Path):
    kill_again_and_again(network, tmp_path, kills=2, seed=3)


def test_a_host_that_is_lost_and_returns_is_waited_for(begin: Callable[..., Launch], network: Network):
    job = begin("--max-restarts", "1")
    assert sorted(job.wait_for(r"rank (\d 2 host1 0)$", 2)) == ["0 2 host1 0", "1 2 host1 0"]
    network.stop_sshd("host2")
    try:
        job.agent("host2").kill()
        wait_until(lambda: "restart 1 of 1" in job.err, GONE_S)
    finally:
        network.start_sshd("host2")
    assert sorted(job.wait_for(r"rank (\d 2 host1 1)$", 2)) == ["0 2 host1 1", "1 2 host1 1"]
    (job.folder / "finish").touch()
    assert job.wait() == 0, job.err
    wait_until_empty(network, 5)


def test_a_job_that_may_be_smaller_goes_on_without_the_host_that_has_the_store(
    begin: Callable[..., Launch], network: Network
):
    job = begin("--nnodes", "1:2", hosts="host2,host1")
    job.wait_for(r"rank \d 2 host2 0$", 2)
    network.stop_sshd("host2")
    try:
        job.agent("host2").kill()
        assert job.wait_for(r"^\[host1:0\] rank (0 1 \S+ 1)$") == ["0 1 127.0.0.1 1"]
        (job.folder / "finish").touch()
        assert job.wait() == 0, job.err
    finally:
        network.start_sshd("host2")
    assert (
        "goes on with 1 of 2 nodes; host2: ssh: connect to host host2 port 22: Connection refused" in job.err
    )
    wait_until_empty(network, 5)


def test_a_failure_after_the_last_restart_is_reported(begin: Callable[..., Launch], network: Network):
    job = begin("--max-restarts", "1")
    for attempt in range(2):
        job.wait_for(rf"rank \d 2 host1 {attempt}$", 2)
        job.agent("host1").kill()
    assert job.wait() == 1
    assert re.findall(r"colossalai run: host1 is lost: its agent was killed by SIGKILL(.*)", job.err) == [
        "; restart 1 of 1",
        "",
    ]
    wait_until_empty(network, 10)
