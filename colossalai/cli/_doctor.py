"""`colossalai check --doctor`: the pre-flight checks by themselves, as a table or as JSON."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cluster import Host
from colossalai.launcher import RunOptions, find_hosts, forwarded_environment
from colossalai.launcher.preflight import Finding, PreflightReport, PreflightRequest, preflight


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command."""

    hosts: str | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    master_addr: str | None = None
    master_port: int = 0
    num_procs: int | None = None
    script: str | None = None
    ssh_port: int | None = None
    env: Sequence[str] = ()


def examine(settings: Settings) -> PreflightReport:
    """Run the checks.

    Raises:
        ValueError: An option cannot be used.
    """
    return preflight(
        PreflightRequest(
            hosts=_hosts(settings),
            master_addr=settings.master_addr,
            master_port=settings.master_port,
            num_procs=settings.num_procs,
            script=settings.script,
            env=forwarded_environment(os.environ, settings.env),
            ssh_port=settings.ssh_port,
            has_all_reduce=True,
        )
    )


def _hosts(settings: Settings) -> Sequence[Host]:
    """Return the hosts that `colossalai run` would take with these options."""
    options = RunOptions(
        target=settings.script or "",
        host_list=settings.hosts,
        hostfile=settings.hostfile,
        include=settings.include,
        exclude=settings.exclude,
        ssh_port=settings.ssh_port,
    )
    return find_hosts(options, os.environ) or (Host("localhost"),)


def show(report: PreflightReport, *, as_json: bool) -> None:
    """Print the table and, below it, a line for each thing to do; or JSON for a program."""
    if as_json:
        print(json.dumps(_as_data(report), indent=2))
        return
    console = Console(markup=False, highlight=False)
    table = Table(box=box.SIMPLE)
    for column in ("check", "host", "", "found"):
        table.add_column(column, overflow="fold")
    for check, hosts, finding in _rows(report.findings):
        table.add_row(check, ", ".join(hosts), finding.state.value, finding.what)
    console.print(table)
    for finding in (*report.failures, *report.warnings):
        console.print(finding.describe(), soft_wrap=True)
    verdict = "A job can be started here" if report.is_fit else "A job can NOT be started here, see above"
    console.print(f"{verdict} ({report.seconds:.1f} s).")


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[str, list[str], Finding]]:
    """Yield check, hosts and finding; hosts of which the same was found share a row."""
    for check in dict.fromkeys(finding.check for finding in findings):
        rows: dict[tuple[str, str], list[Finding]] = {}
        for finding in findings:
            if finding.check == check:
                rows.setdefault((finding.state.value, finding.what), []).append(finding)
        for same in rows.values():
            yield check, [finding.host for finding in same], same[0]


def _as_data(report: PreflightReport) -> dict[str, object]:
    findings = [
        {**dataclasses.asdict(finding), "state": finding.state.value, "ok": finding.ok}
        for finding in report.findings
    ]
    return {**dataclasses.asdict(report), "findings": findings, "is_fit": report.is_fit}
