"""Picture of schedules over time."""

from collections.abc import Sequence
from typing import Any

from colossalai.cli._pipeline._outcome import Outcome
from colossalai.pipeline import Op
from colossalai.pipeline.schedules import Span

# Paul Tol's palette, for color-blind readers.
_COLORS = {
    Op.FORWARD: ("forward", "#4477aa"),
    Op.BACKWARD: ("backward", "#aa3377"),
    Op.INPUT_GRAD: ("input gradient", "#ee6677"),
    Op.WEIGHT_GRAD: ("weight gradients", "#228833"),
}
_WIDTH = 14.0  # inches
_NUMBERED_WIDTH = 0.18  # inches; smallest width of an action with the number of its microbatch


def plot(outcomes: Sequence[Outcome], path: str) -> None:
    """Write a picture with a row of axes per schedule, a line per rank, and the same time axis for all."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_ranks = outcomes[0].timeline.schedule.num_ranks
    longest = max(outcome.timeline.step_time for outcome in outcomes)
    height = len(outcomes) * (0.7 + 0.28 * num_ranks) + 0.8
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    for ax, outcome in zip(figure.subplots(len(outcomes), 1, squeeze=False)[:, 0], outcomes, strict=True):
        _draw(ax, outcome, longest)
    ax.set_xlabel("time")
    ops = {span.action.op for outcome in outcomes for spans in outcome.timeline.spans for span in spans}
    handles = [Patch(color=color, label=label) for op, (label, color) in _COLORS.items() if op in ops]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)


def _draw(ax: Any, outcome: Outcome, longest: float) -> None:
    """Draw every action as a bar; a rank's later chunks are lighter."""
    timeline, schedule = outcome.timeline, outcome.timeline.schedule
    for rank, spans in enumerate(timeline.spans):
        _draw_rank(ax, rank, spans, schedule.stages_of(rank), longest)
    ax.set_title(
        f"{outcome.name}: step {timeline.step_time:.6g}, bubble {timeline.bubble_fraction:.2%}",
        loc="left",
        fontsize="medium",
    )
    ax.set_xlim(0, longest)
    ax.set_ylim(schedule.num_ranks - 0.5, -0.5)
    ax.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    ax.spines[["top", "right"]].set_visible(False)


def _draw_rank(ax: Any, rank: int, spans: Sequence[Span], stages: tuple[int, ...], longest: float) -> None:
    bars: dict[tuple[Op, int], list[tuple[float, float]]] = {}
    for span in spans:
        chunk = stages.index(span.action.stage)
        width = span.end - span.start
        bars.setdefault((span.action.op, chunk), []).append((span.start, width))
        if width / longest * _WIDTH >= _NUMBERED_WIDTH:
            ax.text(
                span.start + width / 2,
                rank,
                span.action.microbatch,
                ha="center",
                va="center",
                fontsize=6,
                color="0.1" if chunk else "white",
            )
    for (op, chunk), places in bars.items():
        color = _lighter(_COLORS[op][1], chunk / len(stages))
        ax.broken_barh(places, (rank - 0.45, 0.9), facecolor=color, edgecolor="white", linewidth=0.4)


def _lighter(color: str, share: float) -> tuple[float, ...]:
    """Mix a color with white; with a share of 1, a fifth of the color remains."""
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(part + (1 - part) * share * 0.8 for part in parts)
