"""Agreement of the ranks of a job: comparison of their arguments, and values computed by rank 0 for all."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from colossalai.auto_parallel.trace._fake_run import batch_of, check_model
from colossalai.cluster import broadcast_value, gather_values
from colossalai.runtime import parameter_shapes

_Plain = TypeVar("_Plain")


def refuse_other_arguments(call: str, check: Callable[[], Mapping[str, str]]) -> None:
    """Check the arguments of a call on each rank, and compare them; collective over the job, if there is one.

    Args:
        call: Name of the function.
        check: Raises where an argument of this rank is wrong, and returns all of them as text, by name.

    Raises:
        ValueError: `check` raises on another rank, or the ranks have different arguments.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        check()
        return
    try:
        given, refusal = dict(check()), ""
    except Exception as error:
        # The other ranks wait in the gather below: send them the error before it is raised here.
        gather_values(({}, str(error) or type(error).__name__))
        raise
    everywhere = gather_values((given, refusal))
    for rank, (_, refusal) in enumerate(everywhere):
        if refusal:
            raise ValueError(f"rank {rank} refused its arguments of {call}: {refusal}")
    for name, value in everywhere[0][0].items():
        for rank, (other, _) in enumerate(everywhere):
            if other[name] != value:
                raise ValueError(
                    f"the ranks call {call} with different arguments: {name} is {value} on rank 0 and "
                    f"{other[name]} on rank {rank}; give the same on all ranks"
                )


def described(model: nn.Module, meta_args: Mapping[str, Any]) -> dict[str, str]:
    """Return a text of a model and of each argument of its forward, which the ranks compare.

    Raises:
        ValueError: `model` is not a module, or `meta_args` not a mapping by names.
    """
    check_model(model)
    batch_of(meta_args)
    shapes = repr(sorted(parameter_shapes(model).items()))
    name = type(model).__name__
    return {
        "model": f"{name} with parameters {hashlib.sha256(shapes.encode()).hexdigest()[:8]}",
        "meta_args": str({name: tree_map(_described_leaf, value) for name, value in meta_args.items()}),
    }


def _described_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} of {tuple(leaf.shape)}"
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf).__name__


def broadcast_from_first(find: Callable[[], _Plain]) -> _Plain:
    """Return the plain value that `find` returns on rank 0, on all ranks; its errors are raised on all."""
    if torch.distributed.get_world_size() == 1:
        return find()
    message: tuple[list[_Plain], str] = [], ""
    if torch.distributed.get_rank() == 0:
        try:
            message = [find()], ""
        except Exception as error:
            broadcast_value(
                ([], str(error) or type(error).__name__), source=0
            )  # the other ranks wait in this broadcast
            raise
    found, refusal = broadcast_value(message, source=0)
    if refusal:
        raise ValueError(refusal)
    value: _Plain = found[0]
    return value
