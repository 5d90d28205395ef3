"""Pre-flight on three real hosts: each failure is made for real, and named."""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.hosts.launch import START_S
from tests.launcher.hosts.network import ROOT, Network

pytestmark = pytest.mark.cluster

PORT = 29500
DRIVER = """
import dataclasses, json, sys
from colossalai.launcher.preflight import PreflightRequest, preflight
from colossalai.cluster import Host
options = json.loads(sys.argv[1])
hosts = [Host(name) for name in options.pop("names")]
report = preflight(PreflightRequest(hosts=hosts, **options))
findings = [{**dataclasses.asdict(f), "state": f.state.value, "line": f.describe()} for f in report.findings]
answer = {**dataclasses.asdict(report), "findings": findings, "is_fit": report.is_fit}
print(json.dumps({**answer, "has_torch": "torch" in sys.modules}))
"""
LISTENER = (
    "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(600)"
)
NAME_SERVER = """
import socket, time
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("", 53))
print("up", flush=True)
time.sleep(600)
"""
CLOCK_STUB = """
import socket, time
if socket.gethostname() == "host3":
    real = time.time
    time.time = lambda: real() + 90_000.0
"""


class Report:
    """What a pre-flight has said."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def lines(self, state: str = "FAILED") -> list[str]:
        return [each["line"] for each in self.data["findings"] if each["state"] == state]

    def checks(self) -> set[tuple[str, str]]:
        """Return host and check of each failure."""
        return {(each["host"], each["check"]) for each in self.data["findings"] if each["state"] == "FAILED"}


def fly(network: Network, folder: Path, *names: str, **options: Any) -> Report:
    """Run the checks on host1, for all hosts unless some are named."""
    before = {host: set(network.pids(host)) for host in network.hosts}
    limits = {"contact_s": START_S, "answer_s": START_S}  # however busy the machine is
    place = {"names": names or network.hosts, "workdir": str(folder), "master_port": PORT}
    options = {**place, **limits, **options}
    done = network.run(
        "host1",
        [sys.executable, "-c", DRIVER, json.dumps(options)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert all(set(network.pids(host)) <= before[host] for host in network.hosts), "a probe was left"
    return Report(json.loads(done.stdout))


@contextmanager
def hidden(network: Network, host: str, path: Path, behind: Path) -> Iterator[None]:
    """Let `behind` stand in the place of `path`, on one host only."""
    enter = ["nsenter", "--mount", f"--target={network.sshd_pid(host)}"]
    subprocess.run([*enter, "mount", "--bind", str(behind), str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", str(path)], check=True)


@contextmanager
def shaped(network: Network, host: str, match: str, discipline: str) -> Iterator[None]:
    """Treat the packets that a host sends and that match in another way than the rest."""
    rules = (
        "tc qdisc add dev eth0 root handle 1: htb default 10",
        "tc class add dev eth0 parent 1: classid 1:10 htb rate 10gbit",
        "tc class add dev eth0 parent 1: classid 1:30 htb rate 10gbit",
        f"tc qdisc add dev eth0 parent 1:30 {discipline}",
        f"tc filter add dev eth0 parent 1: protocol ip u32 match ip protocol 6 0xff {match} flowid 1:30",
    )
    done = network.run(host, ["sh", "-ec", "\n".join(rules)])
    try:
        assert done.returncode == 0, done.stderr
        yield
    finally:
        network.run(host, ["tc", "qdisc", "del", "dev", "eth0", "root"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a script."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('training')\n")
    return work


def test_three_good_hosts(network: Network, folder: Path):
    report = fly(network, folder, script="train.py", env={"NCCL_SOCKET_IFNAME": "eth"})
    assert report.lines() == report.lines("warning") == []
    assert report.data["is_fit"]
    assert report.data["interfaces"] == dict.fromkeys(network.hosts, "eth0")
    assert not report.data["has_torch"], "the command must not wait for torch"
    wanted = {"ssh", "versions", "directory", "script", "clock", "memory", "disk", "devices"}
    wanted |= {"master address", "interface", "network"}
    for host in network.hosts:
        assert wanted <= {each["check"] for each in report.data["findings"] if each["host"] == host}
    (exchange,) = [line for line in report.lines("ok") if line.startswith("host1: network")]
    assert "all 2 other hosts" in exchange
    assert network.run("host1", [sys.executable, "-c", LISTENER.replace("600", "0")]).stdout == "up\n"


def test_a_taken_port_and_the_command_that_frees_it(network: Network, folder: Path):
    holder = network.start("host1", [sys.executable, "-c", LISTENER], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"up\n"
        try:
            report = fly(network, folder)
            (line,) = report.lines()
            assert line.startswith(f"host1: master port: port {PORT} is held by python")
            assert f"(pid {holder.pid}, user {getpass.getuser()}, running since 20" in line
            assert re.search(r"--master_port \d+$", line)
            command = re.search(r"ssh host1 kill \d+", line)
            assert command is not None
            assert network.run("host2", command[0].split()).returncode == 0
            assert holder.wait(START_S) == -15
        finally:
            holder.kill()
            holder.wait()
    assert fly(network, folder).lines() == []


def test_a_port_of_ones_own_choice_is_found_for_0(network: Network, folder: Path):
    report = fly(network, folder, "host1", "host2", master_port=0)
    assert report.lines() == []
    port = report.data["master_port"]
    assert port >= 1024
    assert f"host2: master port: reaches port {port} of host1" in report.lines("ok")


def test_hosts_that_cannot_be_reached(network: Network, folder: Path):
    network.stop_sshd("host2")
    try:
        names = ("host1", "host2", "host9", "nobody@host1")
        report = fly(network, folder, *names)
    finally:
        network.start_sshd("host2")
    assert report.checks() == {(name, "ssh") for name in names[1:]}
    lines = dict(line.split(": ssh: ") for line in report.lines())
    assert lines["host2"].startswith("the machine answers, but nothing listens on its ssh port (")
    assert "Connection refused" in lines["host2"]
    assert lines["host9"].startswith("this machine does not know the name host9 (")
    assert lines["nobody@host1"].startswith("it refuses to log in without a password (")
    assert "ssh-copy-id nobody@host1" in lines["nobody@host1"]
    assert "host1: versions" in str(report.lines("ok")), "the others are examined all the same"


def test_a_host_that_does_not_answer(network: Network, folder: Path):
    """After the contact time, which is shorter than ssh's own."""
    network.cut("host3")
    try:
        report = fly(network, folder, "host3", contact_s=1.5)
    finally:
        network.mend("host3")
    assert report.lines() == [
        "host3: ssh: it cannot be reached: no answer within 1.5 s; "
        "see whether it is on and on this network, or leave it out: --exclude host3"
    ]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("GLOO_SOCKET_IFNAME", "eth9", "there is no such interface; it has lo 127.0.0.1, eth0 10.77.0."),
        ("NCCL_SOCKET_IFNAME", "ib", "there is no such interface; it has lo 127.0.0.1, eth0 10.77.0."),
        ("GLOO_SOCKET_IFNAME", "lo", "is the loopback, which no other host can reach"),
    ],
)
def test_a_wrong_interface(network: Network, folder: Path, variable: str, value: str, words: str):
    report = fly(network, folder, "host1", "host2", env={variable: value})
    assert report.checks() == {("host1", "interface"), ("host2", "interface")}
    for line in report.lines():
        assert f": interface: {variable}={value}" in line
        assert words in line
        assert line.endswith(f"unset {variable}, and the right one is found, or set one that all hosts have")


