"""`colossalai memory`: read the model's shape, reckon, and show."""

import json
import sys
from dataclasses import dataclass

from colossalai.cli._memory._report import Job, report_of
from colossalai.cli._memory._shape import shape_of
from colossalai.cli._memory._show import show


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for; see `Job`.

    Attributes:
        seq: Length of the sequences; None: the longest that the model takes.
        attention: "sdpa" or "eager".
    """

    model: str
    dp: int
    tp: int
    pp: int
    zero: int
    precision: str
    batch: int
    seq: int | None
    recompute: bool
    attention: str


def show_memory(settings: Settings, *, as_json: bool, explain: bool) -> None:
    """Print what a rank holds, as a table or as JSON.

    Raises:
        ValueError: There is no such model, or it cannot be trained so.
    """
    shape = shape_of(settings.model)
    job = Job(
        dp=settings.dp,
        tp=settings.tp,
        pp=settings.pp,
        zero=settings.zero,
        precision=settings.precision,
        batch=settings.batch,
        seq=shape.max_length if settings.seq is None else settings.seq,
        recompute=settings.recompute,
        has_scores=settings.attention == "eager",
    )
    report = report_of(shape, job)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        show(report, explain=explain)
