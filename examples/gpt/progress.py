"""Progress of a training: a bar on a terminal, plain lines in a log."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

NUM_PLAIN_LINES = 20  # lines of progress over a whole run where the output is not a terminal


def minutes(seconds: float) -> str:
    """Return a duration as minutes and seconds, with hours if it has any."""
    total = max(0, round(seconds))
    hours, rest = divmod(total, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class Lines:
    """Progress as plain lines, for logs."""

    def __init__(self, first_step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self.every = max(1, total_steps // NUM_PLAIN_LINES)
        self._is_begun = False

    def say(self, message: str) -> None:
        """Show some lines."""
        print(message, flush=True)

    def advance(self, step: int, *, loss: float, speed: float, seconds_left: float) -> None:
        """Show that a step has been made."""
        if step % self.every == 0 or not self._is_begun:
            self._is_begun = True
            self.say(
                f"step {step}/{self.total_steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
                f"{minutes(seconds_left)} left"
            )

    def validated(self, step: int, *, loss: float) -> None:
        """Show the loss of a validation."""
        self.say(f"step {step}/{self.total_steps}  validation loss {loss:.3f}")

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """Progress as a bar, for people."""

    def __init__(self, first_step: int, total_steps: int) -> None:
        figures = "loss {task.fields[loss]}  {task.fields[speed]} tokens/s  {task.fields[left]}"
        # At 80 columns all figures are shown; the bar takes the remaining width.
        self._progress = Progress(BarColumn(None), MofNCompleteColumn(), TextColumn(figures), expand=True)
        self._total_steps = total_steps
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=first_step, loss="-", speed="-", left="first step"
        )
        self._progress.start()

    def say(self, message: str) -> None:
        """Show some lines above the bar."""
        self._progress.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int, *, loss: float, speed: float, seconds_left: float) -> None:
        """Show that a step has been made."""
        left = f"{minutes(seconds_left)} left"
        self._progress.update(
            self._task, completed=step, loss=f"{loss:.3f}", speed=f"{speed:,.0f}", left=left
        )

    def validated(self, step: int, *, loss: float) -> None:
        """Show the loss of a validation."""
        self.say(f"step {step}/{self._total_steps}  validation loss {loss:.3f}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()
