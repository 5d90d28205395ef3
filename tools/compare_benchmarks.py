r"""Comparison of the benchmarks of an earlier commit with those of the present one.

The speed of a shared machine varies from minute to minute, so the two trees
take turns. The compared value is the ratio to a peer from the same rounds of
the same benchmark (torch's DDP, DTensor, pipelining, DCP), if there is one. A
figure is *within noise* if the medians differ by at most 3 %, or if the ranges
of the two trees overlap; otherwise it is *less* or *more*. The machine must be
idle all the same: a job of two ranks needs both cores.

    python tools/compare_benchmarks.py 79c225b
    python tools/compare_benchmarks.py 79c225b --only pipeline zero \
      --repeats 5 --json compare.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

ROOT = Path(__file__).resolve().parents[1]

# What a repeat of each benchmark runs: fewer rounds than a published figure takes, for there are several.
BENCHMARKS = {
    "data_parallel": ["--rounds", "25"],
    "tensor_parallel": ["--rounds", "30"],
    "pipeline": ["--rounds", "20"],
    "zero": ["--rounds", "10"],
    "watchdog": ["--rounds", "20"],
    "adam": ["--rounds", "20"],
    "start_time": ["--rounds", "3"],
    "checkpoint": ["--rounds", "3", "--parameters", "100e6"],
    "nvme": ["--rounds", "3"],
}
ALONE = {"adam", "nvme", "start_time"}  # they start their own processes
# The figure of a row: the first of these that it has. Smaller is better in all of them.
FIGURES = ("vs_fastest", "ratio", "ours_over_it", "seconds")
SAME = ("memory_ratio", "bytes_per_param", "sent_per_param", "saved_activations_mib", "parameters_mib")


def make_tree(commit: str, folder: Path) -> Path:
    """Check a commit out into `folder` with an environment that imports it, and return the folder."""
    command = ["git", "worktree", "add", "--quiet", "--detach", str(folder), commit]
    subprocess.run(command, cwd=ROOT, check=True)
    add_environment(folder)
    return folder


def add_environment(folder: Path) -> None:
    """Make `folder/.venv`, which imports the package from `folder` and all else from where we run."""
    environment = folder / ".venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    sites = [entry for entry in sys.path if entry.endswith("site-packages")]
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (Path(where) / "before.pth").write_text("\n".join([str(folder), *sites, ""]))
    for name in ("colossalai", "torchrun"):
        lines = (Path(sys.executable).parent / name).read_text().splitlines()
        script = environment / "bin" / name
        script.write_text("\n".join([f"#!{python}", *lines[1:]]) + "\n")
        script.chmod(0o755)


def run(tree: Path, name: str, *, folder: Path, repeat: int) -> Rows:
    """Run a benchmark of a tree once and return its rows."""
    result = folder / f"{name}-{repeat}.json"
    folder.mkdir(parents=True, exist_ok=True)
    command = [f"benchmarks/{name}.py", *BENCHMARKS[name], "--json", str(result)]
    binaries = tree / ".venv" / "bin"
    if name in ALONE:
        command = [str(binaries / "python"), *command]
    else:
        command = [str(binaries / "colossalai"), "run", "--nproc_per_node", "2", *command]
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode != 0 or not result.exists():
        raise SystemExit(f"{' '.join(command)} in {tree} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows: Rows = json.loads(result.read_text())["rows"]
    return rows


def label(row: dict[str, Any]) -> str:
    """Return what a row is about: its texts, without those that are results."""
    return " ".join(
        str(value)
        for key, value in row.items()
        if isinstance(value, str | bool) and key not in ("value", "quartiles", "fastest")
    )


def compare(name: str, before: list[Rows], after: list[Rows]) -> Rows:
    """Return a row for each figure of a benchmark that is not constant: medians, ranges, a verdict."""
    rows = []
    for first in before[0]:
        about = label(first)
        key = next(key for key in FIGURES if key in first)
        old, new = (
            [row[key] for rows in runs for row in rows if label(row) == about] for runs in (before, after)
        )
        if not new or len({*old, *new}) == 1:
            continue
        rows.append({"benchmark": name, "row": about, "figure": key, **verdict(old, new)})
    for key in SAME:
        for first in before[0]:
            pair = [
                [row.get(key) for rows in runs for row in rows if label(row) == label(first)]
                for runs in (before, after)
            ]
            if key in first and first[key] is not None and pair[0] != pair[1]:
                rows.append({"benchmark": name, "row": label(first), "figure": key, **verdict(*pair)})
    return rows


def verdict(old: list[float], new: list[float]) -> dict[str, Any]:
    """Compare the figures of the runs of two trees; see the head of this file."""
    middle = statistics.median(old), statistics.median(new)
    is_small = abs(middle[1] - middle[0]) <= 0.03 * abs(middle[0])
    do_meet = min(old) <= max(new) and min(new) <= max(old)
    word = "within noise" if is_small or do_meet else "less" if middle[1] < middle[0] else "more"
    return {
        "before": round(middle[0], 3),
        "before_range": [min(old), max(old)],
        "after": round(middle[1], 3),
        "after_range": [min(new), max(new)],
        "verdict": word,
    }


def show(rows: Rows, *, markdown: bool) -> None:
    """Print the table."""
    heads = ["benchmark", "row", "figure", "before", "after", "verdict"]
    texts = ("benchmark", "row", "figure")
    lines = [
        [*(row[key] for key in texts), _range(row, "before"), _range(row, "after"), row["verdict"]]
        for row in rows
    ]
    if markdown:
        for line in [heads, ["---"] * len(heads), *lines]:
            print(f"| {' | '.join(line)} |")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads)
    for line in lines:
        table.add_row(*(cell.replace(" (", "\n(") for cell in line))
    Console().print(table)


def _range(row: dict[str, Any], side: str) -> str:
    low, high = row[f"{side}_range"]
    return f"{row[side]:.3g} ({low:.3g} to {high:.3g})"


def main() -> None:
    """Compare the benchmarks selected on the command line."""
    description, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--after", default="HEAD", help="commit to compare it with (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="runs in each tree (default: 3)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", help="also write the table to this file")
    given = parser.parse_args()
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        trees: dict[str, Path] = {}
        try:
            for side, commit in (("before", given.commit), ("after", given.after)):
                trees[side] = make_tree(commit, Path(folder) / side)
            for name in given.only:
                runs: dict[str, list[Rows]] = {"before": [], "after": []}
                for repeat in range(given.repeats):
                    for side in ("before", "after") if repeat % 2 == 0 else ("after", "before"):
                        print(f"{name}: {side}, {repeat + 1} of {given.repeats}", file=sys.stderr, flush=True)
                        figures = Path(folder) / f"{side}-figures"
                        runs[side].append(run(trees[side], name, folder=figures, repeat=repeat))
                rows += compare(name, runs["before"], runs["after"])
                if given.json:
                    content = {"before": given.commit, "after": given.after, "rows": rows}
                    Path(given.json).write_text(json.dumps(content, indent=2) + "\n")
        finally:
            for tree in trees.values():
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    show(rows, markdown=given.markdown)


if __name__ == "__main__":
    main()
