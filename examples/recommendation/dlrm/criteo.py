"""Click logs in the format of Criteo: label, 13 integers, 26 categories, separated by tabs."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from data import Clicks
from torch.utils.data import Dataset

NUM_DENSE, NUM_TABLES = 13, 26
NUM_COLUMNS = 1 + NUM_DENSE + NUM_TABLES


class CriteoClicks(Dataset[Clicks]):
    """Lines of a file, which are read and decoded when they are used; memory holds where each line begins.

    An integer x becomes log(1 + x), and 0 if it is empty or negative. A category becomes a row of its table
    by its CRC-32, which is the same on all machines; row 0 is that of empty fields.

    Args:
        path: The file.
        table_sizes: Number of rows of each table.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: `table_sizes` has another length than 26, or a line another number of columns than 40.
    """

    def __init__(self, path: Path, table_sizes: Sequence[int]) -> None:
        if len(table_sizes) != NUM_TABLES:
            raise ValueError(
                f"TABLE_SIZES has {len(table_sizes)} tables, and {path} has {NUM_TABLES} categories: take "
                "--config examples/recommendation/dlrm/configs/criteo.py"
            )
        self.path, self.table_sizes = path, table_sizes
        if not path.is_file():
            raise FileNotFoundError(f"--data {path}: there is no such file")
        lengths = []
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                num_columns = line.count(b"\t") + 1
                if num_columns != NUM_COLUMNS:
                    raise ValueError(
                        f"{path}, line {number} has {num_columns} columns; a line has {NUM_COLUMNS}: label, "
                        f"{NUM_DENSE} integers and {NUM_TABLES} categories, separated by tabs"
                    )
                lengths.append(len(line))
        self._begins = np.cumsum([0, *lengths])

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, index: int) -> Clicks:
        return Clicks(*(each[0] for each in self.__getitems__([index])))

    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        """Return a batch; the DataLoader of torch calls it."""
        labels, dense, ids = [], [], []
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self._begins[index])
                label, *fields = file.readline().rstrip(b"\r\n").split(b"\t")
                labels.append(float(label))
                dense.append([max(float(field or 0), 0.0) for field in fields[:NUM_DENSE]])
                ids.append(list(map(row_of, fields[NUM_DENSE:], range(NUM_TABLES), self.table_sizes)))
        return Clicks(
            torch.tensor(dense).log1p(),
            torch.tensor(ids),
            torch.tensor(labels),
            torch.full((len(labels),), torch.nan, dtype=torch.float64),
        )


def row_of(category: bytes, table: int, size: int) -> int:
    """Return the row of a category in a table of `size` rows."""
    return 1 + zlib.crc32(category, table) % (size - 1) if category else 0
