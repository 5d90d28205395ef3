"""Draw the precision of a run over its families, and the contacts of one of them.

    python examples/biology/evoformer/plot.py runs/evoformer-dap

The picture is contacts.png in the folder of the run.
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
    if not (folder / PROGRESS_FILE).exists():
        parser.error(f"{folder} has no {PROGRESS_FILE}: no evaluation of a run was written there")
    draw(json.loads((folder / PROGRESS_FILE).read_text()), folder / "contacts.png")


def write(progress: dict[str, Any], folder: Path) -> None:
    """Write the JSON file and the picture of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{PROGRESS_FILE}.tmp"
    draft.write_text(json.dumps(progress))
    draft.replace(folder / PROGRESS_FILE)
    draw(progress, folder / "contacts.png")


def draw(progress: dict[str, Any], path: Path) -> None:
    """Draw a PNG file of records and of the maps of one family."""
    import matplotlib  # here: seconds, and rank 0 alone draws

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), dpi=120, layout="constrained")
    families = [record["families"] for record in progress["records"]]
    values = [record["precision"] for record in progress["records"]]
    left.axhline(
        progress["baseline"],
        color="0.4",
        linestyle="--",
        label=f"mutual information {progress['baseline']:.2f}",
    )
    left.plot(families, values, "o-", markersize=4, label=f"Evoformer, last {values[-1]:.2f}")
    left.set(xlabel="training families", ylabel="precision of the best L/5 pairs", ylim=(0, 1.02))
    left.grid(alpha=0.25)
    left.legend(loc="lower right")

    num_residues = len(progress["map"])
    extent = (0.5, num_residues + 0.5) * 2  # residues are numbered from 1
    image = right.imshow(progress["map"], cmap="viridis", vmin=0, vmax=1, origin="lower", extent=extent)
    figure.colorbar(image, ax=right, label="probability of contact")
    rows = [first + 1 for first, _ in progress["contacts"]]
    columns = [second + 1 for _, second in progress["contacts"]]
    # Each pair once, below the diagonal.
    size = max(2.0, 200 / num_residues)  # one pixel of the map
    right.plot(columns, rows, "s", markersize=size, color="tab:red", fillstyle="none", label="contact")
    right.set(xlabel="residue", ylabel="residue", title="an evaluation family")
    right.legend(loc="upper left")
    draft = path.with_name(f"{path.name}.tmp")
    figure.savefig(draft, format="png")
    draft.replace(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
