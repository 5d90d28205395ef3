"""`colossalai check -i`: print the report of the installation."""

import dataclasses
import json

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cluster import InstallationReport


def show(report: InstallationReport, *, as_json: bool) -> None:
    """Print the report as tables, or as JSON for a program."""
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "is_fit": report.is_fit}, indent=2))
        return
    console = Console(markup=False, highlight=False)  # an import error may have [brackets]
    for table in (_versions(report), _devices(report), _libraries(report), _fits(report)):
        console.print(table)
    console.print("The installation is fit." if report.is_fit else "The installation is NOT fit, see above.")


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


def _libraries(report: InstallationReport) -> Table:
    table = _table("Optional libraries", "", "version", "state", "used for")
    for library in report.libraries:
        state = "not installed" if library.version is None else "good"
        if library.import_error is not None:
            state = f"installed, does not import: {library.import_error}"
        table.add_row(library.name, library.version or "", state, library.purpose)
    return table


def _fits(report: InstallationReport) -> Table:
    table = _table("Fit", "", "", "what to do")
    for fit in report.fits:
        table.add_row(fit.name, "yes" if fit.is_fit else "NO", fit.detail)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
