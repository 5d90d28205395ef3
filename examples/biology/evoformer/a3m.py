"""Folders of alignments and structures: NAME.a3m with NAME.pdb.

Residues whose CB atoms (CA of glycine) are less than 8 A apart are in contact, as usual in the literature.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from alignment import Alignment, make_alignment
from alphabet import NAMES, encode
from torch import Tensor
from torch.utils.data import Dataset

CONTACT_DISTANCE = 8.0  # in A


class A3MFamilies(Dataset[Alignment]):
    """Samples of the alignments of a folder: each has other sequences and, of a long protein, other residues.

    Sample k is a function of k: each pass over the files has an order of its own.

    Args:
        files: Alignments, each with a PDB file of the same name.
        length: Number of samples.
        seed: Seed of orders, sequences, residues and masked positions.
        num_sequences: Greatest number of sequences of a sample: the query and random ones.
        crop: Greatest number of residues of a sample: neighbours in the sequence.
        masked: Share of the positions that are masked.
    """

    def __init__(
        self, files: list[Path], length: int, *, seed: int, num_sequences: int, crop: int, masked: float = 0.0
    ) -> None:
        self.files, self.length, self.seed = files, length, seed
        self.num_sequences, self.crop, self.masked = num_sequences, crop, masked

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Alignment:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        turn, place = divmod(index, len(self.files))
        order = np.random.default_rng([self.seed, turn]).permutation(len(self.files))
        generator = np.random.default_rng([self.seed, turn, place])
        path = self.files[order[place]]
        sequences = read_a3m(path)
        query = sequences[0]
        contacts = read_contacts(path.with_suffix(".pdb"), query)
        others = 1 + generator.permutation(len(sequences) - 1)[: self.num_sequences - 1]
        begin = int(generator.integers(max(len(query) - self.crop, 0) + 1))
        part = slice(begin, begin + self.crop)
        rows = torch.stack([encode(sequences[index][part]) for index in (0, *np.sort(others))])
        return make_alignment(rows, contacts[part, part], masked=self.masked, generator=generator)


def find_files(folder: Path) -> list[Path]:
    """Return the alignments of a folder that have a structure.

    Raises:
        FileNotFoundError: `folder` does not exist, or has fewer than two of them.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"--data {folder}: there is no such folder")
    files = [path for path in sorted(folder.glob("*.a3m")) if path.with_suffix(".pdb").exists()]
    if len(files) < 2:
        raise FileNotFoundError(
            f"--data {folder}: {len(files)} pairs of files NAME.a3m and NAME.pdb were found; at least two "
            "are needed, one of them to evaluate on"
        )
    return files


def read_a3m(path: Path) -> list[str]:
    """Return the aligned sequences of a file, without insertions, which are lower case letters.

    Raises:
        ValueError: The file has no sequence, or sequences of several lengths.
    """
    sequences = [
        "".join(letter for letter in letters if not letter.islower()) for _, letters in read_records(path)
    ]
    if not sequences or not sequences[0]:
        raise ValueError(f"{path} has no sequence in A3M format: lines of a name, '>NAME', and its letters")
    for number, sequence in enumerate(sequences, 1):
        if len(sequence) != len(sequences[0]):
            raise ValueError(
                f"{path}, sequence {number} has {len(sequence)} aligned residues; the first one has "
                f"{len(sequences[0])}"
            )
    return sequences


def read_records(path: Path) -> list[tuple[str, str]]:
    """Return the lines of names and the letters of a file in FASTA or A3M format.

    Lines before the first name that begin with '#' are comments; zero bytes end blocks of ColabFold's files.

    Raises:
        ValueError: Other text is before the first name.
    """
    text = path.read_text(encoding="utf-8-sig").replace("\0", "")
    head, *records = f"\n{text}".split("\n>")
    if records and any(line.strip() and not line.startswith("#") for line in head.splitlines()):
        raise ValueError(f"{path} has letters before its first line of a name, '>NAME'")
    split = [record.partition("\n") for record in records]
    return [(title.strip(), "".join(letters.split()).rstrip("*")) for title, _, letters in split]


def read_contacts(path: Path, query: str) -> Tensor:
    """Return the contacts of the first chain of a PDB file, (residues, residues); NaN for missing atoms.

    Numbers of residues in the file may begin anywhere: they are shifted so that all names agree with `query`.

    Raises:
        ValueError: The residues of the file are not those of `query`.
    """
    atoms = read_atoms(path)
    shift = find_shift({number: letter for number, (letter, _) in atoms.items()}, query, path)
    positions = torch.full((len(query), 3), float("nan"))
    for number, (_, position) in atoms.items():
        positions[number + shift] = torch.tensor(position)
    distances = (positions[:, None] - positions).norm(dim=-1)
    return torch.where(distances.isnan(), distances, (distances < CONTACT_DISTANCE).float())


def read_atoms(path: Path) -> dict[int, tuple[str, list[float]]]:
    """Return number, letter and position of the CB (CA of glycine) of each residue of the first chain.

    Raises:
        ValueError: The file has no amino acid, or a line in another format.
    """
    atoms: dict[int, tuple[str, list[float]]] = {}
    chain = None
    for row, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if line.startswith(("ENDMDL", "TER")) and atoms:
            break
        name, residue = line[12:16].strip(), line[17:20]
        if not line.startswith(("ATOM", "HETATM")) or residue not in NAMES:
            continue
        if name != ("CA" if residue == "GLY" else "CB") or line[26:27] != " ":  # inserted residues
            continue
        chain = chain or line[21]
        if line[21] != chain:
            continue
        try:
            number, position = int(line[22:26]), [float(line[begin : begin + 8]) for begin in (30, 38, 46)]
        except ValueError:
            raise ValueError(f"{path}, line {row} is not an atom in PDB format: {line.strip()!r}") from None
        atoms.setdefault(number, (NAMES[residue], position))  # of several positions the first
    if not atoms:
        raise ValueError(f"{path} has no amino acids in PDB format")
    return atoms


def find_shift(letters: Mapping[int, str], query: str, path: Path) -> int:
    """Return the number to add to the numbers of residues for their indices in `query`.

    Raises:
        ValueError: The residues fit nowhere, or in several places.
    """
    shifts = [
        shift
        for shift in range(-min(letters), len(query) - max(letters))
        if all(query[number + shift] in (letter, "X") for number, letter in letters.items())
    ]
    if -1 in shifts or len(shifts) == 1:
        return -1 if -1 in shifts else shifts[0]  # the numbers of the query, which begin with 1
    if shifts:
        raise ValueError(
            f"{path} fits in {len(shifts)} places of its query: number its residues as the query"
        )
    chain = "".join(letters[number] for number in sorted(letters))
    raise ValueError(
        f"{path} has other residues than the query of its alignment:\n  {chain}\n  {query}\n"
        "the first chain must be a part of the query, with its gaps in the numbers of residues"
    )
