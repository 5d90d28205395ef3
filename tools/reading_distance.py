"""How far a reader must go: files, and switches between files, of an action.

The rule of counting: while an action runs on rank 0, in its main thread, every
entry of a function of the package is noted with its file (generators that go
on count as entries). *Files* is the number of different files, *switches* how
often the function entered lies in another file than the one entered before it.
Each action is done three times, and the third is counted: what is made once is
made. `ssh start` is the exception: it is counted in the process that the user
starts, from its first line to the moment the ranks' script runs. What Python's
import system calls at every import (`find_spec`) is no entry. Ranks
communicate over gloo, whose group is C++ and so ends the way; `--backend auto`
goes on, through the group over shared memory.

    python tools/reading_distance.py                         # this checkout
    # the same for a commit, and both side by side
    python tools/reading_distance.py --before 79c225b
    python tools/reading_distance.py --before 79c225b --json distance.json
"""

import argparse
import ast
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ACTIONS = {
    "Engine step": "GPT of 2 blocks, 2 data-parallel ranks; forward, backward, clip, step",
    "tensor-parallel step": "the same, 2 ranks of tensor 1d",
    "pipeline step": "GPT of 2 blocks, 2 stages, 1F1B, 4 microbatches; execute_schedule, step",
    "save": "2 linear layers, 2 data-parallel ranks, AdamW; Engine.save",
    "load": "Engine.load of the same",
    "ssh start": "colossalai run --host a,b with a stand-in for ssh, no pre-flight",
}

BACKEND = "READING_DISTANCE_BACKEND"  # for the ranks
KINDS = ("linear", "data", "tensor", "pipeline")


class Recorder:
    """Notes the files of a package in the order in which functions of it are entered.

    Args:
        package: The folder of the package.
    """

    def __init__(self, package: Path) -> None:
        self._prefix = str(package) + os.sep
        self.files: set[str] = set()
        self.switches = 0
        self._last: str | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take one event of `sys.setprofile`."""
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(self._prefix) and frame.f_code.co_name not in ("<module>", "find_spec"):
            self.files.add(name)
            self.switches += self._last is not None and name != self._last
            self._last = name

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is entered within the block."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    def figures(self) -> dict[str, Any]:
        """Return the two numbers, and the files for whoever wants to see them."""
        prefix = len(self._prefix)
        files = sorted(name[prefix:] for name in self.files)
        return {"files": len(files), "switches": self.switches, "names": files}


def _third(action: Callable[[], Any], package: Path) -> dict[str, Any]:
    action()
    action()
    recorder = Recorder(package)
    with recorder.recording():
        action()
    return recorder.figures()


def _measure_rank(kind: str, folder: str) -> dict[str, Any]:
    """Run in each rank: build a model, do the actions, return the figures."""
    import torch

    import colossalai

    config: dict[str, Any] = {"clip_grad_norm": 1.0}
    if kind == "tensor":
        config["parallel"] = {"tensor": {"size": 2, "mode": "1d"}}
    elif kind == "pipeline":
        config |= {
            "parallel": {"pipeline": {"size": 2, "partition": "balanced"}},
            "NUM_MICRO_BATCHES": 4,
        }
    colossalai.launch_from_torch(config, backend=os.environ.get(BACKEND, "gloo"))
    torch.manual_seed(0)
    model, criterion, batch = _linear_layers() if kind == "linear" else _gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    package = Path(colossalai.__file__).parent

    def step() -> None:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(batch), batch))
        engine.step()

    def pipeline_step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([(batch, batch)]), return_output_label=False)
        engine.step()

    if kind == "pipeline":
        return {"pipeline step": _third(pipeline_step, package)}
    if kind != "linear":
        return {"Engine step" if kind == "data" else "tensor-parallel step": _third(step, package)}
    step()
    numbers = iter(range(1, 4))
    return {
        "save": _third(lambda: engine.save(folder, step=next(numbers)), package),
        "load": _third(lambda: engine.load(folder), package),
    }


def _linear_layers() -> Any:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return model, torch.nn.MSELoss(), torch.randn(4, 8)


def _gpt() -> Any:
    import torch

    from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss

    sizes = GPTConfig(
        vocab_size=64, max_position_embeddings=16, hidden_size=32, num_attention_heads=2, num_layers=2
    )
    return GPT(sizes), GPTLMLoss(), torch.randint(0, 64, (4, 16))


_START = """
import atexit, json, os, sys
sys.path.insert(0, os.environ["READING_TOOLS"])
from pathlib import Path
from reading_distance import Recorder
from colossalai.cli import main
import colossalai
recorder = Recorder(Path(colossalai.__file__).parent)
sys.argv[0] = "colossalai"
def leave():
    sys.setprofile(None)
    Path(os.environ["READING_OUT"]).write_text(json.dumps(recorder.figures()))
