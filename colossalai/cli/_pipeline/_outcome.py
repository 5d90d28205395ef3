"""Outcomes of simulated schedules, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.pipeline import Timeline, lower


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of a schedule; tuples have a value per rank.

    Attributes:
        timeline: Timeline of the actions.
        message_bytes: Size of a message; None: unknown.
    """

    timeline: Timeline
    message_bytes: int | None

    @property
    def name(self) -> str:
        """Name of the schedule."""
        return self.timeline.schedule.name

    @property
    def bytes_sent(self) -> tuple[int, ...] | None:
        """Bytes that each rank sends."""
        if self.message_bytes is None:
            return None
        return tuple(number * self.message_bytes for number in self.timeline.num_messages)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a dict for JSON."""
        timeline, schedule = self.timeline, self.timeline.schedule
        return {
            "schedule": self.name,
            "num_ranks": schedule.num_ranks,
            "num_microbatches": schedule.num_microbatches,
            "num_stages": schedule.num_stages,
            "step_time": timeline.step_time,
            "bubble_fraction": timeline.bubble_fraction,
            "idle_fraction": timeline.idle_fraction,
            "stall_times": timeline.stall_times,
            "peak_live_microbatches": timeline.peak_live_microbatches,
            "num_messages": timeline.num_messages,
            "bytes_sent": self.bytes_sent,
        }


_MI = 2**20


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a table with a row per schedule, and a legend."""
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


def show_steps(outcomes: Sequence[Outcome]) -> None:
    """Print the lowered list of every rank of each schedule, which the executor runs."""
    console = Console(highlight=False)
    for outcome in outcomes:
        console.print(f"\n{outcome.name}", markup=False)
        schedule = outcome.timeline.schedule
        for rank in range(schedule.num_ranks):
            steps = " ".join(str(step) for step in lower(schedule, rank))
            console.print(f"rank {rank}  {steps}", markup=False)
    console.print(
        "[dim]1F0: stage 1, forward, microbatch 0. Messages: F an activation, B a gradient, T what "
        "the next stage must know of shapes first; > to a rank, < from it. RECV posts a receive, WAIT waits "
        "for it, HAND passes on without a message. The backward behind CLOSE completes the gradients.[/dim]"
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
