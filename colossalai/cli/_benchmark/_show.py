"""Results of the benchmark as a table and as a plot."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._benchmark._results import Figures, Results

_FORWARD, _BACKWARD = "#4477aa", "#cc6677"  # Paul Tol's palette, for color-blind readers


def plot(results: Results, path: str) -> None:
    """Write a picture: for each model and configuration a bar of forward and backward."""
    from matplotlib.figure import Figure

    settings = results.settings
    models = list(dict.fromkeys(row.model for row in results.rows))
    longest = max((sum(row.model == model for row in results.rows) for model in models), default=1)
    figure = Figure(figsize=(3.0 + max(3.5, 1.1 * longest) * max(len(models), 1), 4.2), layout="constrained")
    figure.suptitle(
        f"Tensor parallelism over {settings.num_procs} processes on {results.machine['device_type']}",
        fontweight="bold",
    )
    axes = figure.subplots(1, max(len(models), 1), squeeze=False)[0]
    for model, ax in zip(models, axes, strict=False):
        _draw(ax, model, [row for row in results.rows if row.model == model])
    axes[0].set_ylabel("ms per step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.supxlabel(settings.describe(), fontsize="small", color="0.35")
    figure.savefig(path, dpi=150)


def _draw(ax: Any, model: str, rows: list[Figures]) -> None:
    """Stack the four parts of every step, and write its sum and the share of communication above."""
    names = [row.configuration.label.replace(", ", "\n") for row in rows]
    parts = [_parts(row) for row in rows]
    bottom = [0.0] * len(rows)
    styles = (
        ("forward: computing", {"facecolor": _FORWARD}),
        ("forward: communicating", {"facecolor": "white", "edgecolor": _FORWARD, "hatch": "////"}),
        ("backward: computing", {"facecolor": _BACKWARD}),
        ("backward: communicating", {"facecolor": "white", "edgecolor": _BACKWARD, "hatch": "////"}),
    )
    for number, (label, style) in enumerate(styles):
        heights = [part[number] for part in parts]
        ax.bar(names, heights, bottom=bottom, width=0.6, label=label, linewidth=0.8, **style)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for number, (total, part) in enumerate(zip(bottom, parts, strict=True)):
        share = (part[1] + part[3]) / total if total else 0.0
        ax.annotate(
            f"{total:.3g} ms\n{share:.0%} comm.",
            (number, total),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    ax.set_title(model)
    ax.margins(x=0.6 / max(len(rows), 1), y=0.18)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.yaxis.grid(True, color="0.9")


def _parts(row: Figures) -> tuple[float, float, float, float]:
    """Return the computing and the communicating part of forward and backward."""
    forward, backward = row.forward_communication_ms, row.backward_communication_ms
    return row.forward_ms - forward, forward, row.backward_ms - backward, backward


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
    """Print a table per model, the skipped configurations with their reasons, and a legend."""
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