def test_an_interface_of_another_network(network: Network, folder: Path):
    """As with Docker's bridge: it is there on every host, and leads to none."""
    for host in ("host1", "host2"):
        rules = "ip link add data0 type veth peer name data1; ip addr add 172.17.0.1/16 dev data0"
        network.run(host, ["sh", "-c", f"{rules}; ip link set data0 up; ip link set data1 up"])
    try:
        report = fly(network, folder, "host1", "host2", env={"GLOO_SOCKET_IFNAME": "data0"})
    finally:
        for host in ("host1", "host2"):
            network.run(host, ["ip", "link", "del", "data0"])
    assert report.checks() == {("host2", "interface")}
    assert "both have the address 172.17.0.1 on data0" in report.lines()[0]
    assert fly(network, folder, "host1", "host2").data["interfaces"] == {"host1": "eth0", "host2": "eth0"}


def test_a_name_server_that_does_not_answer(network: Network, folder: Path, tmp_path: Path):
    resolver = tmp_path / "resolv.conf"
    resolver.write_text(f"nameserver {network.address('host3')}\n")
    server = network.start("host3", [sys.executable, "-c", NAME_SERVER], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout:
        try:
            assert server.stdout.readline() == b"up\n"
            with hidden(network, "host2", Path("/etc/resolv.conf"), resolver):
                report = fly(network, folder, "host2", "host1")
        finally:
            server.kill()
            server.wait()
    assert report.lines() == []
    local, peers = report.lines("warning")
    assert local.startswith("host2: name lookup: the lookup of the name of ::ffff:127.0.0.1 takes more than")
    assert local.endswith("add to /etc/hosts there: '::ffff:127.0.0.1 localhost'")
    assert peers.endswith(
        f"'::ffff:{network.address('host2')} host2', '::ffff:{network.address('host1')} host1'"
    )
    assert "host1: name lookup: the name of ::ffff:127.0.0.1 in " in str(report.lines("ok"))


def test_other_versions(network: Network, folder: Path, tmp_path: Path):
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "version.py").write_text("__version__ = '2.4.1+cpu'\n")
    (tmp_path / "empty").mkdir()
    with (
        hidden(network, "host2", Path(spec.origin).with_name("version.py"), tmp_path / "version.py"),
        hidden(network, "host3", ROOT / "colossalai", tmp_path / "empty"),
    ):
        report = fly(network, folder, env={"PYTHONPATH": str(ROOT)})
    assert report.checks() == {("host2", "versions"), ("host3", "versions")}
    old, missing = report.lines()
    assert re.fullmatch(
        r"host2: versions: torch is 2\.4\.1\+cpu, host1 has (\S+); install torch \1 there", old
    )
    assert "host3: versions: colossalai is not installed; install colossalai " in missing


