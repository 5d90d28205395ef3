"""`colossalai memory`: read the model's shape, reckon, and show."""

import json
import sys
from typing import Any

from colossalai.cli._memory._report import Job, report_of
from colossalai.cli._memory._shape import shape_of
from colossalai.cli._memory._show import show


def show_memory(
    model: str, *, seq: int | None, attention: str, as_json: bool, explain: bool, **plan: Any
) -> None:
    """Print what a rank holds, as a table or as JSON.

    Args:
        model: A name, or the path of a config.json.
        seq: Length of the sequences; None: the longest that the model takes.
        attention: "sdpa" or "eager".
        as_json: Print JSON.
        explain: Also print the formulas.
        plan: The rest of a `Job`.

    Raises:
        ValueError: There is no such model, or it cannot be trained so.
    """
    shape = shape_of(model)
    length = shape.max_length if seq is None else seq
    report = report_of(shape, Job(seq=length, has_scores=attention == "eager", **plan))
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        show(report, explain=explain)
