"""The picture of a training's losses."""

from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed

from matplotlib import pyplot

TRAIN_COLOR, VALIDATION_COLOR, QUIET_COLOR = "tab:blue", "tab:orange", "0.4"


def draw_losses(records: list[dict[str, Any]], path: Path, *, title: str, unigram_entropy: float) -> None:
    """Draw training and validation loss over the steps, and the unigram entropy as the line to beat.

    Args:
        records: Dicts with `step` and `loss` or `validation_loss`.
        path: The PNG file.
        title: Title of the picture.
        unigram_entropy: In nats per token, as the losses.
    """
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validation = [
        (record["step"], record["validation_loss"]) for record in records if "validation_loss" in record
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes.axhline(
        unigram_entropy, color=QUIET_COLOR, linestyle="--", label=f"unigram entropy {unigram_entropy:.2f}"
    )
    if train:
        axes.plot(*zip(*train, strict=True), color=TRAIN_COLOR, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*_smooth(train), strict=True), color=TRAIN_COLOR, label="training (smoothed)")
    if validation:
        label = f"validation, last {validation[-1][1]:.2f}"
        axes.plot(*zip(*validation, strict=True), "o-", color=VALIDATION_COLOR, markersize=4, label=label)
    axes.set(xlabel="optimizer step", ylabel="cross entropy (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    draft = path.with_name(f"{path.name}.tmp")
    figure.savefig(draft, format="png")
    draft.replace(path)
    pyplot.close(figure)


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Average over a fortieth of the points, half before and half after: no lag."""
    half = len(points) // 80
    windows = [points[max(0, index - half) : index + half + 1] for index in range(len(points))]
    return [
        (step, fmean(value for _, value in window)) for (step, _), window in zip(points, windows, strict=True)
    ]
