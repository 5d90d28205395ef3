"""`torch.nn.EmbeddingBag` and `torch.nn.Embedding` with a cached table."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.nn.layer.cached_embedding._slots import CacheOverflowError, EvictionStrategy
from colossalai.nn.layer.cached_embedding._table import CachedTable, CacheOptions

_MODES = ("sum", "mean", "max")


class CachedEmbeddingBag(CachedTable):
    """`torch.nn.EmbeddingBag` with its table in host memory and a cache of rows on the compute device.

    Weights and states of the optimizer move with their rows: after any number of steps the table has the
    bits of that of `torch.nn.EmbeddingBag(sparse=True)`, with SGD, Adagrad, SparseAdam and RowWiseAdagrad.
    Other optimizers, and weight decay or momentum, change every row of a table at each step and are refused
    at their first step.

    `state_dict()` is that of `torch.nn.EmbeddingBag`, and so are the states of the table in the optimizer's
    `state_dict()`; both load with any `cache_ratio`, and into torch.

    Args:
        num_embeddings: Number of rows of the table.
        embedding_dim: Width of a row.
        padding_idx: Id that does not contribute to a bag and has no gradient.
        max_norm: Refused; it would change rows in the forward.
        norm_type: The p of `max_norm`; without effect.
        scale_grad_by_freq: Whether a gradient is divided by how often its id is in the batch.
        sparse: Whether gradients are sparse: without it a step takes time for all rows of the cache.
        _weight: The table, used in place. Default: normal random values, those of torch.
        mode: Reduction of the rows of a bag: "sum", "mean" or "max".
        include_last_offset: Whether `offsets` ends with the number of ids.
        dtype: Data type of the table.
        device: Device of the cache.
        cache_ratio: Share of the rows that the cache holds, above 0 and up to 1.
        ids_freq_mapping: (num_embeddings,): how often each id is used. Default: the smaller, the more often.
        warmup_ratio: Share of the cache that is filled with the most frequent rows at once.
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
        pin_weight: Whether the table is in pinned memory. Default: where the cache is on an accelerator.
        evict_strategy: Order in which rows are evicted.
        weight_path: File of the table, in the format of safetensors under the name "weight". The table is
            trained in place and can be larger than the memory, with states of the optimizer in files of the
            same folder. An existing file keeps its values. Default: host memory.
        overflow: Effect of a batch with more distinct ids than the cache holds: "error", or "split" to
            compute it in parts where no gradient is needed.
        name: Name of the table in error messages.

    Raises:
        ValueError: An argument is out of range, the file has another table, or `max_norm` is given.
    """

    def __init__(  # noqa: PLR0913 - the documented options
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cache_ratio: float = 0.01,
        ids_freq_mapping: Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
        buffer_size: int = 0,
        pin_weight: bool | None = None,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        *,
        weight_path: str | Path | None = None,
        overflow: str = "error",
        name: str = "",
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, _MODES))}")
        if sparse and (mode == "max" or scale_grad_by_freq):
            option = "mode='max'" if mode == "max" else "scale_grad_by_freq"
            raise ValueError(f"{option} has no sparse gradients in torch: use sparse=False")
        if mode == "max" and scale_grad_by_freq:
            raise ValueError("scale_grad_by_freq needs mode='sum' or 'mean', as in torch: leave it out")
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            sparse=sparse,
            weight=_weight,
            weight_path=weight_path,
            dtype=dtype,
            device=device,
            options=CacheOptions(
                cache_ratio, ids_freq_mapping, warmup_ratio, buffer_size, pin_weight, evict_strategy, overflow
            ),
            name=name,
        )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        shape_hook: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Reduce the rows of each bag.

        Args:
            input: Ids: (bags, ids), or (ids,) with `offsets`.
            offsets: (bags,): where each bag begins.
            per_sample_weights: A factor for each id, of the shape of `input`; for mode "sum".
            shape_hook: Function of the output.

        Returns:
            (bags, embedding_dim).

        Raises:
            ValueError: An id is out of range.
            RuntimeError: The batch has more distinct ids than the cache holds.
        """
        output = self._reduce(input, offsets, per_sample_weights)
        return output if shape_hook is None else shape_hook(output)

    def _reduce(self, input: Tensor, offsets: Tensor | None, factors: Tensor | None) -> Tensor:
        reduce = partial(
            F.embedding_bag if not self.scale_grad_by_freq else _embedding_bag_scaled_by_counts,
            offsets=offsets,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=self._factors(factors, self.cache_weight_mgr.param.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=self._padding_slot,
        )
        try:
            return self._output(self._look_up(input, reduce))
        except CacheOverflowError as error:
            num_bags = len(input if offsets is None else offsets) - (
                offsets is not None and self.include_last_offset
            )
            self._check_split(error, has_parts=num_bags > 1, factors=factors)
            check_offsets(offsets, num_ids=len(input))
        return torch.cat(
            [self._reduce(*part) for part in self._halves(input, offsets, factors, num_bags // 2)]
        )

    def _halves(
        self, input: Tensor, offsets: Tensor | None, factors: Tensor | None, middle: int
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Yield the arguments of the bags before the one of number `middle`, and of the others."""
        cut = middle if offsets is None else int(offsets[middle])  # bags are rows, or runs of ids
        first, second = None, None
        if offsets is not None:
            first, second = offsets[: middle + self.include_last_offset], offsets[middle:] - cut
        yield input[:cut], first, None if factors is None else factors[:cut]
        yield input[cut:], second, None if factors is None else factors[cut:]

    def extra_repr(self) -> str:
        """Return the arguments in one line."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _embedding_bag_scaled_by_counts(slots: Tensor, cache: Tensor, **options: Any) -> Tensor:
    """Reduce rows, whose gradients are divided by how often they are in the batch.

    `embedding_bag(scale_grad_by_freq=True)` of torch 2.13 divides by counts of other rows on a CPU:
    https://github.com/pytorch/pytorch/issues/190063
    """
    counts = slots.flatten().bincount(minlength=len(cache)).clamp_(min=1)
    rows: Tensor = _DivideGradient.apply(cache, counts[:, None])
    return F.embedding_bag(slots, rows, **options)


class _DivideGradient(torch.autograd.Function):
    """A tensor as it is, and its gradient divided by another one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: Tensor) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None


FreqAwareEmbeddingBag = CachedEmbeddingBag
"""Older documented name of `CachedEmbeddingBag`."""


class CachedEmbedding(CachedTable):
    """`torch.nn.Embedding` with its table in host memory and a cache of rows on the compute device.

    Exact and stateful as `CachedEmbeddingBag` is.

    Args:
        num_embeddings: Number of rows of the table.
        embedding_dim: Width of a row.
        padding_idx: Id that has no gradient.
        max_norm: Refused; it would change rows in the forward.
        norm_type: The p of `max_norm`; without effect.
        scale_grad_by_freq: Whether a gradient is divided by how often its id is in the batch.
        sparse: Whether gradients are sparse: without it a step takes time for all rows of the cache.
        _weight: The table, used in place. Default: normal random values, those of torch.
        dtype: Data type of the table.
        device: Device of the cache.
        cache_ratio: Share of the rows that the cache holds, above 0 and up to 1.
        ids_freq_mapping: (num_embeddings,): how often each id is used. Default: the smaller, the more often.
        warmup_ratio: Share of the cache that is filled with the most frequent rows at once.
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
        pin_weight: Whether the table is in pinned memory. Default: where the cache is on an accelerator.
        evict_strategy: Order in which rows are evicted.
        weight_path: File of the table, in the format of safetensors under the name "weight". The table is
            trained in place and can be larger than the memory, with states of the optimizer in files of the
            same folder. An existing file keeps its values. Default: host memory.
        overflow: Effect of a batch with more distinct ids than the cache holds: "error", or "split" to
            compute it in parts where no gradient is needed.
        name: Name of the table in error messages.

    Raises:
        ValueError: An argument is out of range, the file has another table, or `max_norm` is given.
    """

    def __init__(  # noqa: PLR0913 - the documented options
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cache_ratio: float = 0.01,
        ids_freq_mapping: Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
        buffer_size: int = 0,
        pin_weight: bool | None = None,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        *,
        weight_path: str | Path | None = None,
        overflow: str = "error",
        name: str = "",
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            sparse=sparse,
            weight=_weight,
            weight_path=weight_path,
            dtype=dtype,
            device=device,
            options=CacheOptions(
                cache_ratio, ids_freq_mapping, warmup_ratio, buffer_size, pin_weight, evict_strategy, overflow
            ),
            name=name,
        )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids.

        Args:
            input: Ids of any shape.

        Returns:
            (*input.shape, embedding_dim).

        Raises:
            ValueError: An id is out of range.
            RuntimeError: The batch has more distinct ids than the cache holds.
        """
        gather = partial(
            F.embedding,
            padding_idx=self._padding_slot,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )
        try:
            return self._output(self._look_up(input, gather))
        except CacheOverflowError as error:
            self._check_split(error, has_parts=input.numel() > 1)
        halves = input.flatten().tensor_split(2)
        # Not by calling the module, whose hooks are for the whole input.
        return torch.cat([CachedEmbedding.forward(self, each) for each in halves]).view(*input.shape, -1)


def check_offsets(offsets: Tensor | None, *, num_ids: int) -> None:
    """Check that offsets are those of bags.

    Raises:
        ValueError: `offsets` do not rise from 0 to the number of ids.
    """
    if offsets is None:
        return
    ends = torch.cat([offsets[:1] * 0, offsets, offsets[:1] * 0 + num_ids])
    if offsets[0] != 0 or (ends.diff() < 0).any():
        raise ValueError(
            f"offsets must rise from 0 to at most the number of ids, {num_ids}, and are {offsets.tolist()}"
        )
