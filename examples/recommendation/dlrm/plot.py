"""Draw the AUROC of a run over its samples, with the optimum as a line.

    python examples/recommendation/dlrm/plot.py runs/dlrm

The picture is auroc.png in the folder of the run.
"""

import argparse
import json
from pathlib import Path
from typing import Any

PROGRESS_FILE = "progress.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the --output of a run")
    folder = parser.parse_args().folder
    steps = saved_steps(folder)
    if not steps:
        parser.error(f"{folder} has no checkpoint of a run")
    draw(json.loads((steps[-1] / PROGRESS_FILE).read_text()), folder / "auroc.png")


def saved_steps(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest last."""
    return sorted(folder.glob("step-????????"))


def draw(progress: dict[str, Any], path: Path) -> None:
    """Draw a PNG file of the progress that a checkpoint has."""
    import matplotlib  # here: seconds, and rank 0 alone draws

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    samples = [record["samples"] for record in progress["records"]]
    values = [record["auroc"] for record in progress["records"]]
    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=120, layout="constrained")
    if progress["optimum"] is not None:
        label = f"optimum {progress['optimum']:.4f}"
        axes.axhline(progress["optimum"], color="0.4", linestyle="--", label=label)
    axes.plot(samples, values, "o-", color="tab:blue", markersize=4, label=f"DLRM, last {values[-1]:.4f}")
    axes.set(xlabel="training samples", ylabel="AUROC on evaluation samples", title=path.parent.name)
    axes.grid(alpha=0.25)
    axes.legend()
    draft = path.with_name(f"{path.name}.tmp")
    figure.savefig(draft, format="png")
    draft.replace(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
