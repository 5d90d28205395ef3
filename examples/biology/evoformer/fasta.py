"""Sequences to fold, of FASTA and A3M files."""

from collections.abc import Sequence
from pathlib import Path

from a3m import read_a3m, read_records


def read_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return the sequences of several files by their names.

    Raises:
        ValueError: Two files have a sequence of the same name.
    """
    sequences: dict[str, str] = {}
    for path in paths:
        found = read_sequences(path)
        if common := found.keys() & sequences.keys():
            raise ValueError(
                f"{path} has {min(common)!r}, as a file before; each structure needs its own name"
            )
        sequences.update(found)
    return sequences


def read_sequences(path: Path) -> dict[str, str]:
    """Return the sequences of a file by their names.

    A FASTA file has one or more, named by the first word of their lines. An A3M file (`.a3m`) has one: its
    query, named as the file. Chains of a complex are separated by ':'.

    Raises:
        ValueError: The file has no sequence, or a name twice, or characters that are not letters, or
            text before its first name.
    """
    if path.suffix == ".a3m":
        return {path.stem: read_a3m(path)[0].replace("-", "")}
    sequences: dict[str, str] = {}
    for title, letters in read_records(path):
        name, sequence = (title.split() or [""])[0].replace("/", "_"), letters.upper()
        if not name or name in sequences:
            raise ValueError(f"{path} has {f'{name!r} twice' if name else 'a sequence without a name'}")
        if not all(chain.isalpha() for chain in sequence.split(":")):
            raise ValueError(f"{path}: {name!r} is not a sequence of letters, or of chains separated by ':'")
        sequences[name] = sequence
    if not sequences:
        raise ValueError(f"{path} has no sequence in FASTA format: lines of a name, '>NAME', and its letters")
    return sequences
