"""Losses of contacts and of masked letters."""

import torch
from alignment import Alignment
from data import SEPARATION
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


def contact_loss(logits: Tensor, contacts: Tensor) -> Tensor:
    """Return the binary cross entropy of known pairs, at least `SEPARATION` apart, as a mean over families.

    Args:
        logits: (batch, residues, residues).
        contacts: (batch, residues, residues), NaN where unknown.
    """
    first, second = torch.triu_indices(*contacts.shape[1:], SEPARATION, device=contacts.device)
    labels = contacts[:, first, second]  # (batch, pairs)
    is_known = ~labels.isnan()
    losses = binary_cross_entropy_with_logits(
        logits[:, first, second].float(), labels.nan_to_num(0.0), reduction="none"
    )
    return mean_of_families(losses, is_known)


def letter_loss(logits: Tensor, batch: Alignment) -> Tensor:
    """Return the cross entropy of masked letters, as a mean over families.

    Args:
        logits: (batch, clusters, residues, letters).
        batch: The batch.
    """
    num_clusters = logits.shape[1]
    letters = batch.letters[:, :num_clusters]
    is_masked = batch.inputs[:, :num_clusters] != letters
    losses = cross_entropy(logits.float().movedim(-1, 1), letters, reduction="none")
    return mean_of_families(losses.flatten(1), is_masked.flatten(1))


def mean_of_families(losses: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over families of their means over counted losses; 0 for a family without any."""
    return ((losses * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()
