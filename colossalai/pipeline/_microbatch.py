"""Batches cut into microbatches, and the outputs of microbatches put together again.

A batch is a tensor, or tuples, lists and dicts of tensors and other things. Tensors are cut along dim 0;
everything else goes to every microbatch as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with `function` applied to everything in it that is no container."""
    if isinstance(value, Mapping):
        parts = {key: map_leaves(function, part) for key, part in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its parts one by one
        return type(value)(*(map_leaves(function, part) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(function, part) for part in value)
    return function(value)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value with every tensor in it replaced by what `function` makes of it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def num_samples_in(batch: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        ValueError: There is no tensor in it that could be cut, or they differ in their first extent.
    """
    sizes = {place: tensor.shape[0] for place, tensor in _named_tensors(batch) if tensor.ndim}
    if not sizes:
        raise ValueError(
            f"there is no tensor to cut into microbatches in a batch of type {type(batch).__name__}"
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{place}: {size}" for place, size in sizes.items())
        raise ValueError(f"the tensors of a batch differ in their number of samples (dim 0): {found}")
    return next(iter(sizes.values()))


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into microbatches of equal size; the last one may be smaller.

    Args:
        batch: A tensor, or nested tuples, lists and dicts; what is no tensor, or a tensor without dimensions,
            goes to every microbatch.
        num_microbatches: The most parts; they have ceil(samples / num_microbatches) samples.

    Returns:
        The microbatches; fewer than asked for if so many are enough to hold all samples.

    Raises:
        ValueError: There are fewer samples than microbatches, or tensors of different numbers of samples.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; it must be at least 1")
    num_samples = num_samples_in(batch)
    if num_samples < num_microbatches:
        raise ValueError(
            f"a batch of {num_samples} samples cannot be cut into {num_microbatches} microbatches: "
            "take a larger batch or fewer microbatches"
        )
    size = -(-num_samples // num_microbatches)
    return [_slice(batch, start, start + size) for start in range(0, num_samples, size)]


def microbatch_weights(microbatches: Sequence[Any]) -> list[float]:
    """Return the share of each microbatch in the samples of all.

    With them, means over the microbatches add up to the mean over the batch.
    """
    sizes = [num_samples_in(microbatch) for microbatch in microbatches]
    return [size / sum(sizes) for size in sizes]


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Put the outputs of microbatches together.

    Args:
        outputs: Nested values of one structure. Tensors are concatenated along dim 0, those without
            dimensions are averaged; of everything else the first one is taken.
        weights: Of each microbatch, for the average.
    """
    parts = [tensors_in(output) for output in outputs]
    merged = iter([_merge(tensors, weights) for tensors in zip(*parts, strict=True)])
    return map_tensors(lambda _: next(merged), outputs[0])


def _merge(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    if tensors[0].ndim:
        return torch.cat(list(tensors))
    return torch.stack([tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]).sum(0)


def _slice(batch: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.ndim else tensor, batch)


def _named_tensors(value: Any, place: str = "batch") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(place, value)]
    if isinstance(value, Mapping):
        parts = [(f"{place}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"{place}[{index}]", part) for index, part in enumerate(value)]
    else:
        return []
    return [named for part_place, part in parts for named in _named_tensors(part, part_place)]
