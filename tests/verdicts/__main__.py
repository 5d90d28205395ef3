"""Run all cells of the tables and write their verdicts into the document: `python -m tests.verdicts`."""

from collections.abc import Callable, Iterable, Sequence

from tests.turns import run_each
from tests.verdicts import families, optimizers, page


def run_rows(columns: Sequence[str], labels: Iterable[str], run: Callable[[str, str], str]) -> page.Rows:
    """Return the verdicts of the cells of a table, which run on two ranks, a row at a time."""
    rows: page.Rows = {}
    for label in labels:
        found = run_each(2, run, [(column, label) for column in columns])
        assert all(len(set(of_ranks)) == 1 for of_ranks in found), (label, found)
        rows[label] = dict(zip(columns, (of_ranks[0] for of_ranks in found), strict=True))
        print(label, *rows[label].values(), sep=" | ", flush=True)
    return rows


def main() -> None:
    """Write both tables."""
    rows = run_rows(families.COLUMNS, families.FAMILIES, families.run)
    for label, family in families.FAMILIES.items():
        rows[label]["cut by"] = families.cut_by(family.build())
    page.write("family", ("cut by", *families.COLUMNS), rows)
    rows = run_rows(optimizers.COLUMNS, optimizers.OPTIMIZERS, optimizers.run)
    page.write("optimizer", optimizers.COLUMNS, rows)


if __name__ == "__main__":
    main()
