"""Several cases on the same ranks.

The start of ranks, and what a rank does the first time, cost more than most cases do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

MOST_TOGETHER = 8  # of a further tier: a cell that fails hides those after it


def in_turn(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call functions on this rank, each in a job of its own; return what they return.

    Args:
        calls: A function and its arguments each; it launches, and need not destroy.
    """
    found = []
    for function, *args in calls:
        torch.set_default_dtype(torch.float32)
        try:
            found.append(function(*args))
        except BaseException as error:
            error.add_note(f"in {function!r} of {args}")
            raise
        if gpc.is_launched or dist.is_initialized():
            gpc.destroy()
    torch.set_default_dtype(torch.float32)
    return found


def each_in_turn(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Call one function with the arguments of each case; see `in_turn`."""
    return in_turn([(function, *case) for case in cases])


def run_each(num_ranks: int, function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Run a function with the arguments of each case; return for each case what the ranks returned."""
    by_rank = run_ranks(each_in_turn, num_ranks, function, list(cases))
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def grouped(cells: Iterable[Any], ranks_of: Callable[..., int]) -> list[Any]:
    """Return (number of ranks, cells) for `parametrize`: cells of one tier that run together.

    Args:
        cells: Tuples, and what `further` and `in_soak` return for other tiers.
        ranks_of: Called with the values of a cell; returns how many ranks it needs.
    """
    together: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
    marks: dict[str, Any] = {}
    for cell in cells:
        values = getattr(cell, "values", cell)
        tier = _tier(own := getattr(cell, "marks", ()))
        marks[tier] = own
        together.setdefault((ranks_of(*values), tier), []).append(tuple(values))
    return [
        pytest.param(num, part, marks=marks[tier], id=" ".join(filter(None, (f"{num} ranks", tier, place))))
        for (num, tier), group in sorted(together.items())
        for place, part in _parts(group, MOST_TOGETHER if tier else len(group))
    ]


def _tier(marks: Collection[Any]) -> str:
    """Return the name of a tier other than `make test`."""
    names = {mark.name for mark in marks}
    return "soak" if "soak" in names else "long" if names else ""


def _parts(group: list[Any], most: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield parts of at most so many cells, each with its number if there are several."""
    starts = range(0, len(group), most)
    for number, start in enumerate(starts, 1):
        yield str(number) if len(starts) > 1 else "", group[start : start + most]
