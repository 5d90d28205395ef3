"""Activation checkpointing (1604.06174): keep a block's input, run its forward again for the backward.

[Note: random states in recomputation]
The second forward must draw the same random numbers as the first, from the state of every parallel mode, and
must not affect later draws. torch's own checkpoint only restores the default generator, which holds the state
of one mode, and users' layers can draw from others; so its handling is switched off and a snapshot of all
modes is replayed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from colossalai.context import replay, snapshot
from colossalai.logging import get_dist_logger

_OUR_OWN = ("preserve_rng_state", "context_fn")


def checkpoint(
    function: Callable[..., Any], activation_offload: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Call `function(*args, **kwargs)` without keeping its activations; the backward computes them again.

    Args:
        function: A module or function of tensors.
        activation_offload: Also keep the input in host memory until the backward; no effect where it is there
            already.
        args: Arguments of `function`.
        kwargs: Keyword arguments of `function`, and torch's `use_reentrant`, of which only False has an
            effect, `determinism_check` and `debug`.

    Raises:
        ValueError: `function` cannot be called, `activation_offload` is not a bool, or a random state is
            selected, since all are restored.
    """
    if not callable(function):
        raise ValueError(f"checkpoint is given {function!r:.80}, which cannot be called: pass a module")
    if not isinstance(activation_offload, bool):
        raise ValueError(
            f"activation_offload is a {type(activation_offload).__name__}; it must be True or False: it "
            "comes between the function and its arguments, as in checkpoint(block, False, x)"
        )
    if refused := [name for name in _OUR_OWN if name in kwargs]:
        raise ValueError(f"checkpoint restores all random states by itself: leave {refused[0]} out")
    if kwargs.pop("use_reentrant", False):
        get_dist_logger().log_once(
            "checkpoint: use_reentrant=True has no effect; gradients are the same without", ranks=[0]
        )
    # A compiler would trace the contexts; inside of a compiled block the function runs uncompiled.
    run = torch.compiler.disable(_checkpoint) if torch.compiler.is_compiling() else _checkpoint
    return run(function, activation_offload, args, kwargs)


def _checkpoint(
    function: Callable[..., Any], activation_offload: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    offload = torch.autograd.graph.save_on_cpu() if activation_offload else nullcontext()
    with offload:
        return torch.utils.checkpoint.checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # see [Note: random states in recomputation]
            context_fn=_contexts,
            **kwargs,
        )


class CheckpointModule(nn.Module):
    """A base for modules whose activations are checkpointed while they train; subclasses define `_forward`.

    Args:
        checkpoint: Whether they are; in evaluation mode they are not.
        offload: Also keep the input in host memory until the backward.
    """

    def __init__(self, checkpoint: bool = True, offload: bool = False) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.offload = offload

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; replaces `forward`."""
        raise NotImplementedError(f"{type(self).__name__} is a CheckpointModule and must define _forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `_forward`."""
        if self.checkpoint and self.training:
            return checkpoint(self._forward, self.offload, *args, **kwargs)
        return self._forward(*args, **kwargs)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), replay(*snapshot())
