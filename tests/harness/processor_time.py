"""Processor time of tests: a plugin of pytest that notes it in the report of each phase of a test.

Counted are the process, its ended descendants, and the processes that `count_process` names with theirs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import psutil
import pytest

_counted: dict[int, psutil.Process] = {}
_last = [0.0]


def count_process(pid: int) -> None:
    """Have a child process that outlives single tests counted, with its ended descendants."""
    with contextlib.suppress(psutil.Error):
        _counted[pid] = psutil.Process(pid)


def processor_seconds() -> float:
    """Return the processor seconds of this process, of what it counts, and of their ended descendants."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for pid, process in list(_counted.items()):
        try:
            spent = process.cpu_times()
        except psutil.Error:
            del _counted[pid]  # it has ended: it is among the children now
            continue
        total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the processor seconds since the last report."""
    report = yield
    now = processor_seconds()
    report.processor_s = max(0.0, now - _last[0])
    _last[0] = now
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to count: imports and collection belong to no test."""
    _last[0] = processor_seconds()
