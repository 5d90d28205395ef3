"""What the pre-flight checks make of the answers of the hosts; nothing here talks to a host."""

import socket
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from colossalai.cluster import Host, chosen_interfaces
from colossalai.launcher._ssh import explain_ssh
from colossalai.launcher.preflight import PreflightRequest, _probe_network, preflight
from colossalai.launcher.preflight import _host_findings as host_checks
from colossalai.launcher.preflight import _network_findings as network_checks
from colossalai.launcher.preflight._findings import Answer, Finding, prevailing
from colossalai.launcher.preflight._network_findings import HostInterface
from colossalai.launcher.preflight._probe import parse_devices
from tests.harness.clocks import FakeClock

pytestmark = pytest.mark.unit

GIB = 2**30
PYTHON = "/env/bin/python"


def said(**values: Any) -> dict[str, Answer]:
    return {host: Answer(value=value) for host, value in values.items()}


def lines(findings: Iterable[Finding], state: str = "FAILED") -> list[str]:
    return [finding.describe() for finding in findings if finding.state.value == state]


def test_most_hosts_decide_and_of_equals_the_first():
    assert prevailing({"a": 1, "b": 2, "c": 2}) == ("b", 2)
    assert prevailing({"a": 1, "b": 2}) == ("a", 1)


def test_an_answer_that_does_not_come_is_a_failure():
    answers = said(a={"available": 8 * GIB, "total": 8 * GIB}) | {"b": Answer(error="no answer within 5 s")}
    findings = list(host_checks.check_memory(answers, {"a": 1, "b": 1}))
    assert lines(findings) == [
        "b: memory: cannot be found out: no answer within 5 s; log in there and look: ssh b"
    ]
    assert len(findings) == 2


def test_the_odd_version_is_named_even_on_the_first_host():
    pythons = said(a={"python": "3.12.1"}, b={"python": "3.11.2"}, c={"python": "3.11.2"})
    packages = said(**{host: {"torch": "2.13.0", "colossalai": "0.1.0"} for host in "abc"})
    packages["c"].value["colossalai"] = None
    assert lines(host_checks.check_versions(pythons, packages, PYTHON)) == [
        "a: versions: Python is 3.12.1, b has 3.11.2; install Python 3.11.2 there",
        f"c: versions: colossalai is not installed; install colossalai 0.1.0 for {PYTHON} there",
    ]


def test_a_package_that_no_host_has():
    answers = said(a={"python": "3.11.2"}, b={"python": "3.11.2"})
    packages = said(**{host: {"torch": None} for host in "ab"})
    found = lines(host_checks.check_versions(answers, packages, PYTHON))
    assert found[0] == f"a: versions: torch is not installed; install torch for {PYTHON} there"
    assert len(found) == 2


def test_the_script_of_this_machine_decides_or_else_that_of_most_hosts():
    answers = said(
        **{host: {"sha256": digest, "modified": 0.0} for host, digest in zip("abc", "xyy", strict=True)}
    )
    (line,) = lines(host_checks.check_script(answers, "/w/t.py", None))
    assert line.startswith("a: script: /w/t.py is not the one that b has (it was written 19")
    found = lines(host_checks.check_script(answers, "/w/t.py", {"sha256": "x"}))
    assert [line.partition(" (")[0] for line in found] == [
        f"{host}: script: /w/t.py is not the one that this machine has" for host in "bc"
    ]


def test_a_module_that_is_not_found():
    answers = said(a={"origin": "/w/pkg/__init__.py"}, b={"origin": None})
    assert lines(host_checks.check_module(answers, "pkg.train")) == [
        "b: script: there is no module pkg; install it there, copy its folder, or set PYTHONPATH"
    ]


@pytest.mark.parametrize(
    ("clocks", "doubt_s", "expected"),
    [
        ((100.0, 130.0), 0.1, ["b: clock: the clock is 30.0 s ahead of that of a"]),
        ((130.0, 100.0), 0.1, ["b: clock: the clock is 30.0 s behind that of a"]),
        ((130.0, 100.0, 100.5), 0.1, ["a: clock: the clock is 29.5 s ahead of those of the other hosts"]),
        ((100.0, 112.0), 2.0, []),  # it may be a slow answer
        ((100.0, 100.5), 0.1, []),
    ],
)
def test_clocks(clocks: tuple[float, ...], doubt_s: float, expected: list[str]):
    answers = {
        host: Answer(value=clock, midpoint=90.0, doubt_s=doubt_s)
        for host, clock in zip("abc", clocks, strict=False)
    }
    assert [line.partition(";")[0] for line in lines(host_checks.check_clock(answers))] == expected


