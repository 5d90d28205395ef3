"""Reports of a training run: progress, metrics.jsonl, TensorBoard events, a picture of the losses.

One rank reports with a `FileReport`; the others hold a `Report`, whose methods do nothing.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from progress import Bar, Lines

METRICS_FILE = "metrics.jsonl"
PICTURE_FILE = "loss.png"
TENSORBOARD_FOLDER = "tensorboard"
SPEED_STEPS = 20  # the speed shown is an average over so many steps
FIRST_PICTURE_S = 20.0  # from the start of a run to its first picture
PICTURE_SHARE = 0.01  # pictures during the run take at most this share of the time


class Report:
    """The report of a rank that does not report.

    Attributes:
        is_active: Whether this rank reports.
    """

    is_active = False

    def say(self, message: str) -> None:
        """Show some lines."""

    def train(self, step: int, *, loss: float, lr: float, num_tokens: int) -> None:
        """Record an optimizer step that has seen `num_tokens` tokens on all ranks together."""

    def validation(self, step: int, *, loss: float) -> None:
        """Record a validation after `step` optimizer steps."""

    def draw(self, *, title: str) -> None:
        """Write the picture of the losses."""

    def close(self) -> None:
        """End the progress display and flush the files."""


class FileReport(Report):
    """Report to the terminal and to a folder.

    Args:
        folder: Folder of the files.
        first_step: Steps already made by an earlier run; its later records are dropped, since those
            steps will be made again.
        total_steps: Optimizer steps of the whole training.
        unigram_entropy: Drawn in the picture as the line to beat.
        clock: Seconds from any moment on.
    """

    is_active = True

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        total_steps: int,
        unigram_entropy: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Only the reporting rank needs these two; a missing module raises now, not at the end.
        from plot import draw_losses
        from torch.utils.tensorboard import SummaryWriter

        self._draw_losses = draw_losses
        self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step + 1)
        self._folder = folder
        self._unigram_entropy = unigram_entropy
        self._records = keep_metrics(folder / METRICS_FILE, last_step=first_step)
        self._file = (folder / METRICS_FILE).open("a", buffering=1)
        on_screen = Bar if sys.stdout.isatty() else Lines
        self._progress = on_screen(first_step, total_steps)
        self._clock = clock
        self._first_step, self._total_steps, self._begin = first_step, total_steps, clock()
        self._times: deque[float] = deque([self._begin], maxlen=SPEED_STEPS + 1)
        self._next_picture = self._begin + FIRST_PICTURE_S

    def say(self, message: str) -> None:
        """Show some lines; they stay above the progress bar."""
        self._progress.say(message)

    def train(self, step: int, *, loss: float, lr: float, num_tokens: int) -> None:
        """Record an optimizer step that has seen `num_tokens` tokens on all ranks together."""
        now = self._clock()
        self._times.append(now)
        speed = num_tokens * (len(self._times) - 1) / (self._times[-1] - self._times[0])
        self._record({"step": step, "loss": loss, "lr": lr, "tokens_per_second": round(speed)})
        for name, value in (("loss/train", loss), ("learning_rate", lr), ("tokens_per_second", speed)):
            self._events.add_scalar(name, value, step)
        # Over all steps of this run: validations and checkpoints take their time, too.
        seconds_left = (now - self._begin) / (step - self._first_step) * (self._total_steps - step)
        self._progress.advance(step, loss=loss, speed=speed, seconds_left=seconds_left)
        if now >= self._next_picture:
            self.draw(title=f"GPT, {step} of {self._total_steps} steps")
            self._next_picture = self._clock() + (self._clock() - now) / PICTURE_SHARE
            self._restart_speed()

    def validation(self, step: int, *, loss: float) -> None:
        """Record a validation after `step` optimizer steps, once."""
        if any(record["step"] == step and "validation_loss" in record for record in self._records):
            return
        self._record({"step": step, "validation_loss": loss})
        self._events.add_scalar("loss/validation", loss, step)
        self._progress.validated(step, loss=loss)
        self._restart_speed()

    def draw(self, *, title: str) -> None:
        """Write the picture of the losses."""
        path = self._folder / PICTURE_FILE
        self._draw_losses(self._records, path, title=title, unigram_entropy=self._unigram_entropy)

    def close(self) -> None:
        """End the progress display and flush the files."""
        self._progress.close()
        self._events.close()
        self._file.close()

    def _restart_speed(self) -> None:
        """Measure the speed from now on: a validation or a picture does not count as a step."""
        self._times.clear()
        self._times.append(self._clock())

    def _record(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        self._file.write(json.dumps(record) + "\n")


def keep_metrics(path: Path, *, last_step: int) -> list[dict[str, Any]]:
    """Drop the records of an earlier run after `last_step`; return the others."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # a crash may have cut the last line: it has no line end
    records = [record for record in map(json.loads, lines) if record["step"] <= last_step]
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text("".join(json.dumps(record) + "\n" for record in records))
    draft.replace(path)
    return records
