"""Progress of an epoch: a bar on a terminal, an occasional line in a log file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from colossalai._clock import Clock
from colossalai.logging import DistributedLogger

Advance = Callable[[str], None]
BAR_INTERVAL_S = 0.1
LINE_INTERVAL_S = 10.0


@contextmanager
def show_progress(
    description: str,
    total: int | None,
    *,
    logger: DistributedLogger,
    shown: bool,
    clock: Clock | None = None,
) -> Iterator[Advance]:
    """Show the progress of a loop while the context is open.

    An exception ends the display as well, Ctrl-C included, so that the terminal has its cursor back.

    Args:
        description: Description of the loop.
        total: Number of steps, None if it is not known.
        logger: Writes the lines where stderr is not a terminal.
        shown: Whether to show anything on this rank.
        clock: The clock of the intervals. Default: that of this machine.

    Yields:
        A function to call after each step, with the text to show next to the count.
    """
    clock = clock or Clock()
    if not shown:
        yield lambda text: None
    elif sys.stderr.isatty():
        with _bar(description, total, _Pace(BAR_INTERVAL_S, clock)) as advance:
            yield advance
    else:
        with _lines(description, total, logger, _Pace(LINE_INTERVAL_S, clock)) as advance:
            yield advance


@contextmanager
def _bar(description: str, total: int | None, is_due: "_Pace") -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    # No refreshing thread: loader workers are forked while the bar is shown, and a fork must not meet a
    # held lock.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task(description, total=total, text="")

        def advance(text: str) -> None:
            progress.update(task, advance=1, text=text)
            if is_due():
                progress.refresh()

        yield advance


@contextmanager
def _lines(
    description: str, total: int | None, logger: DistributedLogger, is_due: "_Pace"
) -> Iterator[Advance]:
    done = 0
    last_text = ""

    def advance(text: str) -> None:
        nonlocal done, last_text
        done, last_text = done + 1, text
        if is_due():
            write()

    def write() -> None:
        logger.info(f"{description} {done}/{'?' if total is None else total} {last_text}".rstrip(), ranks=[0])

    yield advance
    write()


class _Pace:
    """Returns True at most once per interval."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last = clock.now()

    def __call__(self) -> bool:
        now = self._clock.now()
        if now - self._last < self._interval_s:
            return False
        self._last = now
        return True
