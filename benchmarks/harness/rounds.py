"""Comparison of step times of several variants in one run on a noisy machine.

Every round runs one step of each variant, in an order that rotates. A disturbance that lasts longer than a
step then affects all variants alike, and the ratio of two steps of the same round is nearly free of it. The
figure is the median of those ratios over the rounds.
"""

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def time_rounds(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int,
    repeats: int = 1,
    timed: int = 1,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the step times of each variant in seconds, one per round; all ranks must call it.

    Args:
        variants: Steps to time, by name.
        rounds: Number of rounds.
        warmup: Number of rounds before them, which are not timed.
        repeats: Number of runs of a variant in a row, of which the last ones are timed. More than one if a
            variant changes state on which the time of the next one depends: the page cache.
        timed: Number of timed runs, of which the median is the time of the round.
        around: Contexts for the runs of a variant, by name; entered and exited outside the timed region.
        clock: Function that returns the time in seconds; `time.process_time` for one process on one core.
    """
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would add to the time of one variant
    try:
        for number in range(-warmup, rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                with (around or {}).get(name, nullcontext)():
                    for _ in range(repeats - timed):
                        variants[name]()
                    seconds = statistics.median(_time_step(variants[name], clock) for _ in range(timed))
                if number >= 0:
                    times[name].append(seconds)
    finally:
        gc.enable()
    return times


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the quartiles of some values; a single value is its own quartiles."""
    found = list(values)
    return statistics.quantiles(found, n=4) if len(found) > 1 else found * 3


def compare(times: Mapping[str, list[float]], *, baseline: str) -> list[dict[str, Any]]:
    """Return a row for each variant: its median step time, its median ratio to the baseline, quartiles."""
    rows = []
    for name, seconds in times.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds, times[baseline], strict=True)]
        low, middle, high = quartiles(ratios)
        rows.append(
            {
                "variant": name,
                "step_ms": round(1e3 * statistics.median(seconds), 3),
                "ratio": round(middle, 4),
                "ratio_quartiles": [round(low, 4), round(high, 4)],
            }
        )
    return rows


def report(
    title: str,
    rows: list[dict[str, Any]],
    *,
    settings: Mapping[str, Any],
    json_file: str | None,
    more: Mapping[str, list[dict[str, Any]]] | None = None,
) -> None:
    """Print rows as a table on rank 0, and write them with the settings and the machine as JSON.

    Args:
        title: Title of the table.
        rows: Rows with the same keys.
        settings: Settings that the figures depend on, without the machine.
        json_file: Path of the JSON file; None writes no file.
        more: Further rows by their key in the file; they are printed after `rows`.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"\n{title}", markup=False)
    for each in (rows, *(more or {}).values()):
        for table in tables(each, width=console.width):
            console.print(table)
    if json_file is not None:
        content = {"title": title, "settings": dict(settings), "machine": machine(), "rows": rows}
        content |= more or {}
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")


def tables(rows: list[dict[str, Any]], *, width: int) -> list[Any]:
    """Return rows as tables that fit into `width` characters.

    The first text columns describe a row. Columns that do not fit next to them are put into further tables,
    which repeat the text columns.

    Args:
        rows: Rows with the same keys.
        width: Number of characters.
    """
    from rich import box
    from rich.table import Table

    cells = {key: [_cell(row[key]) for row in rows] for key in rows[0]}
    heads = {key: key.replace("_", "\n") for key in cells}
    widths = {
        key: 3 + max(len(line) for text in (heads[key], *cells[key]) for line in text.splitlines() or [""])
        for key in cells
    }
    labels: list[str] = []
    for key in cells:
        is_text = all(isinstance(row[key], str) for row in rows)
        if labels and (not is_text or sum(widths[each] for each in (*labels, key)) > 0.6 * width):
            break
        labels.append(key)
    parts = [list(labels)]
    for key in list(cells)[len(labels) :]:
        if parts[-1] != labels and sum(widths[each] for each in (*parts[-1], key)) > width - 2:
            parts.append(list(labels))
        parts[-1].append(key)
    made = []
    for part in parts:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
        for key in part:
            is_figure = any(isinstance(row[key], int | float) for row in rows)
            table.add_column(heads[key], justify="right" if is_figure else "left", overflow="fold")
        for number in range(len(rows)):
            table.add_row(*(cells[key][number] for key in part))
        made.append(table)
    return made


def _cell(value: Any) -> str:
    """Return a value as text: numbers with four significant digits, lists as ranges."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " .. ".join(_cell(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def machine() -> dict[str, Any]:
    """Return a description of the machine, the versions and the date."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "accelerator": torch.get_device_module(accelerator).get_device_name() if accelerator else None,
        "threads": torch.get_num_threads(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "date": time.strftime("%Y-%m-%d"),
    }


def _time_step(step: Callable[[], Any], clock: Callable[[], float]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return clock() - start
