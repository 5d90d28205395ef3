"""The document that has the tables of verdicts."""

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/features/verdicts.md"

Rows = dict[str, dict[str, str]]
"""The cells of a table by row and column."""


def head(name: str, columns: Sequence[str]) -> str:
    """Return the first two lines of a table."""
    return f"| {' | '.join((name, *columns))} |\n{'| --- ' * (1 + len(columns))}|\n"


def read(name: str, columns: Sequence[str]) -> Rows:
    """Return the rows of a table of the document."""
    _, found, rest = PAGE.read_text().partition(head(name, columns))
    assert found, f"{PAGE} has no table of {name} with the columns {', '.join(columns)}"
    rows = (line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines())
    return {label: dict(zip(columns, cells, strict=True)) for label, *cells in rows}


def write(name: str, columns: Sequence[str], rows: Rows) -> None:
    """Put rows in the place of those that a table of the document has."""
    start = head(name, columns)
    before, found, rest = PAGE.read_text().partition(start)
    assert found, f"{PAGE} has no table of {name} with the columns {', '.join(columns)}"
    lines = [" | ".join((label, *(cells[each] for each in columns))) for label, cells in rows.items()]
    table = "".join(f"| {line} |\n" for line in lines)
    PAGE.write_text("".join((before, start, table, "\n", rest.partition("\n\n")[2])))
