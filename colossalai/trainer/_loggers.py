"""Loggers of metrics: files in common formats, and services for monitoring runs.

A logger receives figures during the training and does not depend on it; `hooks.LoggerHook` passes them on, on
rank 0 only.

    trainer.fit(loader, epochs=3, hooks=[LossHook(), LoggerHook(JsonLinesLogger("runs/metrics.jsonl"))])

The figures come in groups: "train" after training steps, "train_epoch" after training epochs, "test_epoch"
after tests; each with the number of complete steps and epochs.
"""

import csv
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_MAX_PARAM = 500  # characters of a value that every MLflow server accepts


class MetricLogger(ABC):
    """Keeps figures somewhere; a subclass needs `log` only."""

    def start(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 - most have nothing to open
        """Begin.

        Args:
            settings: Settings of the run as plain values: mesh, plan and config.
        """

    @abstractmethod
    def log(self, group: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Keep figures.

        Args:
            group: "train", "train_epoch" or "test_epoch".
            values: The metrics by name, and the learning rate as "lr".
            step: Number of complete training steps.
            epoch: Number of complete training epochs.
        """

    def flush(self) -> None:  # noqa: B027 - most write at once
        """Write buffered figures."""

    def close(self, *, failed: bool = False) -> None:  # noqa: B027 - most have nothing to close
        """End; `start` may come again.

        Args:
            failed: Whether an exception has ended the training.
        """


class JsonLinesLogger(MetricLogger):
    """Writes one JSON object in a line: group, step, epoch, time (Unix seconds), then the figures.

    New lines are appended to an existing file. A run that resumes from a checkpoint repeats the steps since
    then: of two lines with the same group and step the later one counts. inf and nan become null.

    Args:
        path: The file; its folder is made if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_truncated = _ends_within_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if is_truncated:
            self._file.write("\n")

    def log(self, group: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write a line and flush it."""
        assert self._file is not None, "start comes first"
        figures = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {"group": group, "step": step, "epoch": epoch, "time": round(time.time(), 3), **figures}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class CSVLogger(MetricLogger):
    """Writes a table for each group: train.csv, train_epoch.csv, test_epoch.csv.

    Its columns are step, epoch and the figures; a new figure adds a column at the end. New rows are appended
    to existing tables; see `JsonLinesLogger`.

    Args:
        folder: Folder of the tables; made if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._columns: dict[str, list[str]] = {}

    def start(self, settings: Mapping[str, Any]) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._columns.clear()

    def log(self, group: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write a row."""
        path = self.folder / f"{group}.csv"
        row = {"step": step, "epoch": epoch, **values}
        if group not in self._columns:
            self._columns[group] = _header_of(path)
        columns = self._columns[group]
        if new := [name for name in row if name not in columns]:
            columns += new
            _widen(path, columns)
        is_truncated = _ends_within_a_line(path)
        with path.open("a", encoding="utf-8", newline="") as file:
            if is_truncated:
                file.write("\n")
            csv.DictWriter(file, columns).writerow(row)


class TensorboardLogger(MetricLogger):
    """Writes TensorBoard scalars "<group>/<name>": groups that end with "_epoch" over the epochs, else steps.

    Args:
        folder: The folder for the events; made if it does not exist.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            import torch.utils.tensorboard as module
        except ImportError as error:
            raise ValueError(_missing("tensorboard", "colossalai[tensorboard]")) from error
        self._module: Any = module
        self.folder = Path(folder)
        self._writer: Any = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Open the file."""
        self._writer = self._module.SummaryWriter(str(self.folder))

    def log(self, group: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write the scalars."""
        position = epoch if group.endswith("_epoch") else step
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, position)
        if group != "train":
            self._writer.flush()

    def flush(self) -> None:
        """Write the buffered scalars."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLogger(MetricLogger):
    """Sends figures to Weights & Biases, as "<group>/<name>" over the steps, with the settings of the run.

    Args:
        options: The arguments of `wandb.init`: project, name, id and resume, mode="offline", ...

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(_missing("wandb", "wandb")) from error
        self._wandb: Any = wandb
        self.options = options
        self._run: Any = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin a run."""
        self._run = self._wandb.init(**{"config": dict(settings), **self.options})

    def log(self, group: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Send the figures."""
        figures = {f"{group}/{name}": value for name, value in values.items()}
        self._run.log({**figures, "epoch": epoch}, step=step)

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


class MLflowLogger(MetricLogger):
    """Sends figures to MLflow, as "<group>/<name>" over the steps, with the run's settings as parameters.

    Args:
        experiment: Name of the experiment; MLflow's default one if not given.
        tracking_uri: Address of the MLflow store; the configured one if not given.
        options: The arguments of `mlflow.start_run`: run_name, run_id, tags, ...

    Raises:
        ValueError: mlflow is not installed.
    """

    def __init__(
        self, experiment: str | None = None, *, tracking_uri: str | None = None, **options: Any
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ValueError(_missing("mlflow", "mlflow")) from error
        self._mlflow: Any = mlflow
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.options = options
        self._is_open = False

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin a run, or continue the run of `run_id`."""
        if self.tracking_uri is not None:
            self._mlflow.set_tracking_uri(self.tracking_uri)
        if self.experiment is not None:
            self._mlflow.set_experiment(self.experiment)
        self._mlflow.start_run(**self.options)
        self._is_open = True
        if "run_id" not in self.options:  # a continued run has its parameters, which cannot be changed
            self._mlflow.log_params({name: str(value)[:_MAX_PARAM] for name, value in _flat(settings)})

    def log(self, group: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Send the figures."""
        self._mlflow.log_metrics({f"{group}/{name}": value for name, value in values.items()}, step=step)

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        if self._is_open:
            self._mlflow.end_run(status="FAILED" if failed else "FINISHED")
            self._is_open = False


def _missing(package: str, requirement: str) -> str:
    return f"this logger needs the {package} package, which is not installed; run: pip install {requirement}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _ends_within_a_line(path: Path) -> bool:
    """Whether a process was killed while it wrote the last line of a file."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _header_of(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _widen(path: Path, columns: list[str]) -> None:
    """Rewrite a table with more columns; it replaces the old one when it is complete."""
    rows: list[list[str]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
    draft = path.with_suffix(".csv.part")
    with draft.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)])
    draft.replace(path)
