"""The alphabet of alignments: 20 amino acids, unknown ones, gaps, and masked positions."""

import torch
from torch import Tensor

RESIDUES = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN, GAP, MASK = 20, 21, 22
NUM_LETTERS = 23

NAMES = {  # of residues in PDB files
    "ALA": "A", "ARG": "R", "ASN": "N", "ASP": "D", "CYS": "C", "GLN": "Q", "GLU": "E",
    "GLY": "G", "HIS": "H", "ILE": "I", "LEU": "L", "LYS": "K", "MET": "M", "PHE": "F",
    "PRO": "P", "SER": "S", "THR": "T", "TRP": "W", "TYR": "Y", "VAL": "V", "MSE": "M",
}  # fmt: skip
_INDICES = {letter: index for index, letter in enumerate(RESIDUES)} | {"-": GAP, ".": GAP}


def encode(sequence: str) -> Tensor:
    """Return the letters of an aligned sequence, (residues,); letters of no amino acid are `UNKNOWN`."""
    return torch.tensor([_INDICES.get(letter, UNKNOWN) for letter in sequence], dtype=torch.int64)
