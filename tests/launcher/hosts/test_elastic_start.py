"""A job that can do with fewer hosts starts on those that are there, and says which one is not and why."""

import pytest

from tests.launcher.command import wait_until
from tests.launcher.hosts.launch import Launch, launch, wait_until_empty
from tests.launcher.hosts.side_by_side import Site, side_by_side
from tests.launcher.hosts.test_heals import WAITS

pytestmark = pytest.mark.cluster

REFUSED = "the machine answers, but nothing listens on its ssh port (ssh: connect to host host2 port 22: Conn"


def _start(site: Site, *args: str) -> Launch:
    """Start a job with the checks before."""
    job = launch(site.network, site.folder, *args, "job.py", script=WAITS)
    site._launches.append(job)
    return job


def _finish(job: Launch) -> None:
    (job.folder / "finish").touch()
    assert job.wait() == 0, job.err


@side_by_side
def test_a_host_that_is_down_is_left_out_and_taken_in_at_a_restart(site: Site) -> None:
    site.network.stop_sshd("host2")
    job = _start(site, "--host", "host1,host2", "--nnodes", "1:2")
    assert job.wait_for(r"^\[host1:0\] rank (0 1 \S+ 0)$") == ["0 1 127.0.0.1 0"]
    assert f"host2: ssh: {REFUSED}" in job.err
    assert f"colossalai run: starts with 1 of 2 nodes; host2: {REFUSED}" in job.err
    site.network.start_sshd("host2")
    job.agent("host1").kill()
    assert sorted(job.wait_for(r"rank (\d 2 host1 1)$", 2)) == ["0 2 host1 1", "1 2 host1 1"]
    assert "goes on with" not in job.err
    _finish(job)
    wait_until_empty(site.network)


@side_by_side
def test_another_host_is_the_master_if_the_first_one_does_not_answer(site: Site) -> None:
    site.network.cut("host2")
    try:
        job = _start(site, "--host", "host2,host1", "--nnodes", "1:2", "--master_addr", "host2")
        assert job.wait_for(r"^\[host1:0\] rank (0 1 \S+ 0)$") == ["0 1 127.0.0.1 0"]
        wait_until(lambda: "starts with 1 of 2 nodes; host2: it cannot be reached" in job.err)
        _finish(job)
    finally:
        site.network.mend("host2")


@side_by_side
def test_a_job_that_needs_all_hosts_does_not_start(site: Site) -> None:
    site.network.stop_sshd("host2")
    job = _start(site, "--host", "host1,host2", "--nnodes", "2:2")
    assert job.wait() == 1
    assert f"host2: ssh: {REFUSED}" in job.err
    assert "colossalai run: nothing was started" in job.err
    assert job.out == ""


@side_by_side
def test_what_is_wrong_with_a_host_that_is_there_stops_the_job(site: Site) -> None:
    site.network.write_hosts("host2", {"host1": "10.77.0.99"})
    job = _start(site, "--host", "host1,host2", "--nnodes", "1:2")
    assert job.wait() == 1
    assert "host2: master address: host1 is 10.77.0.99 there" in job.err
    assert job.out == ""
