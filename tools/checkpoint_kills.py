"""Kill ranks at random moments of saves, and check that no checkpoint is lost.

    python tools/checkpoint_kills.py --tries 200 --seed 1 --json kills.json

The moments follow from a seed. Two ranks save in a loop, in the foreground
or in the background; one or both are killed (SIGKILL). The remaining checkpoint
must be complete: the last saved one, or the new one.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.checkpoint_io.killed_ranks import Kill, run_tries


def summary(kills: list[Kill], seconds: float) -> dict[str, object]:
    """Return figures of a run."""
    return {
        "tries": len(kills),
        "lost": 0,  # run_tries raises otherwise
        "saves": kills[-1].told,
        "the save that had not returned was found": sum(kill.told > kill.done for kill in kills),
        "in the background": sum(kill.is_async for kill in kills),
        "killed ranks": dict(Counter(str(list(kill.victims)) for kill in kills)),
        "left something unfinished behind": sum(kill.num_left > 0 for kill in kills),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="folder of the checkpoints; default: the system's temporary folder"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are forked from here
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        kills = run_tries(Path(folder), num_tries=options.tries, seed=options.seed)
    figures = summary(kills, time.monotonic() - begin)
    for name, value in figures.items():
        print(f"{name:42} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
