"""Import time of colossalai on top of torch, in processor time.

    python benchmarks/import_time.py --json benchmarks/results/import_time.json

Each round is a process that imports torch, then the package with the names that users import first (`launch`,
`initialize`, `Booster`). The ratio is computed within a process, so that a slow or busy machine affects both
parts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from harness.rounds import report

IMPORT = """
import json, time
begun = time.process_time()
import torch
torch_s = time.process_time() - begun
begun = time.process_time()
import colossalai
colossalai.launch, colossalai.initialize, colossalai.Booster
print(json.dumps([torch_s, time.process_time() - begun]))
"""


def import_seconds() -> tuple[float, float]:
    """Return the processor seconds of torch and of the package in a new process."""
    # As for users: new modules are compiled once.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True
    )
    torch_s, package_s = json.loads(done.stdout)
    return torch_s, package_s


def rows_of(seconds: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return a row for each import: median seconds, and the ratio to torch's with its range."""
    ratios = [package_s / torch_s for torch_s, package_s in seconds]
    return [
        {
            "import": "torch",
            "seconds": round(statistics.median(s for s, _ in seconds), 3),
            "ratio": 1.0,
            "range": [1.0, 1.0],
        },
        {
            "import": "colossalai",
            "seconds": round(statistics.median(s for _, s in seconds), 3),
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        },
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="processes (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    import_seconds()  # compiles the modules, and fills the disk's cache
    rows = rows_of([import_seconds() for _ in range(args.rounds)])
    report("Imports, processor time", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
