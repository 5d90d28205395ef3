"""The cross-entropy loss under the package's own name, the home of the parallel variants to come."""

from torch import nn

from colossalai.registry import LOSSES


@LOSSES.register_module
class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Cross-entropy of logits and labels: `torch.nn.CrossEntropyLoss` with all its arguments."""
