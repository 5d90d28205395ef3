"""What came out for a schedule."""

from dataclasses import dataclass
from typing import Any

from colossalai.pipeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The figures of a schedule; tuples have a value for each rank.

    Attributes:
        timeline: When each action runs.
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
        """Return the figures under names, for JSON."""
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
