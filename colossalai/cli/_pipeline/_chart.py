"""Text charts of schedules over time: a line per rank, with one scale for all schedules."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from rich.console import Console
from rich.text import Text

from colossalai.cli._pipeline._outcome import Outcome
from colossalai.pipeline import Action, Op, Schedule, Timeline
from colossalai.pipeline.schedules import Span

_IDLE = "."
_GOES_ON = "-"
_STYLES = {
    Op.FORWARD: "white on blue",
    Op.BACKWARD: "white on red",
    Op.INPUT_GRAD: "black on yellow",
    Op.WEIGHT_GRAD: "black on green",
}


def show_charts(outcomes: Sequence[Outcome]) -> None:
    """Print a chart of each schedule; the longest one has the width of the terminal."""
    console = Console(highlight=False)
    longest = max(outcome.timeline.step_time for outcome in outcomes)
    margin = len(f"rank {outcomes[0].timeline.schedule.num_ranks - 1} ")
    shortest = min(_shortest(outcome.timeline) for outcome in outcomes)
    scale = _even_scale((console.width - margin) / longest, shortest)
    for outcome in outcomes:
        console.print(f"\n{outcome.name}", markup=False)
        for rank, line in enumerate(draw(outcome.timeline, scale)):
            console.print(Text(f"rank {rank} ".ljust(margin)).append_text(line), no_wrap=True, crop=True)
    console.print(
        "[dim]F forward, B backward, I its input gradient, W its weight gradients, with the microbatch if "
        f"there is room for all; lower case: not the rank's first chunk; {_IDLE} idle.[/dim]"
    )


def _shortest(timeline: Timeline) -> float:
    """Return the shortest nonzero time of an action."""
    times = (span.end - span.start for spans in timeline.spans for span in spans)
    return min(time for time in times if time > 0)


def _even_scale(scale: float, shortest: float) -> float:
    """Return the scale, or less: the shortest action takes a whole number of characters if it takes one."""
    return floor(scale * shortest) / shortest if scale * shortest >= 1 else scale


def draw(timeline: Timeline, scale: float) -> list[Text]:
    """Return a line for each rank, `scale` characters for a unit of time."""
    rows = [[_Bar.of(span, scale) for span in spans] for spans in timeline.spans]
    has_numbers = all(bar.width >= len(f"F{bar.action.microbatch}") for row in rows for bar in row)
    lines = []
    for row in rows:
        line = Text()
        for bar in row:
            line.append(_IDLE * (bar.start - len(line)), style="dim")
            label = _label(bar.action, timeline.schedule, has_number=has_numbers)
            line.append(label.ljust(bar.width, _GOES_ON)[: bar.width], style=_STYLES[bar.action.op])
        line.append(_IDLE * (round(timeline.step_time * scale) - len(line)), style="dim")
        lines.append(line)
    return lines


@dataclass(frozen=True)
class _Bar:
    """An action in a line: its first character and its width, which can be 0."""

    action: Action
    start: int
    width: int

    @classmethod
    def of(cls, span: Span, scale: float) -> "_Bar":
        start = round(span.start * scale)
        return cls(span.action, start, round(span.end * scale) - start)


def _label(action: Action, schedule: Schedule, *, has_number: bool) -> str:
    is_first_chunk = action.stage == schedule.stages_of(schedule.rank_of_stage[action.stage])[0]
    letter = str(action.op) if is_first_chunk else str(action.op).lower()
    return f"{letter}{action.microbatch}" if has_number else letter
