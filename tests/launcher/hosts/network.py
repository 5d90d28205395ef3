"""Hosts on one machine: each a network namespace with its own host name, /etc/hosts and real sshd.

They hang on one bridge, in a namespace of its own, so nothing is left in the machine's own network, and the
names of all namespaces carry the process id of the test session: several sessions may run at once. The hosts
share the processes and the files of the machine, except /etc/hosts, /etc/hostname and /etc/ssh.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
SUBNET = "10.77.0"  # inside the namespaces only: every session has its own
PREFIX = "caitest"
_START_S = 300.0
_SSHD = "/usr/sbin/sshd"
_SSHD_CONFIG = """\
Port 22
ListenAddress {address}
ListenAddress 127.0.0.1
HostKey {folder}/hostkey
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/../authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 50:30:100
"""
_SSH_CONFIG = """\
Host host*
  User root
  IdentityFile {folder}/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""
_counter = itertools.count()


class Network:
    """Hosts named host1, host2, ... that reach one another by name and over ssh.

    Args:
        num_hosts: How many.
    """

    def __init__(self, num_hosts: int) -> None:
        self.prefix = f"{PREFIX}-{os.getpid()}-{next(_counter)}"
        self.hosts = tuple(f"host{number}" for number in range(1, num_hosts + 1))
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._make_keys()
            self._make_switch()
            for host in self.hosts:
                self._make_host(host)
            for host in self.hosts:
                self.start_sshd(host)
        except BaseException:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        """Return the name of the network namespace of a host."""
        return f"{self.prefix}-{host}"

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host."""
        return f"{SUBNET}.{self.hosts.index(host) + 1}"

    def on(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on a host, without ssh."""
        enter = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "--"]
        return [*enter, "sh", "-c", 'hostname "$0"; exec "$@"', host, *argv]

    def start(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; `env` comes on top of this process's environment."""
        return subprocess.Popen(self.on(host, argv), env={**os.environ, **(env or {})}, **options)

    def run(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, and return its output as text."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(self.on(host, argv), env={**os.environ, **(env or {})}, check=False, **settings)

    def pids(self, host: str) -> list[int]:
        """Return the processes that live on a host, its sshd excepted."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True, check=False
        )
        sshd = self._sshds.get(host)
        pids = [int(pid) for pid in done.stdout.split() if sshd is None or int(pid) != sshd.pid]
        return [pid for pid in pids if not _is_zombie(pid)]

    def sshd_pid(self, host: str) -> int:
        """Return the process whose view of the file system all that comes over ssh shares."""
        return self._sshds[host].pid

    def cut(self, host: str) -> None:
        """Take the cable out: packets are lost, no connection is closed."""
        _ip("-n", f"{self.prefix}-sw", "link", "set", f"p{self._number(host)}", "down")

    def mend(self, host: str) -> None:
        """Put the cable back."""
        _ip("-n", f"{self.prefix}-sw", "link", "set", f"p{self._number(host)}", "up")

    def write_hosts(self, host: str, names: Mapping[str, str] | None = None) -> None:
        """Write /etc/hosts of a host: all hosts, and `names` (name to address) instead of or besides them.

        What runs there sees it at once: the file is written in place.
        """
        table = {name: self.address(name) for name in self.hosts} | dict(names or {})
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in table.items())]
        (self._etc(host) / "hosts").write_text("\n".join(lines) + "\n")

    def start_sshd(self, host: str) -> None:
        """Start the sshd of a host, and wait until it listens."""
        folder = self.folder / host
        with (folder / "sshd.log").open("ab") as log:
            self._sshds[host] = self.start(
                host,
                [_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_S
        while (text := (folder / "sshd.log").read_text()).count("Server listening") < 2:
            if self._sshds[host].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd of {host} does not start:\n{text}")
            time.sleep(0.01)

    def stop_sshd(self, host: str) -> None:
        """End the sshd of a host; connections that are open stay open."""
        sshd = self._sshds.pop(host)
        sshd.terminate()
        sshd.wait()
        (self.folder / host / "sshd.log").unlink()

    def close(self) -> None:
        """End everything that runs on the hosts, and remove them."""
        for host in self.hosts:
            _kill_all_in(self.namespace(host))
        for sshd in self._sshds.values():
            sshd.wait()
        _remove(f"{self.prefix}-")  # with the dash: another one may be called -12 where this is -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def _number(self, host: str) -> int:
        return self.hosts.index(host) + 1

    def _etc(self, host: str) -> Path:
        """Return the folder whose entries `ip netns exec` puts over those of /etc."""
        return Path("/etc/netns", self.namespace(host))

    def _make_keys(self) -> None:
        for file in ("id_ed25519", *(f"{host}/hostkey" for host in self.hosts)):
            path = self.folder / file
            path.parent.mkdir(exist_ok=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        shutil.copy(self.folder / "id_ed25519.pub", self.folder / "authorized_keys")
        known = []
        for host in self.hosts:
            kind, key = (self.folder / host / "hostkey.pub").read_text().split()[:2]
            known.append(f"{host},{self.address(host)} {kind} {key}\n")
        (self.folder / "known_hosts").write_text("".join(known))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without

    def _make_switch(self) -> None:
        switch = f"{self.prefix}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")

    def _make_host(self, host: str) -> None:
        namespace, switch, port = self.namespace(host), f"{self.prefix}-sw", f"p{self._number(host)}"
        (self._etc(host) / "ssh").mkdir(parents=True)
        (self._etc(host) / "hostname").write_text(f"{host}\n")
        (self._etc(host) / "ssh" / "ssh_config").write_text(_SSH_CONFIG.format(folder=self.folder))
        self.write_hosts(host)
        _ip("netns", "add", namespace)
        _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        config = _SSHD_CONFIG.format(address=self.address(host), folder=self.folder / host)
        (self.folder / host / "sshd_config").write_text(config)


def reason_to_skip() -> str:
    """Say why there can be no hosts here; empty if there can."""
    missing = [tool for tool in ("ip", "unshare", "ssh", "ssh-keygen", _SSHD) if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, openssh-server)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        entered = subprocess.run(
            ["ip", "netns", "exec", probe, "unshare", "--uts", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        _ip("netns", "del", probe)
        made = entered
    return "" if made.returncode == 0 else f"network namespaces are not permitted: {made.stderr.strip()}"


def remove_leftovers() -> None:
    """Remove the hosts of test sessions that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for name in (line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"{PREFIX}-")):
        owner = name.split("-")[1]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            _kill_all_in(name)
            _remove(name)


def make_network(num_hosts: int) -> Network:
    """Return fresh hosts, or skip the test with the reason why there can be none."""
    skip_without_hosts()
    return Network(num_hosts)


def skip_without_hosts() -> None:
    """Skip the test where there can be no hosts; where there can, those of killed sessions are removed."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    remove_leftovers()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _kill_all_in(namespace: str) -> None:
    """Kill what runs in a namespace, again until nothing does."""
    for _ in range(100):
        done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in done.stdout.split() if not _is_zombie(int(pid))]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has just ended
        time.sleep(0.02)


def _remove(prefix: str) -> None:
    """Remove the namespaces whose names start with `prefix`, and their part of /etc."""
    for path in Path("/run/netns").glob(f"{prefix}*"):
        subprocess.run(["ip", "netns", "del", path.name], check=False)
    for path in Path("/etc/netns").glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
