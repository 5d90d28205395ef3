"""Protein families drawn from a seed, with known contacts: each family is a function of its index.

Contacts are in ladders, as those of helices and sheets: residue i + k touches j - k, or j + k. Residues in
contact are drawn jointly, by preferences of amino acids for each other that all families share; others
are drawn independently. The sequences of a family are nodes of a random tree: each is a copy of an earlier
one in which some pairs and residues are drawn again. So residues in contact mutate together; other residues
of relatives are alike, too, by common ancestry, as in real alignments.
"""

import numpy as np
import torch
from alignment import Alignment, make_alignment
from alphabet import RESIDUES
from torch.utils.data import Dataset

SEPARATION = 6  # least distance in the sequence of two residues in contact
LADDER = (2, 5)  # contacts of a ladder: 2 to 4
TOUCHING = 0.4  # least share of the residues in contact, in all but the shortest families
_TRIALS = 1000  # to place ladders


class SyntheticFamilies(Dataset[Alignment]):
    """Families `begin` to `begin + length` of the endless list of a seed.

    Args:
        length: Number of families.
        seed: Seed of preferences and families.
        begin: Index of the first family.
        lengths: Least and greatest number of residues.
        num_sequences: Number of sequences of an alignment.
        coupling: Strength of the preferences of residues in contact; 0 for independent ones.
        mutated: Share of pairs and residues that a sequence draws again.
        masked: Share of the positions that are masked.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        begin: int = 0,
        lengths: tuple[int, int],
        num_sequences: int,
        coupling: float = 2.0,
        mutated: float = 0.2,
        masked: float = 0.0,
    ) -> None:
        self.length, self.seed, self.begin = length, seed, begin
        self.lengths, self.num_sequences, self.mutated, self.masked = lengths, num_sequences, mutated, masked
        preferences = np.random.default_rng(seed).standard_normal((len(RESIDUES), len(RESIDUES)))
        weights = np.exp(coupling * (preferences + preferences.T) / 2**0.5).ravel()
        self._pair_probabilities = weights / weights.sum()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Alignment:
        if not 0 <= index < self.length:
            raise IndexError(f"family {index} of {self.length}")
        generator = np.random.default_rng([self.seed, self.begin + index])
        num_residues = int(generator.integers(self.lengths[0], self.lengths[1] + 1))
        pairs = draw_contacts(num_residues, generator)  # (contacts, 2)
        single = np.setdiff1d(np.arange(num_residues), pairs)
        letters = np.empty((self.num_sequences, num_residues), dtype=np.int64)
        for row in range(self.num_sequences):
            if row > 0:
                letters[row] = letters[generator.integers(row)]
            rate = self.mutated if row > 0 else 1.0
            drawn_pairs, drawn = (each[generator.random(len(each)) < rate] for each in (pairs, single))
            joint = generator.choice(len(RESIDUES) ** 2, len(drawn_pairs), p=self._pair_probabilities)
            letters[row, drawn_pairs] = np.stack(np.divmod(joint, len(RESIDUES)), 1)
            letters[row, drawn] = generator.integers(len(RESIDUES), size=len(drawn))
        contacts = torch.zeros(num_residues, num_residues)
        contacts[pairs[:, 0], pairs[:, 1]] = contacts[pairs[:, 1], pairs[:, 0]] = 1
        return make_alignment(torch.from_numpy(letters), contacts, masked=self.masked, generator=generator)


def draw_contacts(num_residues: int, generator: np.random.Generator) -> np.ndarray:
    """Draw ladders of contacts, (contacts, 2); each residue has at most one."""
    is_free = np.ones(num_residues, dtype=bool)
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for _ in range(_TRIALS):
        if is_free.mean() <= 1 - TOUCHING:
            break
        first, second = np.sort(generator.integers(num_residues, size=2))
        steps = np.arange(generator.integers(*LADDER))
        direction = generator.choice((-1, 1))
        ladder = np.stack([first + steps, second + direction * steps], 1)
        is_inside = ladder.max() < num_residues
        if is_inside and (ladder[:, 1] - ladder[:, 0]).min() >= SEPARATION and is_free[ladder].all():
            is_free[ladder] = False
            pairs.append(ladder)
    return np.concatenate(pairs)
