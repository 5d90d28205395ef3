"""Activation checkpointing (1604.06174): keep a block's input, run its forward again for the backward.

[Note: random states in recomputation]
The second forward must draw the same random numbers as the first, from the state of every parallel mode, and
must not disturb what is drawn after it. torch's own checkpoint only restores the default generator, which
holds the state of one mode; so its handling is switched off and a snapshot of all modes is replayed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from colossalai.context._random import replay, snapshot
from colossalai.pipeline import ChunkList, PartOfStack


def checkpoint(
    function: Callable[..., Any], activation_offload: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Call `function(*args, **kwargs)` without keeping its activations; the backward computes them again.

    Args:
        function: A module or function of tensors.
        activation_offload: Also keep the input in host memory until the backward; no effect where it is there
            already.
        args: Arguments of `function`.
        kwargs: Keyword arguments of `function`.
    """
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


def apply_recompute(module: nn.Module, select: bool | Sequence[str]) -> nn.Module:
    """Checkpoint parts of a module, in place; names of parameters do not change.

    Args:
        module: The module.
        select: True for its blocks (see `find_blocks`), or names of sub-modules.

    Raises:
        ValueError: A name is not a sub-module, or the module has no blocks.
    """
    if not select:
        return module
    if select is True:
        chosen = find_blocks(module)
        if not chosen:
            raise ValueError(
                "recompute=True finds no stack of blocks (nn.ModuleList or nn.Sequential): name sub-modules"
            )
    else:
        chosen = [_submodule(module, name) for name in select]
    for part in chosen:
        part.forward = partial(checkpoint, part.forward, False)
    return module


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: members of its outermost stacks of modules of one class."""
    members = list(dict.fromkeys(module.children()))
    if isinstance(module, PartOfStack):
        return members
    is_stack = isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1
    is_stack = is_stack and not isinstance(module, ChunkList)
    if is_stack and len({type(member) for member in members}) == 1 and _has_params(members[0]):
        return members
    return [block for member in members for block in find_blocks(member)]


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = [known for known, _ in module.named_modules() if known]
        raise ValueError(
            f"recompute names {name!r}, which is not a sub-module; there are {names[:20]}"
        ) from None


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), replay(*snapshot())
