"""A job that may be restarted comes through kills and lost hosts."""

import re

import pytest

from tests.launcher.command import wait_until
from tests.launcher.hosts.kills import kill_again_and_again
from tests.launcher.hosts.launch import wait_until_empty
from tests.launcher.hosts.side_by_side import Site, side_by_side

pytestmark = pytest.mark.cluster

WAITS = """
import os, time
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
print("rank", *(os.environ[name] for name in names))
while not os.path.exists("finish"):
    time.sleep(0.02)
"""


@side_by_side
def test_killed_ranks_and_agents_are_started_again(site: Site) -> None:
    kill_again_and_again(site.network, site.folder, kills=2, seed=3)


@side_by_side
def test_a_host_that_is_lost_and_returns_is_waited_for(site: Site) -> None:
    job = site.start(WAITS, "--max-restarts", "1")
    assert sorted(job.wait_for(r"rank (\d 2 host1 0)$", 2)) == ["0 2 host1 0", "1 2 host1 0"]
    site.network.stop_sshd("host2")
    try:
        job.agent("host2").kill()
        wait_until(lambda: "restart 1 of 1" in job.err)
    finally:
        site.network.start_sshd("host2")
    assert sorted(job.wait_for(r"rank (\d 2 host1 1)$", 2)) == ["0 2 host1 1", "1 2 host1 1"]
    (job.folder / "finish").touch()
    assert job.wait() == 0, job.err
    wait_until_empty(site.network)


@side_by_side
def test_a_job_that_may_be_smaller_goes_on_without_the_host_that_has_the_store(site: Site) -> None:
    job = site.start(WAITS, "--nnodes", "1:2", hosts="host2,host1")
    job.wait_for(r"rank \d 2 host2 0$", 2)
    site.network.stop_sshd("host2")
    try:
        job.agent("host2").kill()
        assert job.wait_for(r"^\[host1:0\] rank (0 1 \S+ 1)$") == ["0 1 127.0.0.1 1"]
        (job.folder / "finish").touch()
        assert job.wait() == 0, job.err
    finally:
        site.network.start_sshd("host2")
    assert (
        "goes on with 1 of 2 nodes; host2: ssh: connect to host host2 port 22: Connection refused" in job.err
    )
    wait_until_empty(site.network)


@side_by_side
def test_a_failure_after_the_last_restart_is_reported(site: Site) -> None:
    job = site.start(WAITS, "--max-restarts", "1")
    for attempt in range(2):
        job.wait_for(rf"rank \d 2 host1 {attempt}$", 2)
        job.agent("host1").kill()
    assert job.wait() == 1
    assert re.findall(r"colossalai run: host1 is lost: its agent was killed by SIGKILL(.*)", job.err) == [
        "; restart 1 of 1",
        "",
    ]
    wait_until_empty(site.network)
