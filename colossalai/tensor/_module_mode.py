"""Evaluation mode for a block of code: each module of a model gets its own mode back.

`model.train(was_training)` after `model.eval()` sets one mode for all modules, and so unfreezes a batch norm
that the user had put in evaluation mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model in evaluation mode within the block, and restore the mode of each after it.

    Args:
        model: The model. Its modules may override `train`: modes are set by calling it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # also of modules that were added in the block
        # `modules` yields a module before its children, and `train` sets both: children are corrected next.
        for module, was_training in modes:
            if module.training != was_training:
                module.train(was_training)
        for module, was_training in modes:
            if module.training != was_training:  # a child of two modules with different modes
                module.training = was_training
