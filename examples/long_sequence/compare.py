"""Run train.py on several numbers of processes, within one budget of memory.

    python examples/long_sequence/compare.py
    python examples/long_sequence/compare.py --ranks 1 2 --seq-length 2048

Options that it does not have go to train.py. It prints a table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("train.py")
REFUSAL = "BudgetExceededError: "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes (1 2 4)"
    )
    args, options = parser.parse_known_args()
    rows = [run(num_ranks, options) for num_ranks in args.ranks]
    print("| ranks | kept for the backward | first loss | last loss | |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def run(num_ranks: int, options: list[str]) -> tuple[str, ...]:
    """Return a row of the table: the report of a run, or the reason of its end."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        launch = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node", str(num_ranks)]
        command = [*launch, str(SCRIPT), *options, f"--report={report}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found = json.loads(report.read_text())
            losses = found["losses"]
            kept = f"{found['saved_bytes'] / 2**20:.1f} MB"
            return str(num_ranks), kept, f"{losses[0]:.2f}", f"{losses[-1]:.2f}", "trains"
    output = done.stdout + done.stderr
    if REFUSAL not in output:
        sys.exit(f"{num_ranks} ranks: {output}")
    return str(num_ranks), "above the budget", "", "", "stopped in the first forward"


if __name__ == "__main__":
    main()
