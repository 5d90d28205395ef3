"""The last layer of a model."""

from typing import Any

import torch
from torch import nn

from colossalai.nn.layer import Classifier, Cut, Linear, launched_job


def output_layer(
    in_features: int,
    num_classes: int,
    *,
    bias: bool = True,
    dtype: torch.dtype | None = None,
    vocab_parallel_limit: int | None = None,
    input_cut: Cut | None = None,
) -> nn.Module:
    """Return the classifier of the current mode, a plain linear layer where nothing is cut.

    It always draws its own weight, even if it is to share another one: so the same numbers are drawn in all
    modes, and later parameters have the same initial values.

    Args:
        in_features: Global size of the features.
        num_classes: Number of classes.
        bias: Whether to add a bias.
        dtype: Type of the parameters; None for torch's default.
        vocab_parallel_limit: More classes than this are cut over the ranks; None for the limit of the layers.
        input_cut: Cut of the input. Default: the output cut of the layer built before.
    """
    if launched_job().mode is None:
        return Linear(in_features, num_classes, bias, dtype=dtype, input_cut=input_cut)
    options = vocab_options(vocab_parallel_limit)
    return Classifier(in_features, num_classes, bias=bias, dtype=dtype, input_cut=input_cut, **options)


def vocab_options(limit: int | None) -> dict[str, Any]:
    """Return the options of an embedding or a classifier; none leaves the layers their own limit."""
    return {} if limit is None else {"vocab_parallel_limit": limit}
