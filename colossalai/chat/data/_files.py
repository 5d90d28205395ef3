"""Rows of a data set with their places: JSON lists, JSON lines, parquet, and the cache of `datasets`.

Each row has a text with its place in the source ("data.jsonl:17"), for error messages. Lines end at line
feeds only: other line separators of Unicode may occur inside a JSON string. Nothing is downloaded.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PlacedRow = tuple[str, Any]
"""Place of a row, and the row as it was read."""

_PARQUET_MAGIC = b"PAR1"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".txt")


def read_rows(path: str | os.PathLike[str], subset: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a file, or of a data set in the cache of the library `datasets`.

    Raises:
        ValueError: `path` is a folder, is neither a file nor in the cache, cannot be decoded, or needs a
            library that is not installed; or it is a file, and there is a `subset`.
    """
    file = Path(path)
    if subset is not None and file.exists():
        raise ValueError(
            f"subset={subset!r} is for data sets in the cache of the library datasets, and {file} is a file: "
            "leave it out"
        )
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give one file of it (.json, .jsonl or .parquet)")
    if not file.exists():
        return _cached_rows(os.fspath(path), subset)
    with file.open("rb") as stream:
        is_parquet = stream.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
    return _parquet_rows(file) if is_parquet else _json_rows(file)


def numbered(rows: Iterable[Any], source: str = "") -> Iterator[PlacedRow]:
    """Yield rows with their indices in a list."""
    for number, row in enumerate(rows):
        yield f"{source}row {number} (the first is 0)", row


def _json_rows(file: Path) -> Iterator[PlacedRow]:
    text = _decode(file)
    if text.lstrip().startswith("["):
        yield from numbered(_parse(text, str(file), line=1), f"{file}, ")
        return
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield f"{file}:{line}", _parse(content, str(file), line=line)


def _decode(file: Path) -> str:
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}:{line}: this is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from error


def _parse(text: str, file: str, *, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{file}:{line + error.lineno - 1}"
        raise ValueError(
            f"{place}: no JSON at column {error.colno} ({error.msg}); a file is one list of rows, or has one "
            "row on each line"
        ) from error


def _parquet_rows(file: Path) -> Iterator[PlacedRow]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{file}: parquet files are read with pyarrow, which is not installed: pip install "
            '"colossalai[chat]", or pip install pyarrow'
        ) from error
    with parquet.ParquetFile(file) as table:
        rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
        yield from numbered(rows, f"{file}, ")


def _cached_rows(name: str, subset: str | None) -> Iterator[PlacedRow]:
    if name.endswith(_FILE_SUFFIXES) or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"{name}: there is no such file")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name}: there is no such file, and the cache of the library datasets cannot be read, as it is "
            "not installed: give a file, or pip install datasets"
        ) from error
    with _offline():
        try:
            rows = datasets.load_dataset(name, subset, split="train")
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            of_subset = "" if subset is None else f" and subset {subset!r}"
            raise ValueError(
                f"{name}: there is no such file, and the cache of the library datasets has no train split of "
                f"that name{of_subset}; nothing is downloaded here, so download it first or give a file"
            ) from error
    return numbered(rows, f"{name}, ")


@contextmanager
def _offline() -> Iterator[None]:
    """Disable all requests of the libraries `datasets` and `huggingface_hub`.

    They read the environment at import, so their own switches are set and restored.
    """
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
