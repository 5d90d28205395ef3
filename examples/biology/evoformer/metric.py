"""Precision of predicted contacts, and mutual information as the method to compare with."""

import torch
from alphabet import NUM_LETTERS
from data import SEPARATION
from torch import Tensor


def precision(scores: Tensor, contacts: Tensor, *, num_residues: int) -> float:
    """Return the share of contacts among the pairs with the highest scores, one for five residues.

    This is P@L/5 of the literature, for pairs that are at least 6 residues apart. Pairs of unknown contact
    are left out; NaN if no pair is left.

    Args:
        scores: (residues, residues), symmetric.
        contacts: (residues, residues), NaN where unknown.
        num_residues: Number of residues without padding.
    """
    first, second = torch.triu_indices(num_residues, num_residues, SEPARATION, device=scores.device)
    labels, values = contacts[first, second], scores[first, second]
    is_known = ~labels.isnan()
    labels, values = labels[is_known], values[is_known]
    best = values.topk(min(max(num_residues // 5, 1), len(values))).indices
    return labels[best].mean().item()


def mutual_information(letters: Tensor) -> Tensor:
    """Return the mutual information of the columns of an alignment, less the background of each column.

    The average product correction (Dunn, Wahl and Gloor, Bioinformatics 24, 2008) subtracts the product of
    the means of both columns over the mean of all, which common ancestry raises.

    Args:
        letters: (sequences, residues), int64.

    Returns:
        (residues, residues), float64.
    """
    columns = torch.nn.functional.one_hot(letters, NUM_LETTERS).double()  # (sequences, residues, letters)
    single = columns.mean(0)
    joint = torch.einsum("sia,sjb->ijab", columns, columns) / len(letters)
    independent = torch.einsum("ia,jb->ijab", single, single)
    information = torch.special.xlogy(joint, joint / independent).nan_to_num(0.0).sum((2, 3))
    information.fill_diagonal_(0)
    means = information.sum(1) / max(len(information) - 1, 1)
    return information - means[:, None] * means / means.mean().clamp(min=1e-12)
