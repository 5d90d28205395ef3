"""Picture of the timeline: stacked areas of memory over the uses of chunks, and the moved bytes below."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from colossalai.cli._picture import unit_of
from colossalai.zero.gemini import Iteration

# From the bottom: resident data, transient data, data that is not of the model. Paul Tol's palette, for
# color-blind readers.
_AREAS = {
    "section_bytes": ("sections", "#4477aa"),
    "state_bytes": ("optimizer states", "#66ccee"),
    "gradient_bytes": ("mean gradients", "#228833"),
    "paged_bytes": ("pages of files in the step", "#bbbbbb"),
    "gathered_bytes": ("gathered chunks", "#ccbb44"),
    "other_bytes": ("not model data", "#ee6677"),
}
_IN, _OUT = "#222222", "#aa3377"
_SIZE = 11.0, 3.9  # inches: width, and height for each iteration


def plot(path: str, iterations: Mapping[str, Iteration], title: str) -> None:
    """Write a picture with a pair of axes per iteration, for the memory and for the moved bytes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    every = list(iterations.values())
    budget = every[0].memory_budget
    highest = max(max(its.peak_bytes for its in every), budget or 0)
    most_moved = max(max(m.bytes_in, m.bytes_out) for its in every for m in its.moments)
    figure = Figure(figsize=(_SIZE[0], _SIZE[1] * len(every) + 0.9), layout="constrained")
    rows = figure.subplots(2 * len(every), 1, squeeze=False, height_ratios=[4, 1] * len(every))[:, 0]
    for number, (name, iteration) in enumerate(iterations.items()):
        upper, lower = rows[2 * number : 2 * number + 2]
        _draw_areas(upper, iteration, unit_of(highest))
        upper.set_ylim(0, 1.12 * highest / unit_of(highest)[0])
        upper.set_title(name, loc="left", fontsize="medium", fontweight="bold")
        _draw_moves(lower, iteration, most_moved)
    rows[-1].set_xlabel("uses of chunks, in order; in the step, updates")
    used = [name for name in _AREAS if any(getattr(m, name) for its in every for m in its.moments)]
    handles: list[Any] = [Patch(color=_AREAS[name][1], label=_AREAS[name][0]) for name in reversed(used)]
    if budget is not None:
        handles.append(Line2D([], [], color="black", linestyle="--", label="memory budget"))
    figure.suptitle(title, fontsize="medium")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_areas(ax: Any, iteration: Iteration, unit: tuple[int, str]) -> None:
    """Draw the memory from each use until the next, and the budget."""
    moments = [*iteration.moments, iteration.moments[-1]]  # gives the last moment a width
    sizes = [[getattr(moment, name) / unit[0] for moment in moments] for name in _AREAS]
    colors = [color for _, color in _AREAS.values()]
    ax.stackplot(range(len(moments)), sizes, step="post", colors=colors, linewidth=0)
    if iteration.memory_budget is not None:
        ax.axhline(iteration.memory_budget / unit[0], color="black", linestyle="--", linewidth=1)
    begin = 0
    for phase, group in groupby(iteration.moments, key=lambda moment: moment.phase):
        end = begin + len(list(group))
        across = ax.get_xaxis_transform()  # x of the data, y a share of the height
        ax.text((begin + end) / 2, 0.985, phase.value, ha="center", va="top", transform=across)
        if begin:
            ax.axvline(begin, color="0.25", linewidth=0.8)
        begin = end
    ax.set_ylabel(unit[1])
    _tidy(ax, begin)
    ax.tick_params(labelbottom=False)


def _draw_moves(ax: Any, iteration: Iteration, most_moved: int) -> None:
    """Draw the bytes from the lower tier upwards, and the bytes to the lower tier downwards."""
    unit, name = unit_of(most_moved)
    moments = iteration.moments
    places = [place + 0.5 for place in range(len(moments))]
    ax.bar(places, [moment.bytes_in / unit for moment in moments], width=0.7, color=_IN)
    ax.bar(places, [-moment.bytes_out / unit for moment in moments], width=0.7, color=_OUT)
    ax.axhline(0, color="0.25", linewidth=0.8)
    most = max(1.15 * most_moved / unit, 1e-9) if most_moved else 1
    ax.set_ylim(-most, most)
    ax.set_ylabel(f"moved\n{name}" if most_moved else "moved")
    ax.yaxis.set_major_formatter(lambda size, _: f"{abs(size):g}")  # below the line is out, not negative
    if not most_moved:
        ax.set_yticks([0])
    ax.text(1.005, 0.78, "in", color=_IN, va="center", transform=ax.transAxes)
    ax.text(1.005, 0.22, "out", color=_OUT, va="center", transform=ax.transAxes)
    _tidy(ax, len(moments))


def _tidy(ax: Any, length: int) -> None:
    ax.set_xlim(0, length)
    ax.spines[["top", "right"]].set_visible(False)
