"""Progress of a training: a bar on a terminal, plain lines in a log."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

NUM_PLAIN_LINES = 20  # lines of progress over a whole run where the output is not a terminal


class Lines:
    """Progress as plain lines, for logs."""

    def __init__(self, first_step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self.every = max(1, total_steps // NUM_PLAIN_LINES)

    def say(self, message: str) -> None:
        """Show some lines."""
        print(message, flush=True)

    def advance(self, step: int, *, loss: float, speed: float) -> None:
        """Show that a step has been made."""
        if step % self.every == 0:
            self.say(f"step {step}/{self.total_steps}  loss {loss:.3f}  {speed:,.0f} tokens/s")

    def validated(self, step: int, *, loss: float) -> None:
        """Show the loss of a validation."""
        self.say(f"step {step}/{self.total_steps}  validation loss {loss:.3f}")

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """Progress as a bar, for people."""

    def __init__(self, first_step: int, total_steps: int) -> None:
        figures = (
            "loss {task.fields[loss]}  validation {task.fields[validation]}  {task.fields[speed]} tokens/s"
        )
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn(figures), TimeRemainingColumn()
        )
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=first_step, loss="-", validation="-", speed="-"
        )
        self._progress.start()

    def say(self, message: str) -> None:
        """Show some lines above the bar."""
        self._progress.console.print(message, markup=False, highlight=False)

    def advance(self, step: int, *, loss: float, speed: float) -> None:
        """Show that a step has been made."""
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=f"{speed:,.0f}")

    def validated(self, step: int, *, loss: float) -> None:
        """Show the loss of a validation."""
        self._progress.update(self._task, validation=f"{loss:.3f}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()
