"""Reading distance: the files of an action, and the switches between them.

The rule of counting: while an action runs on rank 0, each function of the
package that the main thread enters is recorded with its file (resuming a
generator counts as an entry). *Files* is the number of different files,
*switches* the number of entries into another file than the one before, *calls*
the number of entries. Each action runs three times and the third is counted, so
that one-time setup is excluded. Not counted:

- Functions that Python's import system calls (`find_spec`).
- `kernel/`, which replaces operators of torch where oneDNN is the faster
  library: part of an operator's cost, and different on each processor.
- Callbacks of futures, which run in this thread or in another one.
- Files of `model_zoo/`, which belong to the model; their number has a column.

Ranks communicate over gloo, whose group is C++, so that a path ends there;
`--backend auto` goes on through the group over shared memory. `ssh start` is
counted in the process that the user starts, from its first line to the moment
the ranks' script runs.

    python tools/reading_distance.py                     # this checkout
    python tools/reading_distance.py --before 79c225b    # and a commit
    python tools/reading_distance.py --only "Engine step" "Gemini step"
    # the most frequent switches and functions
    python tools/reading_distance.py --explain "Gemini step"
    # write the page and the figures that `make test` compares with
    python tools/reading_distance.py --before 6655e74 --write
"""

import argparse
import ast
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recorded_actions import ACTIONS, BACKEND, Entry, explanation, figures, record

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design" / "README.md"
LIMITS = ROOT / "tests" / "runtime" / "step" / "distances.json"
BEGIN, END = "<!-- reading distance: begin -->", "<!-- reading distance: end -->"
SSH_START = "ssh start"
SUBJECTS = {name: action.subject for name, action in ACTIONS.items()} | {
    SSH_START: "colossalai run --host a,b with a stand-in for ssh, no pre-flight"
}


class ActionError(RuntimeError):
    """An action failed in a checkout."""


_START = """
import atexit, json, os, sys
sys.path.insert(0, os.environ["READING_TOOLS"])
from pathlib import Path
from recorded_actions import Recorder, figures
from colossalai.cli import main
import colossalai
recorder = Recorder(Path(colossalai.__file__).parent)
sys.argv[0] = "colossalai"
def leave():
    sys.setprofile(None)
    Path(os.environ["READING_OUT"]).write_text(json.dumps(figures(recorder.entries())))
atexit.register(leave)
sys.setprofile(recorder)
main()
"""
_SSH = """#!/bin/sh
# A stand-in for ssh: the last argument is the command, and it runs here.
for last; do :; done
exec sh -c "$last"
"""


def _ssh_start(checkout: Path, folder: Path) -> dict[str, Any]:
    out, bin_folder = folder / "ssh.json", folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "ssh").write_text(_SSH)
    (bin_folder / "ssh").chmod(0o755)
    script = folder / "script.py"
    script.write_text("print('started')\n")
    command = [sys.executable, "-c", _START, "run", "--host", "alpha,beta", "--nproc_per_node", "1"]
    command += ["--no-preflight", "--master_addr", _address(), str(script)]
    environment = _environment(checkout)
    environment |= {
        "PATH": f"{bin_folder}:{environment['PATH']}",
        "READING_OUT": str(out),
        "READING_TOOLS": str(Path(__file__).parent),
    }
    done = _run(command, environment, str(folder))
    if not out.exists() or done.returncode != 0:
        raise ActionError(f"the start failed in {checkout}:\n{done.stdout}{done.stderr}")
    return dict(json.loads(out.read_text()))


def _address() -> str:
    """Return an address of this machine that is not the loopback's; a job on two hosts refuses that one."""
    import psutil

    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return str(found.address)
    raise ActionError("this machine has no address but 127.0.0.1")


