"""Schedules as CSV files, written by hand or by a program: a row for each rank, a cell for each action.

A cell is the stage, a letter (F, B, I or W; see `Op`) and the microbatch, as in `0F0`; torch's compute-only
files have the same format. Empty cells only show bubbles: a rank runs its cells in order. The row of a stage
determines its rank.
"""

import csv
import re
from pathlib import Path

from colossalai.pipeline.schedules._action import Action, Op, Schedule
from colossalai.pipeline.schedules._simulate import Costs, simulate
from colossalai.pipeline.schedules._validate import ScheduleError

_CELL = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_COLUMNS = Costs(forward=1, backward=2)  # a whole backward takes two columns, everything else one


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a CSV file; its name is the file's, without the extension.

    The schedule is not validated; see `validate`.

    Raises:
        ScheduleError: `path` has a cell that is not an action, or rows that do not determine the stages; the
            message names row and column, both from 1.
        OSError: The file cannot be read.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    while rows and not any(rows[-1]):
        rows.pop()
    if not rows:
        raise ScheduleError(f"{path} has no actions: a row for each rank, with cells like 0F0, is needed")
    actions = tuple(_read_row(path, number, row) for number, row in enumerate(rows, start=1))
    num_microbatches = 1 + max(action.microbatch for row in actions for action in row)
    return Schedule(path.stem, num_microbatches, _placement(path, actions), actions)


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as a CSV file for `read_schedule`; simultaneous actions are in one column.

    Raises:
        ScheduleError: The schedule cannot be run.
        OSError: The file cannot be written.
    """
    timeline = simulate(schedule, _COLUMNS)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for spans in timeline.spans:
            cells = [""] * int(timeline.step_time)
            for span in spans:
                cells[int(span.start)] = str(span.action)
            writer.writerow(cells)


def _read_row(path: Path, number: int, row: list[str]) -> tuple[Action, ...]:
    actions = []
    for column, cell in enumerate(row, start=1):
        if not cell:
            continue
        match = _CELL.fullmatch(cell)
        if match is None:
            raise ScheduleError(
                f"{path}, row {number}, column {column}: {cell!r} is not an action; write the stage, one of "
                "F, B, I, W, and the microbatch, as in 0F0"
            )
        actions.append(Action(Op(match[2]), int(match[1]), int(match[3])))
    if not actions:
        raise ScheduleError(
            f"{path}, row {number} has no action: every rank holds a stage, or leave the row out"
        )
    return tuple(actions)


def _placement(path: Path, actions: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """Return the rank of each stage, from the rows of the stages."""
    holders: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            holder = holders.setdefault(action.stage, rank)
            if holder != rank:
                raise ScheduleError(
                    f"{path}, row {rank + 1}: {action} is on stage {action.stage}, which row {holder + 1} "
                    "has: a stage is on one rank"
                )
    num_stages = 1 + max(holders)
    for stage in range(num_stages):
        if stage not in holders:
            raise ScheduleError(f"{path} has stage {num_stages - 1}, but no row has stage {stage}")
    return tuple(holders[stage] for stage in range(num_stages))
