"""Area under the receiver operating characteristic (AUROC)."""

import torch
from torch import Tensor


def auroc(scores: Tensor, labels: Tensor) -> float:
    """Return the probability that a positive sample has a higher score than a negative one.

    Exact: the rank-sum statistic of Mann and Whitney, where equal scores share their mean rank and so count
    as one half. NaN if all labels are equal.

    Args:
        scores: (samples,).
        labels: (samples,): 1 for a positive sample, 0 for a negative one.
    """
    _, groups, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum(0) - (counts - 1).double() / 2  # from 1, in order of the scores
    is_positive = labels > 0.5
    num_positive = int(is_positive.sum())
    num_pairs = num_positive * (len(labels) - num_positive)
    rank_sum = mean_ranks[groups[is_positive]].sum().item()
    return (rank_sum - num_positive * (num_positive + 1) / 2) / num_pairs if num_pairs else float("nan")
