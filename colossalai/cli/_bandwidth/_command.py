"""`colossalai check --bandwidth`: start the ranks, and print the result as a table or as JSON."""

import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.launcher import Job, launch

_WORKER = "colossalai.cli._bandwidth._worker"
_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*)*")


def check_bandwidth(*, num_procs: int | None, mesh: str | None, as_json: bool) -> int:
    """Measure with ranks on this machine, print the result and return the exit code.

    Args:
        num_procs: Number of ranks; None: as many as `mesh` has, or one per accelerator.
        mesh: Grid of the ranks, as "2x4"; None: one axis.
        as_json: Whether to print JSON, which `DeviceMesh.load` reads from a file.

    Raises:
        ValueError: `mesh` is not a grid or not one of `num_procs` ranks, there are fewer than two ranks, or
            more than accelerators. No rank was started.
    """
    shape = _shape(num_procs, mesh)
    num_procs = math.prod(shape)
    num_devices = torch.accelerator.device_count()
    if 0 < num_devices < num_procs:
        raise ValueError(
            f"{num_procs} processes, but this machine has {num_devices} devices; use at most that many"
        )
    with tempfile.TemporaryDirectory(prefix="colossalai_bandwidth_") as folder:
        file = Path(folder) / "mesh.json"
        args = (json.dumps(shape), str(file))
        exit_code = _launch(Job(target=_WORKER, args=args, is_module=True, num_procs=num_procs))
        if exit_code != 0:
            return exit_code
        text = file.read_text()
    if as_json:
        sys.stdout.write(text)
    else:
        show_bandwidth(json.loads(text))
    return 0


def _shape(num_procs: int | None, mesh: str | None) -> list[int]:
    """Return the shape of the grid."""
    if mesh is None:
        num_procs = num_procs or torch.accelerator.device_count()
        shape = [num_procs]
    else:
        if _SHAPE.fullmatch(mesh) is None:
            raise ValueError(f"--mesh {mesh}: give the ranks along each axis, such as 2x4")
        shape = [int(extent) for extent in mesh.split("x")]
    if num_procs is not None and math.prod(shape) != num_procs:
        raise ValueError(
            f"--mesh {mesh} has {math.prod(shape)} ranks, --nproc_per_node is {num_procs}: make them "
            "equal, or leave one out"
        )
    if math.prod(shape) < 2:
        raise ValueError("--bandwidth is measured between processes: give --nproc_per_node 2 or more")
    return shape


def _launch(job: Job) -> int:
    console = Console(stderr=True)
    try:
        return launch(job)
    finally:
        if console.is_terminal:  # a rank that ended during its progress bar has left the cursor hidden
            console.show_cursor(True)


def show_bandwidth(content: dict[str, Any]) -> None:
    """Print the content of a file of `DeviceMesh.save` as a table."""
    machine, shape = content["machine"], "x".join(map(str, content["shape"]))
    console = Console(markup=False, highlight=False)
    host, cores = machine["hosts"][0], machine["cores"][0]
    console.print(
        f"{shape} ranks on {host} ({cores} cores), {machine['device']}, {machine['backend']}, "
        f"torch {machine['torch']}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE)
    for column in ("groups", "operation"):
        table.add_column(column, no_wrap=True)
    for column in ("start-up", "GB/s", "1 MB", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in content["groups"]:
        label = _label(group["extents_and_strides"])
        for op, line in group["operations"].items():
            rate = f"{1e-9 / line['beta']:.2f}" if line["beta"] > 0 else "-"
            at_1_mb = line["alpha"] + line["beta"] * 2**20
            table.add_row(label, op, _time(line["alpha"]), rate, _time(at_1_mb), f"{line['error']:.0%}")
            label = ""
        table.add_section()
    console.print(table)
    console.print(
        "n bytes take start-up + n / (GB/s): those of a rank's tensor before or after,\n"
        'whichever is larger. "2 every 4" are groups of 2 ranks that are 4 apart.'
    )


def _label(extents_and_strides: list[list[int]]) -> str:
    return " x ".join(
        f"{extent} adjacent" if stride == 1 else f"{extent} every {stride}"
        for extent, stride in extents_and_strides
    )


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-2 else f"{1e3 * seconds:.1f} ms"
