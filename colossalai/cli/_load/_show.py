"""Figures of a load as a table and as histograms."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._load._client import RequestOutcome
from colossalai.cli._load._figures import (
    LoadFigures,
    Spread,
    first_token_times,
    per_token_times,
    whole_times,
)

_MOST_FAILURES = 5


def show(figures: LoadFigures, outcomes: Sequence[RequestOutcome]) -> None:
    """Print the figures, and the first failures with their reasons."""
    console = Console(highlight=False, markup=False)
    if not figures.is_whole:
        console.print("Interrupted: what has ended so far.")
    console.print(
        f"{figures.finished} requests in {figures.elapsed_s:.1f} s: {figures.requests_per_s:.2f} requests/s, "
        f"{figures.output_tokens_per_s:.1f} output tokens/s",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE)
    table.add_column("milliseconds", no_wrap=True)
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, spread in (
        ("to the first token", figures.first_token_s),
        ("between tokens", figures.per_token_s),
        ("to the end", figures.whole_s),
    ):
        table.add_row(label, *_milliseconds(spread))
    console.print(table)
    if figures.failed:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in figures.failed.items())
        console.print(f"{sum(figures.failed.values())} requests failed: {kinds}", soft_wrap=True)
        failures = [each for each in outcomes if each.error is not None]
        for each in failures[:_MOST_FAILURES]:
            console.print(f"  request {each.number}: {each.error}: {each.reason}", soft_wrap=True)
        if len(failures) > _MOST_FAILURES:
            console.print(f"  and {len(failures) - _MOST_FAILURES} more; --json has all", soft_wrap=True)


def _milliseconds(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return ["-" if value is None else f"{1e3 * value:,.1f}" for value in values]


def plot(outcomes: Sequence[RequestOutcome], path: str) -> None:
    """Draw histograms of the three times, with their medians and 99th percentiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = (
        ("to the first token", first_token_times(outcomes)),
        ("between tokens", per_token_times(outcomes)),
        ("to the end", whole_times(outcomes)),
    )
    for axes, (label, times) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        milliseconds = [1e3 * value for value in times]
        axes.hist(milliseconds, bins=30)
        spread = Spread.of(milliseconds)
        for name, value, style in (("p50", spread.p50, "-"), ("p99", spread.p99, "--")):
            if value is not None:
                axes.axvline(value, color="black", linestyle=style, label=f"{name} {value:,.1f}")
                axes.legend()
        axes.set_xlabel(f"milliseconds {label}")
        axes.set_ylabel("requests")
    figure.savefig(path)
