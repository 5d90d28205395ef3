"""Checkpoints of a run: model, optimizers and schedules, and a small JSON file with the position."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from build import Training
from plot import PROGRESS_FILE, saved_steps

NAMES = ("dense", "rows")  # of the optimizers
KEPT = 2


def save(folder: Path, training: Training, progress: dict[str, Any]) -> None:
    """Save `folder/step-<step>`, and delete all but the newest two; all ranks call it.

    The files are written into another folder, which is renamed when it is complete: a run that is killed
    here resumes from the checkpoint before.
    """
    draft, target = folder / "draft", folder / f"step-{progress['step']:08}"
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()  # no rank writes into a draft that rank 0 deletes
    training.booster.save_model(training.model, draft / "model")
    for name, optimizer, scheduler in zip(NAMES, training.optimizers, training.schedulers, strict=True):
        training.booster.save_optimizer(optimizer, draft / name)
        training.booster.save_lr_scheduler(scheduler, draft / f"{name}_schedule")
    dist.barrier()  # all ranks have written
    if dist.get_rank() == 0:
        (draft / PROGRESS_FILE).write_text(json.dumps(progress))
        draft.rename(target)
        for old in saved_steps(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load(folder: Path, training: Training) -> dict[str, Any]:
    """Load the newest checkpoint and return its progress; all ranks call it.

    Raises:
        FileNotFoundError: The folder has no checkpoint.
    """
    steps = saved_steps(folder)
    if not steps:
        raise FileNotFoundError(f"--resume: {folder} has no checkpoint; leave it out to start")
    training.booster.load_model(training.model, steps[-1] / "model")
    for name, optimizer, scheduler in zip(NAMES, training.optimizers, training.schedulers, strict=True):
        training.booster.load_optimizer(optimizer, steps[-1] / name)
        training.booster.load_lr_scheduler(scheduler, steps[-1] / f"{name}_schedule")
    progress: dict[str, Any] = json.loads((steps[-1] / PROGRESS_FILE).read_text())
    return progress
