"""Hang report: the diagnosis and the activity of every rank on stderr, and with all stacks in a file."""

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from colossalai.monitor._calls import describe_ranks
from colossalai.monitor._diagnosis import Diagnosis
from colossalai.monitor._rank_report import RankReport

_NUM_RANKS_SHOWN = 16
_FLUSH_S = 0.5


def write_report(
    diagnosis: Diagnosis,
    reports: dict[int, RankReport],
    stacks: dict[int, str],
    *,
    folder: str,
    timeout: float,
    ends: bool,
) -> Path | None:
    """Write a report to stderr and to a file; return the file.

    Args:
        diagnosis: The ranks at fault.
        reports: Reports of the ranks.
        stacks: Stacks of ranks without a report, read by their neighbors.
        folder: For the file; it is made if there is none.
        timeout: Seconds of the wait.
        ends: Whether the job ends now.
    """
    head = [f"colossalai watchdog: ranks have waited for more than {timeout:g} s", *diagnosis.lines, ""]
    lines = list(_ranks(reports))
    text = "\n".join([*head, *lines, "", *_stacks(reports, stacks, sorted({*reports, *stacks})), ""])
    path = _write(text, folder)
    blamed = [rank for rank in diagnosis.blamed if rank in reports or rank in stacks][:4]
    end = "the job ends" if ends else "the job goes on (action='report')"
    shown = [
        *head,
        *lines[:_NUM_RANKS_SHOWN],
        *(["..."] if len(lines) > _NUM_RANKS_SHOWN else []),
        "",
        *_stacks(reports, stacks, blamed),
        f"{end}; all stacks are in {path}"
        if path
        else f"{end}; the stacks could not be written to {folder!r}",
    ]
    os.write(2, ("\n" + "\n".join(shown) + "\n").encode())
    return path


def write_notice(
    diagnosis: Diagnosis,
    reports: dict[int, RankReport],
    noticed: set[tuple[str, int]],
    *,
    notice: float,
    timeout: float,
    ends: bool,
) -> None:
    """Write one line to stderr about waiting and missing ranks, and its consequence; nothing without a wait.

    Args:
        diagnosis: The ranks at fault.
        reports: Reports of the ranks.
        noticed: Waits of earlier notices; those of now are added.
        notice: Seconds after which a notice is requested.
        timeout: Seconds until the report.
        ends: Whether the job ends then.
    """
    waits = [(rank, wait) for rank, answer in sorted(reports.items()) for wait in answer.waiting]
    new = [(rank, wait) for rank, wait in waits if wait.end not in noticed]
    noticed.update(wait.end for _, wait in new)
    if new:
        _, longest = max(new, key=lambda item: (item[1].patience is not None, item[1].seconds))
        ranks = [rank for rank, wait in new if wait.end == longest.end]
        verb, seconds = "wait" if len(ranks) > 1 else "waits", longest.seconds
        where = f"{longest.describe()} ({reports[ranks[0]].activity})"
        ranks_text = f"{describe_ranks(ranks)} {verb} for {seconds:.0f} s in {where}: "
    elif not waits and any(answer.overdue for answer in reports.values()):
        ranks_text, seconds = "", notice  # something outside of the job is waited for
    else:
        return
    more = f"; so with {describe_ranks(diagnosis.blamed[1:])}" if len(diagnosis.lines) > 1 else ""
    then = f"{'the job is ended' if ends else 'a report follows'} in {max(0.0, timeout - seconds):.0f} s"
    line = f"colossalai watchdog: {ranks_text}{diagnosis.lines[0]}{more}; if nothing moves, {then}\n"
    os.write(2, line.encode())


def flush_output() -> None:
    """Flush Python's output buffers, unless a hanging thread holds them."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(_FLUSH_S)


def _ranks(reports: dict[int, RankReport]) -> Iterator[str]:
    """Describe the activity of each rank in one line."""
    for rank, answer in sorted(reports.items()):
        waits = "; ".join(
            f"waits in {wait.describe()} with {wait.tensors() or 'no tensor'} for {wait.seconds:.1f} s"
            for wait in answer.waiting
        )
        does = f"{waits}; {answer.activity}" if waits else answer.activity
        yield f"rank {rank} ({answer.host}, pid {answer.pid}): {does}"


def _stacks(reports: dict[int, RankReport], stacks: dict[int, str], ranks: list[int]) -> Iterator[str]:
    for rank in ranks:
        text = reports[rank].stacks if rank in reports else stacks[rank]
        if text:
            yield f"Python stacks of rank {rank}:\n{text.rstrip()}\n"


def _write(text: str, folder: str) -> Path | None:
    path = Path(folder, f"hang-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")  # so that readers of the folder never see an incomplete report
        with part.open("x") as file:  # with the rights that the user's umask gives
            file.write(text)
        part.rename(path)
    except OSError:
        return None
    return path.resolve()
