"""What is written down of a training run: means over all ranks, a line for each step, curves, loggers."""

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
_AS_TEXT: Mapping[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}  # of half a pair: \\ud800
_SHORTEST_S = 1e-9  # a clock that stood still


class Measures:
    """Sums of what criteria see of a step, added up over the ranks that compute losses.

    Most of what has a name here is a mean. The arguments name what is something else.

    Args:
        roots: Of these the root of the mean is told: they are added as squares.
        largest: Of these the largest of all ranks is told.
        rates: Of these is told how much all replicas together do in a second.
        replicas: How many there are: data-parallel ranks.
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
        self._peaks: dict[str, Tensor] = {}  # the largest, and the seconds of rates

    def add(self, count: Tensor | float, **sums: Tensor) -> None:
        """Add sums over so many rows."""
        for name, value in sums.items():
            found, number = self._sums.get(name, (torch.zeros(()), torch.zeros(())))
            self._sums[name] = (
                found.to(value.device, torch.float64) + value.detach().double(),
                number.to(value.device, torch.float64) + count,
            )

    def add_largest(self, **values: Tensor) -> None:
        """Add what only the largest of is told."""
        for name, value in values.items():
            found = value.detach().double()
            known = self._peaks.get(name, found)
            self._peaks[name] = torch.maximum(known.to(found.device), found)
            self.add(1.0, **{name: found})

    def add_rate(self, name: str, amount: float, seconds: float) -> None:
        """Add how much this rank has done in some seconds."""
        self.add(1.0, **{name: torch.tensor(amount, dtype=torch.float64)})
        self._peaks[name] = self._peaks.get(name, torch.zeros((), dtype=torch.float64)) + seconds

    PAIRS = ("accuracy", "margin")

    def add_pairs(self, chosen: Tensor, rejected: Tensor) -> None:
        """Add how often, and by how much, one reward is above the other; both (pairs,)."""
        right = (chosen > rejected).double().sum()
        self.add(float(len(chosen)), accuracy=right, margin=(chosen.detach() - rejected.detach()).sum())

    def take(self, names: Sequence[str], device: torch.device) -> dict[str, float]:
        """Return what all ranks have added, and forget it; every rank calls it.

        Args:
            names: What there may be, the same on all ranks: those without the last stage have nothing.
            device: Where ranks reduce.
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
                # The ranks wait for the slowest one, so the job takes as long as that.
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
    """A file of JSON lines, each of a step of a run, which goes on where a resumed run does.

    Args:
        file: The file.
        first: Steps that were done before: lines of later ones are of a run that was cut off.
    """

    def __init__(self, file: Path, *, first: int) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [each for each in self.read() if each["step"] <= first]
        with file.open("w", **_AS_TEXT) as opened:
            opened.writelines(_line_of(each) for each in kept)

    def read(self) -> list[dict[str, Any]]:
        """Return what is in it."""
        if not self._file.exists():
            return []
        # A text of an answer may have any line end of Unicode, which JSON leaves as it is.
        return [json.loads(each) for each in self._file.read_text(encoding="utf-8").split("\n") if each]

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line behind the others."""
        with self._file.open("a", **_AS_TEXT) as opened:
            opened.write(_line_of(line))


class RunLog:
    """The records of a run, and where they go: a file of lines, curves, loggers of the trainer.

    Args:
        folder: Where the files are; None: there are none.
        first: Steps that were done before: lines of later ones are of a run that was cut off.
        shows_progress: Whether there is a bar.
        loggers: What is handed each record.
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
        """Keep a record, and write it down."""
        self.records.append(record)
        if self._lines is not None:
            self._lines.add(record)
        values = {name: value for name, value in record.items() if name != "step"}
        for each in self._loggers:
            each.log("train", values, step=int(record["step"]), epoch=epoch)

    def progress(self, total: int, done: int) -> "StepBar":
        """Return a context that hands out what to call after each step."""
        return StepBar(total, done, is_shown=self._is_shown, records=self.records)

    def end(self) -> None:
        """Draw the curves, where matplotlib is there."""
        if self._folder is not None and self._lines is not None:
            draw_curves(self._lines.read(), self._folder / "steps.png")


class StepBar:
    """A bar of the steps, with the last loss."""

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
    """Draw what was measured over the steps into a PNG; return whether matplotlib is there to do so."""
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
