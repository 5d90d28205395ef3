"""The results of a benchmark as a table."""

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._benchmark._results import Figures, Results

_COLUMNS = (
    "configuration",
    "forward\nms",
    "backward\nms",
    "commun.\nms",
    "sent\nMiB",
    "params\nM",
    "memory\nMiB",
)
_MI = 2**20


def show(results: Results) -> None:
    """Print a table for each model, what was skipped and why, and how to read it."""
    settings, machine = results.settings, results.machine
    console = Console(highlight=False)
    console.print(
        f"\n{settings.num_procs} x {machine['device_type']} ({machine['device']}), {machine['backend']}, "
        f"{machine['threads_per_process']} threads each\n{settings.describe()}"
    )
    for model in dict.fromkeys(row.model for row in results.rows):
        console.print(_table(model, [row for row in results.rows if row.model == model]))
    for skipped in results.skipped:
        name = " ".join(filter(None, (skipped.model, skipped.label)))
        console.print(f"skipped {name}: {skipped.reason}", markup=False)
    if results.rows:
        console.print(
            "[dim]Per rank and step. Times are medians of the slowest rank; communication is part of forward "
            "and backward, and includes waiting for the other ranks. Memory is that of parameters and of the "
            "activations that the forward keeps for the backward.[/dim]"
        )


def _table(model: str, rows: list[Figures]) -> Table:
    has_device = any(row.device_peak_bytes is not None for row in rows)
    # No edges, one space between, and figures of seven characters at most: all of it fits into 80 columns.
    table = Table(title=model, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate([*_COLUMNS, *(["peak\nMiB"] if has_device else [])]):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        communication = row.forward_communication_ms + row.backward_communication_ms
        memory = [row.parameter_bytes + row.saved_bytes]
        if row.device_peak_bytes is not None:
            memory.append(row.device_peak_bytes)
        table.add_row(
            row.configuration.label,
            *(_figure(time) for time in (row.forward_ms, row.backward_ms, communication)),
            _figure(row.bytes_sent / _MI),
            _figure(row.num_parameters / 1e6, decimals=3),
            *(_figure(num_bytes / _MI) for num_bytes in memory),
        )
    return table


def _figure(value: float, *, decimals: int = 2) -> str:
    """Return a number with fewer decimals the larger it is: 12.34, 123.4, 123,456."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{decimals if value < 100 else 1}f}"
