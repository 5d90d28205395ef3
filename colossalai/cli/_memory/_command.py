"""`colossalai memory`: read the model's shape, estimate its memory, and print it."""

import json
import re
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._memory._report import Report, TrainingSetup, report_of, total_of
from colossalai.cli._memory._shape import shape_of
from colossalai.cli._picture import size_text
from colossalai.runtime.memory import SYMBOLS


def show(report: Report, *, explain: bool) -> None:
    """Print a row per kind of memory; with `explain` also its formula."""
    console = Console(highlight=False, markup=False)
    console.print(_headline(report), soft_wrap=True)
    table = Table(box=box.SIMPLE)
    table.add_column("per rank", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for rows, total in ((report.states, "model states"), (report.activations, "activations")):
        for row in rows:
            table.add_row(row.name, *_figures(row.num_bytes, report.num_bytes))
        table.add_row(f"= {total}", *_figures(total_of(rows), report.num_bytes), end_section=True)
    table.add_row("= total", *_figures(report.num_bytes, report.num_bytes))
    console.print(table)
    console.print(
        "An estimate: what communication, the allocator and the library take comes on top.", soft_wrap=True
    )
    if explain:
        _explain(console, report)


def _figures(num_bytes: int, total: int) -> tuple[str, str]:
    return size_text(num_bytes), f"{num_bytes / total:.1%}"


def _headline(report: Report) -> str:
    shape, job = report.shape, report.job
    where = f"stage {report.stage} of {job.pp} (the fullest)" if job.pp > 1 else "each rank"
    return (
        f"{shape.name}: {shape.num_params:,} parameters, {job.precision}, batch {job.batch} x {job.seq}; "
        f"dp {job.dp}, tp {job.tp}, pp {job.pp}, ZeRO {job.zero}; {where}"
    )


def _explain(console: Console, report: Report) -> None:
    rows = [*report.states, *report.activations]
    for row in rows:
        console.print(
            f"\n{row.name}\n  = {row.formula}\n  = {row.numbers}\n  = {row.num_bytes:,} B", soft_wrap=True
        )
    used = {letter for row in rows for letter in re.findall(r"[A-Za-z]", row.formula)}
    console.print()
    for letter, meaning in SYMBOLS.items():
        if letter in used:
            console.print(f"{letter}: {meaning}", soft_wrap=True)
    console.print("Model states: ZeRO, arXiv 1910.02054. Activations: arXiv 2205.05198.", soft_wrap=True)


def show_memory(
    model: str, *, seq: int | None, attention: str, as_json: bool, explain: bool, **plan: Any
) -> None:
    """Print the memory of a rank, as a table or as JSON.

    Args:
        model: Name of a model, or path of a config.json.
        seq: Length of the sequences; None: the model's longest.
        attention: "sdpa" or "eager".
        as_json: Whether to print JSON.
        explain: Whether to print the formulas as well.
        plan: Other fields of a `TrainingSetup`.

    Raises:
        ValueError: `model` is unknown, or cannot be trained with this plan (see `report_of`).
    """
    shape = shape_of(model)
    length = shape.max_length if seq is None else seq
    report = report_of(shape, TrainingSetup(seq=length, has_scores=attention == "eager", **plan))
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        show(report, explain=explain)
