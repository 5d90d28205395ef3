"""Worker of `colossalai benchmark`: every process runs all models in all configurations.

    python -m colossalai.cli._benchmark._worker SETTINGS RESULTS_FILE

Rank 0 shows the progress and writes the results for the parent process.
"""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from colossalai.cli._benchmark._measure import measure
from colossalai.cli._benchmark._models import MODELS
from colossalai.cli._benchmark._results import Figures, Results, Skipped, settings_from
from colossalai.context import global_context, launch_from_torch


def main(settings_text: str, results_file: str) -> None:
    """Measure, and write the results on rank 0."""
    settings = settings_from(json.loads(settings_text))
    rows: list[Figures] = []
    skipped: list[Skipped] = []
    with _progress() as progress:
        steps = settings.warmup + settings.rounds
        task = progress.add_task("", total=len(settings.configurations) * len(MODELS) * steps)
        for number, configuration in enumerate(settings.configurations):
            launch_from_torch(configuration.config, verbose=False)
            machine = _machine()
            for order, (name, build) in enumerate(MODELS.items()):
                progress.update(task, description=f"{name} {configuration.label}")
                try:
                    rows.append(
                        measure(
                            name, build, configuration, settings, after_step=lambda: progress.advance(task)
                        )
                    )
                except ValueError as error:  # the sizes do not fit, on all ranks
                    skipped.append(Skipped(model=name, label=configuration.label, reason=str(error)))
                progress.update(task, completed=(number * len(MODELS) + order + 1) * steps)
            global_context.destroy()
    if _rank() == 0:
        results = Results(settings=settings, machine=machine, rows=rows, skipped=skipped)
        Path(results_file).write_text(results.to_json())


def _rank() -> int:
    return int(os.environ["RANK"])


def _progress() -> Progress:
    """Return a progress bar, which is disabled on other ranks than 0 and without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=_rank() != 0 or not console.is_terminal,
    )


def _machine() -> dict[str, Any]:
    """Return the properties of the machine that affect the figures."""
    device = global_context.device
    has_device = device.type != "cpu"
    return {
        "device": torch.get_device_module(device).get_device_name() if has_device else _cpu(),
        "device_type": device.type,
        "backend": dist.get_backend(),
        "threads_per_process": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main(*sys.argv[1:])
