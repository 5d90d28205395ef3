"""Alignments with their contacts, masked positions, and batches of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from alphabet import GAP, MASK
from torch import Tensor


class Alignment(NamedTuple):
    """An alignment, or a padded batch of alignments with a first dimension for them.

    Attributes:
        inputs: (sequences, residues), int64: letters for the model. The first sequence is the query.
        letters: The same without masked positions.
        exists: (sequences, residues), bool: False for padding.
        contacts: (residues, residues), float32: 1 for residues in contact, NaN where it is unknown.
    """

    inputs: Tensor
    letters: Tensor
    exists: Tensor
    contacts: Tensor


def make_alignment(
    letters: Tensor, contacts: Tensor, *, masked: float, generator: np.random.Generator
) -> Alignment:
    """Return an alignment in which a share of the positions is masked."""
    is_masked = torch.from_numpy(generator.random(letters.shape) < masked)
    exists = torch.ones(letters.shape, dtype=torch.bool)
    return Alignment(letters.masked_fill(is_masked, MASK), letters, exists, contacts)


def collate(alignments: Sequence[Alignment], *, num_sequences: int) -> Alignment:
    """Pad alignments to `num_sequences` sequences and to the length of the longest one, as a batch."""
    length = max(each.letters.shape[1] for each in alignments)
    shape = (len(alignments), num_sequences, length)
    inputs, letters = torch.full(shape, GAP), torch.full(shape, GAP)
    exists = torch.zeros(shape, dtype=torch.bool)
    contacts = torch.full((len(alignments), length, length), float("nan"))
    for index, each in enumerate(alignments):
        rows, columns = each.letters.shape
        for whole, part in ((inputs, each.inputs), (letters, each.letters), (exists, each.exists)):
            whole[index, :rows, :columns] = part
        contacts[index, :columns, :columns] = each.contacts
    return Alignment(inputs, letters, exists, contacts)
