"""`colossalai check`: the installation, pre-flight checks of hosts (`--doctor`), matmuls (`--matmul`)."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cluster import Host, InstallationReport
from colossalai.kernel import LEAST_SPEEDUP, RenewedProfile, renew_profile, why_unavailable
from colossalai.launcher import RunOptions, find_hosts, forwarded_environment
from colossalai.launcher.preflight import Finding, PreflightReport, PreflightRequest, preflight


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Options of `colossalai check --doctor`."""

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


def examine(settings: DoctorSettings) -> PreflightReport:
    """Run the pre-flight checks.

    Raises:
        ValueError: The host options contradict one another or name no host, a word of `env` is not a
            variable, or `master_port` is not a TCP port.
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


def _hosts(settings: DoctorSettings) -> Sequence[Host]:
    """Return the hosts that `colossalai run` would use with these options."""
    options = RunOptions(
        target=settings.script or "",
        host_list=settings.hosts,
        hostfile=settings.hostfile,
        include=settings.include,
        exclude=settings.exclude,
        ssh_port=settings.ssh_port,
    )
    return find_hosts(options, os.environ) or (Host("localhost"),)


def show_preflight(report: PreflightReport, *, as_json: bool) -> None:
    """Print a table and, below it, a line per problem with its remedy; or JSON."""
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
    """Yield check, hosts and finding; hosts with the same finding share a row."""
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


def show_installation(report: InstallationReport, *, as_json: bool) -> None:
    """Print the report as tables, or as JSON."""
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "is_fit": report.is_fit}, indent=2))
        return
    console = Console(markup=False, highlight=False)  # an import error may have [brackets]
    for table in (_versions(report), _devices(report), _speed(report), _libraries(report), _fits(report)):
        console.print(table)
    console.print("The installation is fit." if report.is_fit else "The installation is NOT fit, see above.")


def check_products(*, as_json: bool) -> int:
    """Measure float32 matmuls, store the figures for jobs, and print them; return the exit code."""
    problem = why_unavailable()
    if problem is not None:
        print(
            json.dumps({"problem": problem})
            if as_json
            else f'matmul="auto" takes torch\'s products: {problem}.'
        )
        return 0
    renewed = renew_profile()
    if as_json:
        file = None if renewed.file is None else str(renewed.file)
        print(json.dumps({**dataclasses.asdict(renewed), "file": file, "choice": _choice(renewed)}, indent=2))
    else:
        _show_products(renewed)
    return 0 if renewed.found.is_believed else 1


def _choice(renewed: RenewedProfile) -> str:
    return "oneDNN" if renewed.found.profile.speedup >= LEAST_SPEEDUP else "torch"


def _show_products(renewed: RenewedProfile) -> None:
    console = Console(markup=False, highlight=False)
    found, earlier = renewed.found, renewed.earlier
    table = _table("Float32 products of one core", "", "now", "kept before")
    for name in ("torch_gflops", "onednn_gflops"):
        before = "" if earlier is None else f"{getattr(earlier.profile, name):.1f}"
        table.add_row(name.removesuffix("_gflops"), f"{getattr(found.profile, name):.1f} GFLOP/s", before)
    console.print(table)
    lines = [
        f"{found.num_runs} of {renewed.num_runs} runs agree; a run's rounds differ by {found.spread:.0%}.",
        f'matmul="auto" takes {_choice(renewed)}: oneDNN is {found.profile.speedup:.2f} times as fast, and '
        f"it is taken from {LEAST_SPEEDUP} on.",
        "The figures cannot be kept: each job measures anew."
        if renewed.file is None
        else f"Kept in {renewed.file}; a job that starts in a week or later measures again.",
    ]
    if not found.is_believed:
        lines[-1] = "The runs differ, as on a busy machine: check again when it is quiet. Jobs measure, too."
    for line in lines:
        console.print(line, soft_wrap=True)


def _versions(report: InstallationReport) -> Table:
    table = _table("Versions", "", "version")
    for name, version in report.versions.items():
        table.add_row(name, version)
    return table


def _devices(report: InstallationReport) -> Table:
    table = _table("Devices and back ends", "", "kind", "memory")
    for device in report.devices:
        table.add_row(device.name, device.kind, f"{device.memory_gib} GiB")
    for name, is_available in report.backends.items():
        table.add_row(name, "back end", "available" if is_available else "not in this build of torch")
    return table


def _speed(report: InstallationReport) -> Table:
    table = _table("Speed of one core", "", "now")
    for figure in (*report.speed.products, report.speed.memory):
        table.add_row(figure.name, f"{figure.value:g} {figure.unit}")
    table.caption, table.caption_justify = f"  {report.speed.advice}", "left"
    return table


def _libraries(report: InstallationReport) -> Table:
    is_broken = any(library.is_broken for library in report.libraries)
    table = _table("Optional libraries", "", "version", "state", "used for", *["what to do"] * is_broken)
    for library in report.libraries:
        state = "not installed" if library.version is None else "good"
        if library.import_error is not None:
            state = f"installed, does not import: {library.import_error}"
        table.add_row(
            library.name, library.version or "", state, library.purpose, *[library.action] * is_broken
        )
    return table


def _fits(report: InstallationReport) -> Table:
    table = _table("Fit", "", "", *[] if report.is_fit else ["found", "what to do"])
    for fit in report.fits:
        cells = () if report.is_fit else (fit.detail, fit.action)
        table.add_row(fit.name, "yes" if fit.is_fit else "NO", *cells)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
