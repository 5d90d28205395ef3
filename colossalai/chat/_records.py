"""Records of a training run: means over all ranks, a line for each step, curves, loggers."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor

from colossalai.communication import all_reduce_in_place
from colossalai.context import ParallelMode
from colossalai.trainer import MetricLogger

Record = Mapping[str, float]
_PLOTTED = ("loss", "accuracy", "margin", "reward", "kl", "kl_to_reference", "entropy")
_AS_TEXT: Mapping[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}  # lone surrogates: \\ud800
_SHORTEST_S = 1e-9  # avoids a division by 0


class Measures:
    """Metrics of a step: sums of the criteria, reduced over the ranks that compute losses.

    A metric is a mean by default; the arguments name the others.

    Args:
        roots: Metrics reported as the root of the mean; squares are added to them.
        largest: Metrics reported as the maximum over all ranks.
        rates: Metrics reported as the amount per second over all replicas.
        replicas: Number of replicas: data-parallel ranks.
    """

    def __init__(
        self,
        *,
        roots: Sequence[str] = (),
        largest: Sequence[str] = (),
        rates: Sequence[str] = (),
        replicas: int = 1,
    ) -> None:
        self._roots, self._rates, self._replicas = roots, rates, replicas
        self._with_peak = (*largest, *rates)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._peaks: dict[str, Tensor] = {}  # maxima, and seconds of rates

    def add(self, count: Tensor | float, **sums: Tensor) -> None:
        """Add sums over `count` rows."""
        for name, value in sums.items():
            found, number = self._sums.get(name, (torch.zeros(()), torch.zeros(())))
            self._sums[name] = (
                found.to(value.device, torch.float64) + value.detach().double(),
                number.to(value.device, torch.float64) + count,
            )

    def add_largest(self, **values: Tensor) -> None:
        """Add values of metrics that are reported as maxima."""
        for name, value in values.items():
            found = value.detach().double()
            known = self._peaks.get(name, found)
            self._peaks[name] = torch.maximum(known.to(found.device), found)
            self.add(1.0, **{name: found})

    def add_rate(self, name: str, amount: float, seconds: float) -> None:
        """Add an amount of work by this rank and its time in seconds."""
        self.add(1.0, **{name: torch.tensor(amount, dtype=torch.float64)})
        self._peaks[name] = self._peaks.get(name, torch.zeros((), dtype=torch.float64)) + seconds

    PAIRS = ("accuracy", "margin")

    def add_pairs(self, chosen: Tensor, rejected: Tensor) -> None:
        """Add the accuracy and the margin of pairs of rewards; both (pairs,)."""
        right = (chosen > rejected).double().sum()
        self.add(float(len(chosen)), accuracy=right, margin=(chosen.detach() - rejected.detach()).sum())

    def take(self, names: Sequence[str], device: torch.device) -> dict[str, float]:
        """Reduce the metrics over all ranks, return and reset them; collective.

        Args:
            names: Names of the metrics, the same on all ranks; ranks without the last stage have no values.
            device: Device of the reduction.
        """
        if not names:
            return {}
        nothing = (torch.zeros(()), torch.zeros(()))
        total = torch.stack(
            [
                torch.stack([each.double().to(device) for each in self._sums.get(name, nothing)])
                for name in names
            ]
        )
        all_reduce_in_place(total, ParallelMode.GLOBAL)  # (name, 2), from every rank of the job
        told = {
            name: float(sums / count) for name, (sums, count) in zip(names, total, strict=True) if count > 0
        }
        peaks = self._take_peaks([name for name in names if name in self._with_peak], device)
        self._sums, self._peaks = {}, {}
        for name, value in told.items():
            if name in self._roots:
                told[name] = math.sqrt(value)
            elif name in self._rates:
                # All ranks wait for the slowest one, which determines the time of the job.
                told[name] = value * self._replicas / max(peaks[name], _SHORTEST_S)
            elif name in peaks:
                told[name] = peaks[name]
        return told

    def _take_peaks(self, names: Sequence[str], device: torch.device) -> dict[str, float]:
        if not names:
            return {}
        nothing = torch.full((), -math.inf, dtype=torch.float64)
        peaks = torch.stack([self._peaks.get(name, nothing).to(device) for name in names])
        all_reduce_in_place(peaks, ParallelMode.GLOBAL, dist.ReduceOp.MAX)  # (name,)
        return dict(zip(names, peaks.tolist(), strict=True))


def _line_of(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


class StepLines:
    """A file of JSON lines, one per step, which a resumed run continues.

    Args:
        file: The file.
        first: Number of steps before this run: lines of later steps, from an interrupted run, are removed.
    """

    def __init__(self, file: Path, *, first: int) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [each for each in self.read() if each["step"] <= first]
        with file.open("w", **_AS_TEXT) as opened:
            opened.writelines(_line_of(each) for each in kept)

    def read(self) -> list[dict[str, Any]]:
        """Return all lines."""
        if not self._file.exists():
            return []
        # Split at line feeds only: answers may contain other line separators, which JSON does not escape.
        return [json.loads(each) for each in self._file.read_text(encoding="utf-8").split("\n") if each]

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        with self._file.open("a", **_AS_TEXT) as opened:
            opened.write(_line_of(line))


class RunLog:
    """Records of a run and their outputs: a file of lines, curves, loggers of the trainer.

    Args:
        folder: Folder of the files; None for no files.
        first: Number of steps before this run: lines of later steps, from an interrupted run, are removed.
        shows_progress: Whether to show a progress bar.
        loggers: Loggers of each record.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        first: int,
        shows_progress: bool,
        loggers: Sequence[MetricLogger] = (),
    ) -> None:
        self.records: list[dict[str, float]] = []
        self._folder = None if folder is None else Path(folder)
        self._lines = None if self._folder is None else StepLines(self._folder / "steps.jsonl", first=first)
        self._is_shown, self._loggers = shows_progress, loggers

    def __enter__(self) -> "RunLog":
        for each in self._loggers:
            each.start({})
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for each in self._loggers:
            each.close(failed=kind is not None)

    def add(self, record: dict[str, float], *, epoch: int) -> None:
        """Store a record, and write it to the outputs."""
        self.records.append(record)
        if self._lines is not None:
            self._lines.add(record)
        values = {name: value for name, value in record.items() if name != "step"}
        for each in self._loggers:
            each.log("train", values, step=int(record["step"]), epoch=epoch)

    def progress(self, total: int, done: int) -> "StepBar":
        """Return a context manager with a function to call after each step."""
        return StepBar(total, done, is_shown=self._is_shown, records=self.records)

    def end(self) -> None:
        """Draw the curves, if matplotlib is installed."""
        if self._folder is not None and self._lines is not None:
            draw_curves(self._lines.read(), self._folder / "steps.png")


class StepBar:
    """Progress bar of the steps, with the last loss."""

    def __init__(self, total: int, done: int, *, is_shown: bool, records: Sequence[Record]) -> None:
        self._progress = Progress(disable=not is_shown)
        self._total, self._done, self._records, self._is_shown = total, done, records, is_shown

    def __enter__(self) -> Callable[[], None]:
        if not self._is_shown:
            return lambda: None
        self._progress.start()
        task = self._progress.add_task("training", total=self._total, completed=self._done)

        def advance() -> None:
            self._progress.update(task, advance=1, description=f"loss {self._records[-1]['loss']:.4f}")

        return advance

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            self._progress.stop()


def draw_curves(records: Sequence[Record], file: Path) -> bool:
    """Draw the metrics over the steps into a PNG; return whether matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = [name for name in _PLOTTED if any(name in each for each in records)]
    if not names:
        return True
    figure = Figure(figsize=(6, 2.2 * len(names)), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, place + 1)
        found = [(each["step"], each[name]) for each in records if name in each]
        axes.plot(*zip(*found, strict=True), linewidth=1)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    figure.savefig(file, dpi=120)
    return True
