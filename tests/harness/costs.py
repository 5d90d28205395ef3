"""Cost of tests: their wall time and the processor time of their processes, by folder.

On a busy machine the wall time of a test is that of its neighbors; its processor time hardly changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a test or several tests took.

    Attributes:
        num_tests: Number of tests.
        wall_s: Seconds from begin to end, added up over tests that ran side by side.
        processor_s: Processor seconds.
    """

    num_tests: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.num_tests + other.num_tests,
            self.wall_s + other.wall_s,
            self.processor_s + other.processor_s,
        )


def by_folder(costs: Mapping[str, Cost], num_parts: int = 2) -> dict[str, Cost]:
    """Add up the costs of tests by the first parts of their paths, the slowest folder first.

    Args:
        costs: Of each test, by node id.
        num_parts: How many parts of a path name a folder.
    """
    folders: dict[str, Cost] = defaultdict(Cost)
    for name, cost in costs.items():
        folders["/".join(name.partition("::")[0].split("/")[:-1][:num_parts]) or "."] += cost
    return dict(sorted(folders.items(), key=lambda item: -item[1].processor_s))


def table(costs: Mapping[str, Cost], whole: Cost, num_slowest: int = 10) -> Iterable[str]:
    """Return the lines of a table: folders, the run as a whole, the slowest tests.

    Args:
        costs: Of each test, by node id.
        whole: Of the run; its processor time has the imports and the collection, too.
        num_slowest: How many tests are named.
    """
    row = "{:<48} {:>6} {:>9} {:>11}".format
    yield row("", "tests", "wall s", "processor s")
    for folder, cost in by_folder(costs).items():
        yield row(folder, cost.num_tests, f"{cost.wall_s:.0f}", f"{cost.processor_s:.0f}")
    yield row("the run", whole.num_tests, f"{whole.wall_s:.0f}", f"{whole.processor_s:.0f}")
    slowest = sorted(costs.items(), key=lambda item: -item[1].processor_s)[:num_slowest]
    if slowest:
        yield "the slowest tests, in processor seconds:"
    for name, cost in slowest:
        yield f"{cost.processor_s:6.1f}  {name}"