def test_a_small_skew_is_a_warning():
    answers = {host: Answer(value=clock, doubt_s=0.1) for host, clock in (("a", 0.0), ("b", 5.0))}
    findings = list(host_checks.check_clock(answers))
    assert all(finding.ok for finding in findings)
    assert [line.partition(";")[0] for line in lines(findings, "warning")] == [
        "b: clock: the clock is 5.0 s ahead of that of a"
    ]


def test_too_little_memory_and_disk():
    memory = said(a={"available": 3 * GIB, "total": 16 * GIB})
    assert lines(host_checks.check_memory(memory, {"a": 4})) == []
    assert lines(host_checks.check_memory(memory, {"a": 8})) == [
        "a: memory: 3.0 of 16.0 GiB are free, 8 ranks need 4.0 GiB before they have a model; "
        "see what holds it: ssh a ps aux --sort=-rss"
    ]
    disk = list(host_checks.check_disk(said(a={"/w": GIB // 32, "/tmp": GIB // 2, "/dev/shm": GIB // 16})))
    assert lines(disk) == ["a: disk: 32 MiB are free in /w; make room: ssh a df -h /w"]
    assert [line.partition(";")[0] for line in lines(disk, "warning")] == [
        "a: disk: 512 MiB are free in /tmp",
        "a: disk: 64 MiB are free in /dev/shm",
    ]


def test_devices_are_read_counted_and_compared():
    text = "NVIDIA A100, 80 GB, 80000, 81920\nNVIDIA A100, 80 GB, 1024, 81920\nGB10, [N/A], [N/A]\n"
    devices = parse_devices(text)
    assert [device["name"] for device in devices] == ["NVIDIA A100, 80 GB", "NVIDIA A100, 80 GB", "GB10"]
    assert devices[1]["free"] == GIB
    assert devices[2]["free"] is None
    answers = said(a=devices[:1], b=devices[:1] * 2, c=devices[:1] * 2, d=[], e=devices[:2])
    findings = list(host_checks.check_devices(answers, dict.fromkeys("abcde", 1)))
    assert lines(findings) == [
        "d: devices: no accelerator for 1 processes; "
        "start no more processes there than it has devices (d:0), or leave it out"
    ]
    assert [line.partition(";")[0] for line in lines(findings, "warning")] == [
        "a: devices: 1 x NVIDIA A100, 80 GB, while b has 2 x NVIDIA A100, 80 GB",
        "e: devices: device 1 has 1 of 80 GiB free",
    ]
    assert lines(host_checks.check_devices(said(a=[], b=[]), {"a": 4, "b": 4})) == []  # all train on the CPU


def test_a_name_that_only_one_host_does_not_know():
    good = {"addresses": ["10.0.0.1"], "hosts_line": None}
    bad = {"addresses": [], "hosts_line": None, "error": "Name or service not known"}
    assert lines(network_checks.check_master_address(said(a=good, b=bad), "a")) == [
        "b: master address: does not know the name a: Name or service not known; "
        "add it to /etc/hosts there, or give an address: --master_addr"
    ]


def test_the_order_of_addresses_does_not_matter_and_one_host_may_be_its_own_loopback():
    one = {"addresses": ["10.0.0.1", "fd00::1"], "hosts_line": None}
    two = {"addresses": ["fd00::1", "10.0.0.1"], "hosts_line": None}
    assert lines(network_checks.check_master_address(said(a=one, b=two), "a")) == []
    alone = {"addresses": ["127.0.0.1"], "hosts_line": None}
    assert lines(network_checks.check_master_address(said(a=alone), "localhost")) == []


def test_a_port_whose_holder_may_not_be_seen():
    answer = Answer(value={"port": 80, "is_free": False, "why": "it is held", "pid": None, "other": 4242})
    assert network_checks.check_port("a", answer).describe() == (
        "a: master port: it is held; use another one: --master_port 4242"
    )


PLACES = {
    host: HostInterface("eth0", f"10.0.0.{n}", mtu)
    for n, (host, mtu) in enumerate((("a", 9000), ("b", 1500), ("c", 1500)))
}


def outcomes(bad: dict[tuple[str, str], tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    pairs = [(source, target) for source in PLACES for target in PLACES if source != target]
    found = {pair: bad.get(pair, ("done", None)) for pair in pairs}
    return {pair: {"stage": stage, "error": error, "seconds": 0.01} for pair, (stage, error) in found.items()}


def test_a_host_that_nobody_reaches_is_one_line():
    silent = ("connect", "ETIMEDOUT")
    cut = outcomes({(x, "c"): silent for x in "ab"} | {("c", x): silent for x in "ab"})
    findings = list(network_checks.check_exchange(PLACES, cut))
    assert [line.partition(": nothing")[0] for line in lines(findings)] == [
        "c: network: a, b cannot exchange data with it at 10.0.0.2 (eth0)"
    ]


def test_a_broken_pair_is_one_line_for_each_direction():
    found = lines(network_checks.check_exchange(PLACES, outcomes({("a", "b"): ("connect", "ECONNREFUSED")})))
    assert len(found) == 1
    assert found[0].startswith("b: network: a cannot exchange data with it at 10.0.0.1 (eth0): it is refused")
    assert "; the other way works; " in found[0]


@pytest.mark.parametrize(
    ("stage", "error", "words"),
    [
        ("payload", "ETIMEDOUT", "packets of full size are lost (MTU: a 9000, b 1500, c 1500)"),
        ("greet", "stranger", "another program answers there"),
        ("greet", "ECONNRESET", "it connects, then nothing comes (ECONNRESET)"),
        ("connect", "ENOBUFS", "ENOBUFS"),
    ],
)
def test_what_a_connection_came_to(stage: str, error: str, words: str):
    (line,) = lines(network_checks.check_exchange(PLACES, outcomes({("a", "b"): (stage, error)})))
    assert words in line


def test_an_interface_that_is_down():
    interfaces = {"lo": {"addresses": ["127.0.0.1"], "is_up": True, "mtu": 65536}}
    interfaces["eth1"] = {"addresses": ["10.1.0.1"], "is_up": False, "mtu": 1500}
    answer = said(a={"interfaces": interfaces, "source": None})
    _, (finding,) = network_checks.find_places(answer, {"GLOO_SOCKET_IFNAME": "eth1"})
    assert "GLOO_SOCKET_IFNAME=eth1: eth1 is down or has no address" in finding.describe()
    _, (finding,) = network_checks.find_places(answer, {})
    assert "there is no way to the first host; it has lo 127.0.0.1, eth1 10.1.0.1" in finding.describe()


def test_a_name_server_that_lets_torch_wait_is_a_warning():
    answers = said(
        a={"127.0.0.1": 0.01, "10.0.0.2": None, "10.0.0.3": 0.7}, b={"127.0.0.1": 0.6}, c={"127.0.0.1": 0.4}
    )
    owners = {"127.0.0.1": "localhost", "10.0.0.2": "me@b", "10.0.0.3": "c"}
    findings = list(network_checks.check_lookups(answers, owners))
    assert lines(findings, "warning") == [
        "a: name lookup: the lookup of the name of ::ffff:10.0.0.2, ::ffff:10.0.0.3 takes more than a "
        "second; torch does it at each start and waits for the name server; add to /etc/hosts there: "
        "'::ffff:10.0.0.2 b', '::ffff:10.0.0.3 c'",
        "b: name lookup: the lookup of the name of ::ffff:127.0.0.1 takes 0.6 s; torch does it at each start "
        "and waits for the name server; add to /etc/hosts there: '::ffff:127.0.0.1 localhost'",
    ]
    assert lines(findings, "ok") == ["c: name lookup: the name of ::ffff:127.0.0.1 in 400 ms"]
    assert all(finding.ok for finding in findings)


def test_a_lookup_is_timed(monkeypatch: pytest.MonkeyPatch):
    fake, asked = FakeClock(), []

    def look_up(end: tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        asked.append(end[0])
        fake.sleep(0.25)
        if end[0] == "::ffff:10.0.0.1":
            raise socket.gaierror("it has no name")
        return "host", "0"

    monkeypatch.setattr(socket, "getnameinfo", look_up)
    for address in ("10.0.0.1", "10.0.0.2"):
        found = _probe_network.lookups(addresses=[address], limit_s=3600.0, now=fake.clock.now)
        assert found == {address: 0.25}
    assert asked == ["::ffff:10.0.0.1", "::ffff:10.0.0.2"]


def test_a_slow_lookup_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getnameinfo", lambda end, flags: is_over.wait(120))
    assert _probe_network.lookups(addresses=["127.0.0.1"], limit_s=0.05) == {"127.0.0.1": None}
    is_over.set()


def test_lookups_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch):
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    all_began = threading.Barrier(len(addresses))
    monkeypatch.setattr(socket, "getnameinfo", lambda end, flags: all_began.wait(120))
    seconds = _probe_network.lookups(addresses=addresses, limit_s=3600.0)
    assert all(each is not None for each in seconds.values())


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ["eth0"]),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", ["ib0", "eth0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0", "eth01"]),
        ("NCCL_SOCKET_IFNAME", "=eth0", ["eth0"]),
        ("NCCL_SOCKET_IFNAME", "ib,eth01", ["ib0", "eth01"]),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ["eth0", "eth01", "ib0"]),
        ("NCCL_SOCKET_IFNAME", "^=eth0", ["lo", "eth01", "ib0", "docker0"]),
    ],
)
def test_the_variables_of_gloo_and_nccl(variable: str, value: str, chosen: list[str]):
    assert chosen_interfaces(variable, value, ["lo", "eth0", "eth01", "ib0", "docker0"]) == chosen


@pytest.mark.parametrize(
    ("exit_code", "words", "check", "what", "todo"),
    [
        (
            255,
            "ssh: Could not resolve hostname n: Name or service not known",
            "ssh",
            "does not know the name",
            "mend",
        ),
        (
            255,
            "ssh: connect to host n port 22: Connection refused",
            "ssh",
            "nothing listens",
            "start sshd there",
        ),
        (255, "ssh: connect to host n port 22: No route to host", "ssh", "cannot be reached", "--exclude n"),
        (
            255,
            "ssh: connect to host n port 22: Connection timed out",
            "ssh",
            "cannot be reached",
            "--exclude n",
        ),
        (255, "Welcome!\nme@n: Permission denied (publickey).", "ssh", "without a password", "ssh-copy-id n"),
        (255, "Host key verification failed.", "ssh", "is not known here", "accept it: ssh n"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh",
            "is not the one",
            "ssh-keygen -R n",
        ),
        (
            255,
            "kex_exchange_identification: read: Connection reset by peer",
            "ssh",
            "and ends it",
            "MaxStartups",
        ),
        (
            255,
            "Received disconnect: Too many authentication failures",
            "ssh",
            "too many keys",
            "IdentitiesOnly",
        ),
        (255, "something new", "ssh", "something new", "ssh n true"),
        (127, "sh: 1: /py: not found", "interpreter", "/py: not found", "under the same path"),
        (1, "Fatal Python error: no encodings", "interpreter", "ends at once", "by hand"),
        (0, "", "interpreter", "without a word", "by hand"),
    ],
)
def test_the_words_of_ssh_made_plain(exit_code: int, words: str, check: str, what: str, todo: str):
    found = explain_ssh("n", exit_code, words)
    assert found[0] == check
    assert what in found[1]
    assert todo in found[2]


def test_a_request_that_cannot_be():
    with pytest.raises(ValueError, match="no host"):
        preflight(PreflightRequest(hosts=[]))
    with pytest.raises(ValueError, match="--master_port 70000 is not a TCP port"):
        preflight(PreflightRequest(hosts=[Host("localhost")], master_port=70000))


def test_this_machine_alone_needs_no_ssh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    report = preflight(PreflightRequest(hosts=[Host("localhost")], master_port=0))
    assert not [finding for finding in report.failures if finding.check != "memory"]
    assert report.interfaces == {}
    assert report.master_port > 0
