"""Text for the GPT example: find it, and cut it into blocks to train and to validate on.

Text is cut into contiguous blocks of whole lines; each `VALIDATION_STRIDE`-th block is for validation.
"""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

BLOCK_CHARS = 1 << 16
VALIDATION_STRIDE = 20
VALIDATION_OFFSET = 5  # below 10: even blocks of nearly twice the size reach this one

# Folders of the standard library that are tests, tables, generated text, or not the library's own.
NOISE = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "distutils", "ensurepip"})
NOISE |= {"encodings", "pydoc_data", "site-packages", "dist-packages"}


def read_texts(source: Path | None) -> list[str]:
    """Read the documents, in an order that depends only on their names.

    Args:
        source: A .txt or .jsonl file, a folder of them, or None for the source of Python's standard library.

    Raises:
        ValueError: There is no such file, no text in it, or a line of a .jsonl file has no field `text`.
    """
    if source is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(
            path for path in folder.rglob("*.py") if NOISE.isdisjoint(path.relative_to(folder).parts)
        )
        if not files:
            raise ValueError(f"no *.py in {folder}, this Python has no library source: pass --data PATH")
    elif source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.suffix in (".txt", ".jsonl"))
        if not files:
            raise ValueError(f"no *.txt or *.jsonl in {source}: pass a folder that has some, or one file")
    elif source.is_file() and source.suffix in (".txt", ".jsonl"):
        files = [source]
    else:
        raise ValueError(f"--data {source}: a .txt file, a .jsonl file or a folder of them is needed")
    return [text for path in files for text in _read_file(path) if text]


def split_blocks(text: str) -> tuple[list[str], list[str]]:
    """Cut a text into contiguous blocks that end with a line and return (training, validation) blocks.

    A text without line ends is cut anywhere. Together the blocks are the text, none overlaps another.
    """
    blocks = list(_blocks(text, size=min(BLOCK_CHARS, len(text) // VALIDATION_STRIDE)))
    validation = blocks[VALIDATION_OFFSET::VALIDATION_STRIDE]
    training = [block for index, block in enumerate(blocks) if index % VALIDATION_STRIDE != VALIDATION_OFFSET]
    return training, validation


def _blocks(text: str, *, size: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + size, start + 2 * size)
        stop = start + size if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _read_file(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _text_field(line, where=f"{path}:{number}")


def _text_field(line: str, *, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON line: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{where}: each line must be an object with a string in its field "text"')
    return record["text"]