def entries_of(action: str, checkout: Path) -> list[Entry]:
    """Run an action in ranks of a checkout, and return the entries of its third run on rank 0.

    Raises:
        ActionError: The action failed.
    """
    environment = _environment(checkout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "entries.json"
        command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node"]
        command += [str(ACTIONS[action].num_ranks), __file__, "--rank-of", action, "--folder", folder]
        # In the folder, since `-m` puts the working directory before PYTHONPATH.
        done = _run(command, environment, folder)
        if not out.exists():
            raise ActionError(f"{action} failed in {checkout}:\n{done.stdout}{done.stderr}")
        return [Entry(*entry) for entry in json.loads(out.read_text())]


def measure(checkout: Path, actions: Collection[str], *, is_old: bool = False) -> dict[str, Any]:
    """Return the figures of a checkout: those of each action, and the longest file and function.

    Args:
        checkout: Folder of the repository.
        actions: Names of the actions.
        is_old: An action that fails is None, since an old commit cannot do all of them.
    """
    found: dict[str, Any] = {}
    for action in actions:
        try:
            if action == SSH_START:
                with tempfile.TemporaryDirectory() as folder:
                    found[action] = _ssh_start(checkout, Path(folder))
            else:
                found[action] = figures(entries_of(action, checkout))
        except ActionError as error:
            if not is_old:
                raise
            found[action] = None
            print(f"{action}: not counted before: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    return {"actions": found, "longest": longest(checkout / "colossalai")}


def _environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


def _run(command: list[str], environment: dict[str, str], folder: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def longest(package: Path) -> dict[str, Any]:
    """Return the longest file and the longest function of a package, in lines."""
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in package.rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(package))
        files.append((text.count("\n"), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((lines, f"{name}:{node.name}"))
    return {"file": max(files), "function": max(functions), "num_files": len(files)}


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", f"{name}/tree", commit], check=True)
        try:
            yield Path(name) / "tree"
        finally:
            subprocess.run([*git, "remove", "--force", f"{name}/tree"], check=True)


def table(after: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """Return the figures as lines of Markdown."""
    lines = ["| action | files | switches | ratio | calls | model's files |", "| --- " * 6 + "|"]
    for action, new in after["actions"].items():
        old = before["actions"][action] if before else None
        cells = {
            name: f"{old[name] if old else '-'} -> {new[name]}" if before else str(new[name])
            for name in ("files", "switches", "calls")
        }
        ratio = f"{new['switches'] / old['switches']:.2f}" if old else ""
        lines.append(
            f"| {action}: {SUBJECTS[action]} | {cells['files']} | {cells['switches']} | {ratio} | "
            f"{cells['calls']} | {new['model_files'] or ''} |"
        )
    (file_lines, file), (lines_of_function, function) = after["longest"]["file"], after["longest"]["function"]
    lines += [
        "",
        f"Longest file: {file_lines} lines ({file}); longest function: {lines_of_function} ({function}).",
    ]
    return lines


def write(after: dict[str, Any], lines: list[str], commit: str | None) -> None:
    """Write the table to the page of the design, and the figures to the file that the tests read."""
    head, rest = PAGE.read_text().split(BEGIN)
    _, tail = rest.split(END)
    against = f" --before {commit}" if commit else ""
    text = [BEGIN, f"By `python tools/reading_distance.py{against} --write`.", "", *lines, END]
    PAGE.write_text(head + "\n".join(text) + tail)
    limits = (
        f'"{name}": ' + json.dumps({key: after["actions"][name][key] for key in ("files", "switches")})
        for name in ACTIONS
    )
    LIMITS.write_text("{\n  " + ",\n  ".join(limits) + "\n}\n")


def main() -> None:
    """Measure this checkout and, with `--before`, an earlier commit; or run as a rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit, too")
    parser.add_argument(
        "--only", metavar="ACTION", nargs="+", choices=SUBJECTS, help=f"one of: {', '.join(SUBJECTS)}"
    )
    parser.add_argument(
        "--explain", metavar="ACTION", choices=ACTIONS, help="print the most frequent entries of this action"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures with the names of the files; with --explain, the entries in order",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to docs/design, the figures to tests"
    )
    parser.add_argument("--backend", choices=("gloo", "auto"), default="gloo", help="backend of the ranks")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        _be_rank(args.rank_of, args.folder)
    elif args.write and (args.only or args.explain or args.backend != "gloo"):
        parser.error("--write is for all actions, over gloo")
    else:
        os.environ[BACKEND] = args.backend
        _explain(args) if args.explain else _compare(args)


def _be_rank(action: str, folder: Path) -> None:
    entries = record(action, folder / "states")
    if int(os.environ["RANK"]) == 0:
        (folder / "entries.json").write_text(json.dumps(entries))


def _explain(args: argparse.Namespace) -> None:
    entries = entries_of(args.explain, ROOT)
    print("\n".join([f"{args.explain}: {SUBJECTS[args.explain]}", "", *explanation(entries)]))
    if args.json:
        Path(args.json).write_text(json.dumps(entries, indent=1))


def _compare(args: argparse.Namespace) -> None:
    actions = args.only or list(SUBJECTS)
    before = None
    if args.before:
        with _checkout(args.before) as checkout:
            before = measure(checkout, actions, is_old=True)
    after = measure(ROOT, actions)
    lines = table(after, before)
    print("\n".join(lines))
    if args.json:
        Path(args.json).write_text(json.dumps({"before": before, "after": after}, indent=1))
    if args.write:
        write(after, lines, args.before)


if __name__ == "__main__":
    main()
