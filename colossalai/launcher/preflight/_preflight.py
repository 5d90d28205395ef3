"""Pre-flight checks: the requirements of a job on every host, before its start.

One ssh connection per host carries a small program (`_probe.py`) and questions to it, to all hosts in
parallel. Every question has its own time limit: a host, a file system or a name server that does not answer
is a finding, never a hang. Answers are evaluated in `_host_findings.py` and `_network_findings.py`.
"""

import asyncio
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colossalai.cluster import LOOPBACK, Host
from colossalai.launcher._ssh import explain_ssh
from colossalai.launcher.preflight import _host_findings as host_checks
from colossalai.launcher.preflight import _network_findings as network_checks
from colossalai.launcher.preflight._findings import (
    Answer,
    Answers,
    Finding,
    State,
    failed,
    fine,
    unanswered,
    values_of,
)
from colossalai.launcher.preflight._network_findings import HostInterface
from colossalai.launcher.preflight._probe_client import HostLostError, ProbeClient

_PACKAGES = ("torch", "colossalai")
_ALL_REDUCE_S = 60.0  # it imports torch
_EXCHANGE_S = 8.0  # longer than the time limits of the probe's own connections together


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """Requirements of a job, as its launcher passes them."""

    hosts: Sequence[Host]  # the first present one has the master port
    min_hosts: int | None = None  # a job that can do with so many starts without those that are absent
    master_addr: str | None = None  # the name of the first host, if not given
    master_port: int = 0  # find a free one
    num_procs: int | None = None  # on each host; its slots, or one, if not given
    script: str | None = None  # as on the command line; None: there is nothing to look for
    is_module: bool = False
    python: str = sys.executable
    workdir: str = field(default_factory=os.getcwd)
    env: Mapping[str, str] = field(default_factory=dict)  # variables of the ranks
    ssh_port: int | None = None
    has_all_reduce: bool = False  # also add a vector with torch and gloo, which takes some seconds
    contact_s: float = 10.0  # for ssh to log in and Python to start
    answer_s: float = 5.0  # for each question


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """Findings of the checks, and the hosts that remain."""

    findings: tuple[Finding, ...]
    absent: Mapping[str, str]  # unreachable hosts that the job can run without, with the reason
    interfaces: Mapping[str, str]  # by host: value for GLOO_SOCKET_IFNAME; empty for one host
    master_addr: str
    master_port: int
    seconds: float

    @property
    def is_fit(self) -> bool:
        """The job can be started."""
        return all(finding.ok for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings that prevent the start."""
        return tuple(finding for finding in self.findings if not finding.ok)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that do not prevent the start."""
        return tuple(finding for finding in self.findings if finding.state is State.WARNING)


def preflight(request: PreflightRequest) -> PreflightReport:
    """Query all hosts and evaluate their answers; no process is left on any.

    Raises:
        ValueError: `request.hosts` is empty, or `request.master_port` is not a TCP port.
    """
    if not request.hosts:
        raise ValueError("there is no host to check")
    if not 0 <= request.master_port <= 65535:
        raise ValueError(
            f"--master_port {request.master_port} is not a TCP port; use 1 to 65535, or 0 for a free one"
        )
    return asyncio.run(_PreflightRun(request).report())


class _PreflightRun:
    """One run of the checks."""

    def __init__(self, request: PreflightRequest) -> None:
        self.request = request
        self.all_names = [host.name for host in request.hosts]
        self.names = self.all_names  # of the hosts that the job would have
        self.first = self.names[0]
        self.master_addr = request.master_addr or self.first.rpartition("@")[2]
        self.master_port = request.master_port
        self.num_procs = {host.name: request.num_procs or host.slots or 1 for host in request.hosts}
        self.findings: list[Finding] = []
        self.nodes = {
            name: ProbeClient(name, python=request.python, env=request.env, ssh_port=request.ssh_port)
            for name in self.names
        }

    async def report(self) -> PreflightReport:
        began = time.monotonic()
        places: dict[str, HostInterface] = {}
        try:
            reached = await self._contact()
            self._drop_absent_hosts(reached)
            if reached:
                places = await self._check_reached(reached)
        finally:
            await asyncio.gather(*(node.end() for node in self.nodes.values()))
        order = {name: index for index, name in enumerate(self.all_names)}
        return PreflightReport(
            findings=tuple(sorted(self.findings, key=lambda finding: order[finding.host])),
            absent={each.host: each.what for each in self.findings if each.host not in self.names},
            interfaces={name: place.interface for name, place in places.items()}
            if len(self.names) > 1
            else {},
            master_addr=self.master_addr,
            master_port=self.master_port,
            seconds=time.monotonic() - began,
        )

    async def _contact(self) -> dict[str, Answer]:
        """Return the descriptions of the reachable hosts; the others have a finding."""
        answers = await asyncio.gather(*(self._reach(node) for node in self.nodes.values()))
        return {name: answer for name, answer in zip(self.names, answers, strict=True) if answer is not None}

    def _drop_absent_hosts(self, reached: Answers) -> None:
        """Continue with the reachable hosts, if the job can; an absent host cannot be the master."""
        absent = {finding.host for finding in self.findings if finding.check == "ssh" and not finding.ok}
        present = [name for name in self.names if name not in absent]
        if not absent or len(present) < (self.request.min_hosts or len(self.names)) or not reached:
            return
        self.findings = [
            replace(finding, state=State.WARNING) if finding.host in absent else finding
            for finding in self.findings
        ]
        self.names = present
        if self.first in absent:
            self.first = present[0]
            self.master_addr = self.first.rpartition("@")[2]

    async def _reach(self, node: ProbeClient) -> Answer | None:
        try:
            await node.start()
            answer = await node.query("interpreter", timeout_s=self.request.contact_s)
        except FileNotFoundError as error:
            todo = "install OpenSSH's client" if error.filename == "ssh" else "see that it is there"
            self.findings.append(
                failed(node.host, "ssh", f"cannot run {error.filename} on this machine", todo)
            )
            return None
        except HostLostError as loss:
            check, what, todo = explain_ssh(node.host, *loss.args)
            self.findings.append(failed(node.host, check, what, todo))
            return None
        if answer.error is not None:
            what = f"it cannot be reached: {answer.error}"
            todo = f"see whether it is on and on this network, or leave it out: --exclude {node.host}"
            self.findings.append(failed(node.host, "ssh", what, todo))
            return None
        way = "this machine" if node.is_local else f"reached within {2 * answer.doubt_s:.1f} s"
        self.findings.append(fine(node.host, "ssh", f"{way}; its own name is {answer.value['hostname']}"))
        return answer

    async def _check_reached(self, reached: Mapping[str, Answer]) -> dict[str, HostInterface]:
        hosts = list(reached)
        request = self.request
        first_path = _first_path(request)
        script = os.path.join(request.workdir, request.script or "")
        queries: dict[str, Awaitable[dict[str, Answer]]] = {
            "clock": self._query_all(hosts, "clock"),  # first: nothing else delays it
            "packages": self._query_all(hosts, "packages", distributions=_PACKAGES, first_path=first_path),
            "directory": self._query_all(hosts, "directory", path=request.workdir),
            "resolve": self._query_all(hosts, "resolve", name=self.master_addr),
            "interfaces": self._query_all(hosts, "interfaces", toward=self.master_addr),
            "memory": self._query_all(hosts, "memory"),
            "disk": self._query_all(hosts, "disk", path=request.workdir),
            "devices": self._query_all(hosts, "devices"),
            "lookups": self._query_all(hosts, "lookups", addresses=[LOOPBACK]),
            "port": self._query_all(
                [self.first] if self.first in hosts else [], "port", number=self.master_port
            ),
        }
        if request.script is not None and request.is_module:
            queries["script"] = self._query_all(hosts, "module", name=request.script, first_path=first_path)
        elif request.script is not None:
            queries["script"] = self._query_all(hosts, "script", path=script)
        answers = dict(zip(queries, await asyncio.gather(*queries.values()), strict=True))
        self._check_hosts(reached, answers)
        return await self._check_network(answers)

    def _check_hosts(self, reached: Answers, answers: Mapping[str, Answers]) -> None:
        request, add = self.request, self.findings.extend
        add(host_checks.check_versions(reached, answers["packages"], request.python))
        add(host_checks.check_directory(answers["directory"], request.workdir))
        if request.script is not None and request.is_module:
            add(host_checks.check_module(answers["script"], request.script))
        elif request.script is not None:
            path = os.path.join(request.workdir, request.script)
            add(host_checks.check_script(answers["script"], path, _own_script(Path(path))))
        add(host_checks.check_clock(answers["clock"]))
        add(host_checks.check_memory(answers["memory"], self.num_procs))
        add(host_checks.check_disk(answers["disk"]))
        add(host_checks.check_devices(answers["devices"], self.num_procs))

    async def _check_network(self, answers: Mapping[str, Answers]) -> dict[str, HostInterface]:
        add = self.findings.extend
        add(network_checks.check_lookups(answers["lookups"], {LOOPBACK: "localhost"}))
        address = list(network_checks.check_master_address(answers["resolve"], self.master_addr))
        if self.first in answers["resolve"]:
            resolved, interfaces = answers["resolve"][self.first], answers["interfaces"][self.first]
            address += network_checks.check_master_is_first(
                self.first, self.master_addr, resolved, interfaces
            )
        add(address)
        is_port_free = False
        for host, answer in answers["port"].items():
            port = network_checks.check_port(host, answer)
            self.findings.append(port)
            is_port_free = port.ok
            self.master_port = answer.value["port"] if port.ok else self.master_port
        if len(self.names) == 1:
            return {}
        places, wrong = network_checks.find_places(answers["interfaces"], self.request.env)
        add(wrong)
        distinct = list(network_checks.check_places(places))
        add(distinct)
        if all(finding.ok for finding in distinct):
            is_reachable = is_port_free and all(finding.ok for finding in address)
            await self._check_connections(places, has_master=is_reachable)
        if self.request.has_all_reduce and all(finding.ok for finding in self.findings):
            add(await self._all_reduce(places))
        return places

    async def _check_connections(self, places: Mapping[str, HostInterface], *, has_master: bool) -> None:
        """Have all hosts connect to all others, and to the port of the job on the first one."""
        token = secrets.token_hex(8)
        listening = await self._query_each(
            {name: {"address": place.address, "port": 0, "token": token} for name, place in places.items()},
            "listen",
        )
        self.findings.extend(unanswered("network", listening))
        ends = {name: [places[name].address, port] for name, port in values_of(listening).items()}
        targets = {name: [other for other in ends if other != name] for name in ends}
        arguments = {
            name: {
                "targets": [ends[other] for other in targets[name]],
                "source_address": places[name].address,
                "token": token,
            }
            for name in ends
        }
        owners = {place.address: name for name, place in places.items() if ":" not in place.address}
        exchanged, reached, looked_up = await asyncio.gather(
            self._query_each(arguments, "exchange", timeout_s=_EXCHANGE_S),
            self._reach_master(list(places), token) if has_master else _nothing(),
            self._query_all([self.first] if self.first in places else [], "lookups", addresses=list(owners)),
        )
        self.findings.extend(network_checks.check_lookups(looked_up, owners))
        self.findings.extend(unanswered("network", exchanged))
        outcomes = {
            (name, other): outcome
            for name, results in values_of(exchanged).items()
            for other, outcome in zip(targets[name], results, strict=True)
        }
        connected = {name: place for name, place in places.items() if name in values_of(exchanged)}
        self.findings.extend(network_checks.check_exchange(connected, outcomes))
        self.findings.extend(unanswered("master port", reached))
        by_host = {name: results[0] for name, results in values_of(reached).items()}
        self.findings.extend(network_checks.check_master_reached(self.first, self.master_port, by_host))
        await self._query_all(list(places), "close")

    async def _reach_master(self, names: Sequence[str], token: str) -> dict[str, Answer]:
        """Have the first host listen on the port of the job, and the others connect to it by its name."""
        listening = await self._query_all(
            [self.first], "listen", address="", port=self.master_port, token=token
        )
        if listening[self.first].error is not None:
            return listening
        target = [self.master_addr, self.master_port]
        others = [name for name in names if name != self.first]
        arguments = {"targets": [target], "source_address": None, "token": token}
        return await self._query_each(dict.fromkeys(others, arguments), "exchange", timeout_s=_EXCHANGE_S)

    async def _all_reduce(self, places: Mapping[str, HostInterface]) -> list[Finding]:
        arguments = {
            name: {
                "rank": rank,
                "world_size": len(self.names),
                "address": self.master_addr,
                "port": self.master_port,
                "interface": places[name].interface,
            }
            for rank, name in enumerate(self.names)
        }
        answers = await self._query_each(arguments, "all_reduce", timeout_s=_ALL_REDUCE_S)
        findings = list(unanswered("all-reduce", answers))
        for name, seconds in values_of(answers).items():
            findings.append(
                fine(name, "all-reduce", f"4 MiB over {places[name].interface} in {1e3 * seconds:.0f} ms")
            )
        return findings

    async def _query_all(self, names: Sequence[str], question: str, **arguments: Any) -> dict[str, Answer]:
        """Send the same question to several hosts."""
        return await self._query_each(dict.fromkeys(names, arguments), question)

    async def _query_each(
        self, arguments: Mapping[str, Mapping[str, Any]], question: str, timeout_s: float | None = None
    ) -> dict[str, Answer]:
        """Send a question to each host, with separate arguments."""

        async def query(name: str) -> Answer:
            try:
                limit = timeout_s or self.request.answer_s
                return await self.nodes[name].query(question, timeout_s=limit, **arguments[name])
            except HostLostError as loss:
                _, what, _ = explain_ssh(name, *loss.args)
                return Answer(error=f"the connection has ended: {what}")

        return dict(zip(arguments, await asyncio.gather(*map(query, arguments)), strict=True))


async def _nothing() -> dict[str, Answer]:
    return {}


def _first_path(request: PreflightRequest) -> str:
    """Return the first entry of `sys.path` that the job will have."""
    if request.script is None or request.is_module:
        return request.workdir
    return os.path.dirname(os.path.join(request.workdir, request.script))


def _own_script(path: Path) -> dict[str, str] | None:
    """Return this machine's answer for the script."""
    try:
        return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except OSError:
        return None