def test_no_interpreter_and_no_directory(network: Network, folder: Path, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "empty").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with (
        hidden(network, "host2", tmp_path / "bin", tmp_path / "empty"),
        hidden(network, "host3", folder.parent, tmp_path / "empty"),
    ):
        report = fly(network, folder, "host1", "host2", python=str(python))
        assert report.checks() == {("host2", "interpreter")}
        assert "cannot run the interpreter of this job: " in report.lines()[0]
        assert str(python) in report.lines()[0]
        assert fly(network, folder, "host1", "host3").lines() == [
            f"host3: directory: there is no directory {folder}; "
            "create it there, or start from a directory that all hosts have"
        ]


def test_a_missing_and_another_script(network: Network, folder: Path, tmp_path: Path):
    script, other = folder / "train.py", tmp_path / "other.py"
    other.write_text("print('something else')\n")
    (tmp_path / "empty").mkdir()
    with (
        hidden(network, "host2", folder, tmp_path / "empty"),
        hidden(network, "host3", script, other),
    ):
        report = fly(network, folder, script="train.py")
    assert report.checks() == {("host2", "script"), ("host3", "script")}
    missing, different = report.lines()
    assert missing == (
        f"host2: script: cannot read {script}: No such file or directory; "
        f"copy it there: scp {script} host2:{script}"
    )
    assert different.startswith(
        f"host3: script: {script} is not the one that this machine has (it was written 20"
    )
    assert different.endswith(f"copy it there: scp {script} host3:{script}")


def test_a_file_that_never_answers_costs_one_line(network: Network, folder: Path, tmp_path: Path):
    """A pipe without a writer blocks its reader for ever, as the file system of a dead server does."""
    os.mkfifo(tmp_path / "pipe")
    with hidden(network, "host2", folder / "train.py", tmp_path / "pipe"):
        report = fly(network, folder, "host1", "host2", script="train.py", answer_s=10.0)
    assert report.lines() == [
        "host2: script: cannot be found out: no answer within 10 s; log in there and look: ssh host2"
    ]


