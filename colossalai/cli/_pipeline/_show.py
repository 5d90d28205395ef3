"""The figures of schedules as a table."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._pipeline._outcome import Outcome

_MI = 2**20


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a row for each schedule, and how to read it."""
    console = Console(highlight=False)
    schedule = outcomes[0].timeline.schedule
    has_bytes = outcomes[0].message_bytes is not None
    table = Table(box=box.SIMPLE)
    table.add_column("schedule", no_wrap=True)
    for column in ("step\ntime", "bubble", "idle", "messages", *(["sent\nMiB"] if has_bytes else [])):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("peak live\nmicrobatches")
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    console.print(
        f"\n{schedule.num_ranks} pipeline ranks, {schedule.num_microbatches} microbatches", markup=False
    )
    console.print(table)
    console.print(
        "[dim]Bubble: idle over computing time; idle: over all time. Messages of all ranks in a step. Peak "
        "live microbatches from rank 0 on, in units of what a rank's share of the model keeps for one.[/dim]"
    )


def _row(outcome: Outcome) -> list[str]:
    timeline = outcome.timeline
    sent = [] if outcome.bytes_sent is None else [f"{sum(outcome.bytes_sent) / _MI:.2f}"]
    return [
        outcome.name,
        f"{timeline.step_time:.6g}",
        f"{timeline.bubble_fraction:.2%}",
        f"{timeline.idle_fraction:.2%}",
        str(sum(timeline.num_messages)),
        *sent,
        " ".join(f"{peak:.3g}" for peak in timeline.peak_live_microbatches),
    ]
