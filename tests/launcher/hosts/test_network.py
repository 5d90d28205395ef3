"""The hosts that the cluster tests stand on."""

import subprocess
from pathlib import Path

import pytest

from colossalai.launcher._ssh import ssh_command
from tests.launcher.hosts.network import Network, make_network

pytestmark = pytest.mark.cluster


def test_a_host_has_its_own_name_and_reaches_the_others_over_ssh(network: Network):
    words = ["printf", r"%s\n", "two  words", "it's $HOME", 'a "b"', "*", ";exit 7"]
    done = network.run("host1", ssh_command("host2", ["sh", "-c", 'hostname; "$@"', "sh", *words]))
    assert done.stdout.splitlines() == ["host2", *words[2:]], done.stderr
    assert network.run("host3", ["hostname"]).stdout == "host3\n"


def test_a_cut_cable_and_a_stopped_sshd_are_noticed(network: Network):
    network.stop_sshd("host3")
    done = network.run("host1", ssh_command("host3", ["true"]))
    assert done.returncode == 255
    assert "Connection refused" in done.stderr
    network.start_sshd("host3")
    network.cut("host3")
    assert network.run("host1", ["ssh", "-o", "ConnectTimeout=1", "host3", "true"]).returncode == 255
    network.mend("host3")
    assert network.run("host1", ssh_command("host3", ["true"])).returncode == 0


def test_two_networks_do_not_meet_and_nothing_is_left(network: Network):
    other = make_network(1)
    namesake = f"{other.prefix}0-host1"  # as the eleventh network has where `other` is the second
    subprocess.run(["ip", "netns", "add", namesake], check=True)
    try:
        sleeper = other.start("host1", ["sleep", "60"])
        while not other.pids("host1"):
            assert sleeper.poll() is None
        assert network.pids("host1") == []
        assert other.run("host1", ["ssh", "host2", "true"]).returncode == 255
    finally:
        other.close()
    assert sleeper.wait() == -9
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    subprocess.run(["ip", "netns", "del", namesake], check=True)
    assert other.prefix not in left.replace(namesake, "")
    assert namesake in left
    assert not list(Path("/etc/netns").glob(f"{other.prefix}*"))
    assert not other.folder.exists()
