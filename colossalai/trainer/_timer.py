"""Stopwatches that wait for the accelerator, so that they measure the work and not its being queued."""

import time
from collections.abc import Iterator

import torch


class Timer:
    """A stopwatch with a history of its measurements. Times are in seconds."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether a measurement has been kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """The time of the clock, after all queued work of the accelerator."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Start a measurement; a running measurement is discarded."""
        self._start = self.current_time

    def stop(self, keep_in_history: bool = False) -> float:
        """End the measurement.

        Args:
            keep_in_history: Whether to keep the time for `get_history_mean` and `get_history_sum`.

        Returns:
            The time since `start`.

        Raises:
            ValueError: The stopwatch is not running.
        """
        if self._start is None:
            raise ValueError("the timer is not running; call start() before stop()")
        self._elapsed = self.current_time - self._start
        self._start = None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_elapsed_time(self) -> float:
        """Return the time of the last measurement, 0 before the first."""
        return self._elapsed

    def get_history_mean(self) -> float:
        """Return the mean of the kept times.

        Raises:
            ValueError: The history is empty.
        """
        if not self._history:
            raise ValueError("the timer has no history; call stop(keep_in_history=True)")
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """Return the sum of the kept times, 0 if there are none."""
        return sum(self._history)

    def reset(self) -> None:
        """Forget the running measurement, the last time and the history."""
        self._start = None
        self._elapsed = 0.0
        self._history = []


class MultiTimer:
    """Stopwatches by name, made when they are first started.

    Args:
        on: Whether they measure; off, `start` and `stop` do nothing and cost nothing.
    """

    def __init__(self, on: bool = True) -> None:
        self._is_on = on
        self._timers: dict[str, Timer] = {}

    @property
    def is_on(self) -> bool:
        """Whether the stopwatches measure."""
        return self._is_on

    def set_status(self, mode: bool) -> None:
        """Switch all stopwatches on or off."""
        self._is_on = mode

    def start(self, name: str) -> None:
        """Start a measurement of the stopwatch `name`."""
        if self._is_on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float:
        """End the measurement of the stopwatch `name`.

        Args:
            name: The name it was started under.
            keep_in_history: Whether to keep the time for its mean and sum.

        Returns:
            The time since its start, 0 if the stopwatches are off.

        Raises:
            ValueError: The stopwatch `name` is not running.
        """
        return self.get_timer(name).stop(keep_in_history=keep_in_history) if self._is_on else 0.0

    def get_timer(self, name: str) -> Timer:
        """Return the stopwatch `name`.

        Raises:
            ValueError: The stopwatch `name` has never been started.
        """
        if name not in self._timers:
            known = ", ".join(map(repr, self._timers)) or "none"
            raise ValueError(f"no timer {name!r} has been started; started are: {known}")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset the stopwatch `name`, or all of them without a name; unknown names are ignored."""
        for known, timer in self._timers.items():
            if name in (None, known):
                timer.reset()

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())
