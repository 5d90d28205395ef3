"""Several cases on the same ranks.

The start of ranks, and what a rank does the first time, cost more than most cases do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.core import global_context as gpc
from tests.ranks import run_ranks


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
    """Return (number of ranks, cells) for `parametrize`: all that `make test` runs together, others alone.

    Args:
        cells: Tuples, and what `further` returns for the long tier.
        ranks_of: Called with the values of a cell; returns how many ranks it needs.
    """
    together: dict[int, list[tuple[Any, ...]]] = {}
    alone = []
    for cell in cells:
        if isinstance(cell, tuple) and not hasattr(cell, "marks"):
            together.setdefault(ranks_of(*cell), []).append(cell)
        else:
            name = "-".join(map(_name, cell.values))
            alone.append(pytest.param(ranks_of(*cell.values), [cell.values], marks=cell.marks, id=name))
    groups = [pytest.param(num, group, id=f"{num} ranks") for num, group in sorted(together.items())]
    return groups + alone


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