atexit.register(leave)
sys.setprofile(recorder)
main()
"""
_SSH = """#!/bin/sh
# A stand-in for ssh: the last argument is the command, and it runs here.
for last; do :; done
exec sh -c "$last"
"""


def _ssh_start(checkout: Path, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    out, bin_folder = folder / "ssh.json", folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "ssh").write_text(_SSH)
    (bin_folder / "ssh").chmod(0o755)
    script = folder / "script.py"
    script.write_text("print('started')\n")
    command = [sys.executable, "-c", _START, "run", "--host", "alpha,beta", "--nproc_per_node", "1"]
    command += ["--no-preflight", "--master_addr", _address(), str(script)]
    environment = environment | {
        "PATH": f"{bin_folder}:{environment['PATH']}",
        "READING_OUT": str(out),
        "READING_TOOLS": str(Path(__file__).parent),
    }
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    if not out.exists() or done.returncode != 0:
        raise RuntimeError(f"the start failed in {checkout}:\n{done.stdout}{done.stderr}")
    return dict(json.loads(out.read_text()))


def _address() -> str:
    """Return an address of this machine that is not the loopback's; a job on two hosts refuses that one."""
    import psutil

    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return str(found.address)
    raise RuntimeError("this machine has no address but 127.0.0.1")


def measure(checkout: Path) -> dict[str, Any]:
    """Return the figures of a checkout: those of each action, and the longest file and function."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            out = folder / f"{kind}.json"
            command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node", "2", __file__]
            command += ["--rank-of", kind, "--json", str(out), "--folder", str(folder / "states")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            if not out.exists():
                raise RuntimeError(f"{kind} failed in {checkout}:\n{done.stdout}{done.stderr}")
            found |= json.loads(out.read_text())
        found["ssh start"] = _ssh_start(checkout, environment, folder)
    return {"actions": found, "longest": longest(checkout / "colossalai")}


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
    lines = ["| action | files | switches | ratio |", "| --- | --- | --- | --- |"]
    for action, what in ACTIONS.items():
        new = after["actions"][action]
        old = before["actions"][action] if before else None
        files = f"{old['files']} -> {new['files']}" if old else str(new["files"])
        switches = f"{old['switches']} -> {new['switches']}" if old else str(new["switches"])
        ratio = f"{new['switches'] / old['switches']:.2f}" if old else ""
        lines.append(f"| {action}: {what} | {files} | {switches} | {ratio} |")
    (file_lines, file), (lines_of_function, function) = after["longest"]["file"], after["longest"]["function"]
    lines += [
        "",
        f"Longest file: {file_lines} lines ({file}); longest function: {lines_of_function} ({function}).",
    ]
    return lines


def main() -> None:
    """Measure this checkout, and a commit beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit, too")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with the names of the files")
    parser.add_argument(
        "--backend", choices=("gloo", "auto"), default="gloo", help="of this checkout's ranks"
    )
    parser.add_argument("--rank-of", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        figures = _measure_rank(args.rank_of, args.folder)
        if int(os.environ["RANK"]) == 0:
            Path(args.json).write_text(json.dumps(figures))
        return
    os.environ[BACKEND] = args.backend
    before = None
    if args.before:
        with _checkout(args.before) as checkout:
            before = measure(checkout)
    after = measure(ROOT)
    print("\n".join(table(after, before)))
    if args.json:
        Path(args.json).write_text(json.dumps({"before": before, "after": after}, indent=1))


if __name__ == "__main__":
    main()
