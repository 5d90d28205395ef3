"""`colossalai benchmark`: check the options, start the processes, and print the results."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from colossalai.cli._benchmark._configurations import (
    Configuration,
    find_configurations,
    tensor_modes,
    why_none,
)
from colossalai.cli._benchmark._results import BenchmarkSettings, Results, Skipped
from colossalai.cli._benchmark._show import plot, show
from colossalai.cli._picture import check_folder, check_picture
from colossalai.launcher import Job, launch

_WORKER = "colossalai.cli._benchmark._worker"


@dataclass(frozen=True, kw_only=True)
class BenchmarkOutput:
    """Outputs of the results in addition to the table.

    Attributes:
        json_file: Path of a JSON file; "-": stdout, in place of the table.
        plot_file: Path of a picture.
    """

    json_file: str | None = None
    plot_file: str | None = None


def benchmark(settings: BenchmarkSettings, modes: Sequence[str] | None, output: BenchmarkOutput) -> int:
    """Run the configurations of some modes, or of all, print the results and return the exit code.

    Args:
        settings: Sizes; its configurations are set here.
        modes: Tensor modes; None: all.
        output: Outputs of the results.

    Raises:
        ValueError: A mode is unknown or has no configuration for these processes, the machine has fewer
            devices, or an output cannot be written. No process was started.
    """
    _check_output(output)
    _check_devices(settings.num_procs)
    found, unfit = _choose(settings.num_procs, modes)
    settings = dataclasses.replace(settings, configurations=tuple(found))
    with tempfile.TemporaryDirectory(prefix="colossalai_benchmark_") as folder:
        results_file = Path(folder) / "results.json"
        args = (json.dumps(dataclasses.asdict(settings)), str(results_file))
        exit_code = _launch(Job(target=_WORKER, args=args, is_module=True, num_procs=settings.num_procs))
        if exit_code != 0:
            return exit_code
        results = Results.from_json(results_file.read_text())
    _hand_out(dataclasses.replace(results, skipped=[*unfit, *results.skipped]), output)
    return 0


def _choose(num_procs: int, modes: Sequence[str] | None) -> tuple[list[Configuration], list[Skipped]]:
    """Return the configurations to run, and the given modes without one."""
    for mode in modes or ():
        if mode not in tensor_modes():
            raise ValueError(f"--modes has {mode!r}: choose from {', '.join(tensor_modes())}")
    found = find_configurations(num_procs, modes)
    if not found:
        raise ValueError("; ".join(why_none(mode, num_procs) for mode in modes or ()))
    present = {configuration.mode for configuration in found}
    unfit = [
        Skipped(model=None, label=mode, reason=why_none(mode, num_procs))
        for mode in modes or ()
        if mode not in present and None not in present
    ]
    return found, unfit


def _check_output(output: BenchmarkOutput) -> None:
    if output.plot_file is not None:
        check_picture("--plot", output.plot_file)
    if output.json_file not in (None, "-"):
        check_folder(output.json_file)


def _check_devices(num_procs: int) -> None:
    num_devices = torch.accelerator.device_count()
    if 0 < num_devices < num_procs:
        raise ValueError(f"--gpus {num_procs}, but this machine has {num_devices}; use at most that many")


def _launch(job: Job) -> int:
    console = Console(stderr=True)
    try:
        return launch(job)
    finally:
        if console.is_terminal:  # a rank that ended during its progress bar has left the cursor hidden
            console.show_cursor(True)


def _hand_out(results: Results, output: BenchmarkOutput) -> None:
    if output.plot_file is not None:
        plot(results, output.plot_file)
    if output.json_file == "-":
        sys.stdout.write(results.to_json() + "\n")
        return
    show(results)
    if output.json_file is not None:
        Path(output.json_file).write_text(results.to_json() + "\n")