def _with_names(network: Network, folder: Path, names: Mapping[str, str]) -> Report:
    """Check with another address for host1 on some hosts."""
    try:
        for host, address in names.items():
            network.write_hosts(host, {"host1": address})
        return fly(network, folder)
    finally:
        for host in names:
            network.write_hosts(host)


def test_a_name_that_resolves_differently(network: Network, folder: Path):
    report = _with_names(network, folder, {"host2": "10.77.0.9"})
    assert report.lines() == [
        "host2: master address: host1 is 10.77.0.9 there (line 2 of /etc/hosts, '10.77.0.9 host1'), "
        "on host1 it is 10.77.0.1; mend /etc/hosts or the DNS there, or give --master_addr"
    ]


def test_a_host_whose_own_name_is_its_loopback(network: Network, folder: Path):
    """Debian writes such a line into every new machine."""
    report = _with_names(network, folder, {"host1": "127.0.1.1"})
    assert ("host1", "master address") in report.checks()
    assert (
        "host1: master address: host1 is 127.0.1.1 there (line 2 of /etc/hosts, '127.0.1.1 host1'), "
        "which no other host can reach; take the name out of that line, "
        "or give the address of its network: --master_addr"
    ) in report.lines()
    fixed = fly(network, folder, master_addr="10.77.0.1")
    assert fixed.lines() == []


def test_an_address_that_the_first_host_does_not_have(network: Network, folder: Path):
    report = fly(network, folder, "host1", "host2", master_addr="host2")
    assert report.lines() == [
        "host1: master address: host2 is 10.77.0.2, which no interface of this host has; "
        "give an address of host1: --master_addr, or put the host that has it first"
    ]


def test_a_clock_that_is_wrong(network: Network, folder: Path, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(CLOCK_STUB)
    report = fly(network, folder, env={"PYTHONPATH": str(tmp_path)})
    (line,) = report.lines()
    found = re.match(r"host3: clock: the clock is (\d+\.\d) s ahead of those of the other hosts;", line)
    assert found is not None
    assert abs(float(found[1]) - 90_000) <= START_S  # the time that an answer can take


def test_a_firewall_before_the_port(network: Network, folder: Path):
    rule = ["from", "all", "to", "10.77.0.1", "ipproto", "tcp", "dport", str(PORT), "blackhole"]
    network.run("host2", ["ip", "rule", "add", *rule])
    try:
        report = fly(network, folder)
    finally:
        network.run("host2", ["ip", "rule", "del", *rule])
    assert report.checks() == {("host2", "master port")}
    assert f"host2: master port: cannot use port {PORT} of host1: " in report.lines()[0]


def test_a_firewall_in_one_direction(network: Network, folder: Path):
    """What host1 and host2 send to open a connection to an ephemeral port of host3 is lost."""
    opening = "match u8 0x02 0x12 at 33 match ip dport 0x8000 0x8000 match ip dst 10.77.0.3/32"
    with (
        shaped(network, "host1", opening, "pfifo limit 0"),
        shaped(network, "host2", opening, "pfifo limit 0"),
    ):
        report = fly(network, folder)
    (line,) = report.lines()
    assert line.startswith(
        "host3: network: host1, host2 cannot exchange data with it at 10.77.0.3 (eth0): nothing comes back: "
        "a firewall drops the packets, or the route is wrong; the other way works"
    )


def test_packets_of_full_size_are_lost(network: Network, folder: Path):
    """As behind a tunnel or a switch with a smaller MTU whose notice is filtered out."""
    ephemeral = "match ip sport 0x8000 0x8000 match ip dport 0x8000 0x8000"
    with shaped(network, "host2", ephemeral, "tbf rate 1gbit burst 1300 limit 1000000"):
        report = fly(network, folder, "host1", "host2")
    assert report.checks() == {("host1", "network"), ("host2", "network")}
    assert "it connects, and packets of full size are lost (MTU: host1 1500, host2 1500)" in report.lines()[0]
