"""Cost of tests: what is counted, and the table by folder (tests/harness/costs.py, processor_time.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import processor_time
from tests.harness.costs import Cost, by_folder, table

pytestmark = pytest.mark.unit

BUSY = "import os\nwhile sum(os.times()[:2]) < 0.5: pass"
COSTS = {
    "tests/a/test_b.py::test_c[x/y]": Cost(1, 1.0, 0.5),
    "tests/a/d/test_e.py::test_f": Cost(1, 2.0, 0.25),
    "tests/test_g.py::test_h": Cost(1, 4.0, 3.0),
    "test_i.py::test_j": Cost(1, 0.0, 0.0),
}


def test_an_ended_child_counts() -> None:
    before = processor_time.processor_seconds()
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    assert processor_time.processor_seconds() - before >= 0.3


def test_a_counted_process_counts_while_it_lives_and_not_twice() -> None:
    before = processor_time.processor_seconds()
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{BUSY}\nprint('busy', flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    processor_time.count_process(child.pid)
    assert child.stdout is not None
    assert child.stdout.readline() == "busy\n"
    living = processor_time.processor_seconds()
    assert living - before >= 0.3
    child.communicate("\n")
    assert processor_time.processor_seconds() - before >= 0.3
    assert child.pid not in processor_time._counted  # among the ended children now


def test_folders_are_those_of_the_first_two_parts() -> None:
    assert by_folder(COSTS) == {
        "tests": Cost(1, 4.0, 3.0),
        "tests/a": Cost(2, 3.0, 0.75),
        ".": Cost(1, 0.0, 0.0),
    }
    assert list(by_folder(COSTS)) == ["tests", "tests/a", "."]  # the slowest first


def test_the_table() -> None:
    lines = list(table(COSTS, Cost(4, 6.0, 5.0), num_slowest=1))
    assert [line.split() for line in lines] == [
        ["tests", "wall", "s", "processor", "s"],
        ["tests", "1", "4", "3"],
        ["tests/a", "2", "3", "1"],
        [".", "1", "0", "0"],
        ["the", "run", "4", "6", "5"],
        ["the", "slowest", "tests,", "in", "processor", "seconds:"],
        ["3.0", "tests/test_g.py::test_h"],
    ]
    assert max(map(len, lines)) <= 80
