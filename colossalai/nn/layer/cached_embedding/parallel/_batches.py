"""Batches whose parts are on several ranks: each rank sends its bags to the ranks that look them up.

[Note: local batches]
With `local_batches=True` a rank is given the ids of its part of the batch. It sends each rank the bags for
that rank's columns or tables, which looks them up as if it had been given the whole batch ([Note: batches of
several ranks]). The loss of a rank depends on its own factors alone, so their gradient is that of this loss,
as under `DistributedDataParallel`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossalai.communication import exchange, exchange_pieces
from colossalai.context import Axis
from colossalai.nn.layer.cached_embedding._bag import check_offsets
from colossalai.nn.layer.cached_embedding.parallel._exchange import agree

_OVER, _READY = 0, 1


class RankBags(NamedTuple):
    """Bags that a rank sends to another one.

    Attributes:
        lengths: (bags,): the number of ids of each.
        ids: (ids,): ids of all bags.
        factors: (ids,): a factor for each id.
    """

    lengths: Tensor
    ids: Tensor
    factors: Tensor | None

    @staticmethod
    def of(ids: Tensor, offsets: Tensor | None, factors: Tensor | None, *, has_last: bool) -> "RankBags":
        """Return the bags of a batch.

        Args:
            ids: (bags, ids), or (ids,) with `offsets`.
            offsets: (bags,): where each bag begins.
            factors: A factor for each id, of the shape of `ids`.
            has_last: Whether `offsets` ends with the number of ids.

        Raises:
            ValueError: A shape is wrong, or `offsets` do not rise.
            TypeError: The ids are not integers.
        """
        for name, each in (("ids", ids), ("offsets", offsets)):
            kind = getattr(each, "dtype", type(each).__name__)
            if each is not None and kind not in (torch.int64, torch.int32):
                raise TypeError(f"{name} are of type {kind}; they must be a tensor of torch.int64 or int32")
        if offsets is not None and (offsets.dim() != 1 or len(offsets) < has_last):
            raise ValueError(
                f"offsets have the shape {tuple(offsets.shape)}; it must be (bags,), or (bags + 1,) with "
                "include_last_offset=True"
            )
        if ids.dim() != (2 if offsets is None else 1):
            raise ValueError(
                f"ids have the shape {tuple(ids.shape)}{'' if offsets is None else ' and offsets'}: pass a "
                "bag in each row, or ids of one dimension with offsets"
            )
        if factors is not None and factors.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights have the shape {tuple(factors.shape)}, and the ids {tuple(ids.shape)}: "
                "pass a factor for each id"
            )
        if offsets is None:
            lengths = ids.new_full((len(ids),), ids.shape[1])
        else:
            ends = offsets
            if not has_last:
                ends = torch.cat([offsets, offsets.new_tensor([len(ids)])])
            check_offsets(ends, num_ids=len(ids))
            ids = ids[: int(ends[-1])]
            factors = None if factors is None else factors[: len(ids)]
            lengths = ends.diff()
        return RankBags(lengths, ids.flatten(), None if factors is None else factors.flatten())

    @property
    def none(self) -> "RankBags":
        """No bags, with factors if these have some."""
        return RankBags(self.lengths[:0], self.ids[:0], None if self.factors is None else self.factors[:0])

    def offsets(self, *, has_last: bool) -> Tensor:
        """Return where each bag begins.

        Args:
            has_last: Whether they end with the number of ids.
        """
        ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        return ends if has_last else ends[:-1]

    def split(self, num_tables: int) -> list["RankBags"]:
        """Return the bags of each table, if each has as many, all of one before those of the next."""
        if not num_tables:
            return []
        lengths = self.lengths.view(num_tables, -1)
        sizes = lengths.sum(1).tolist()
        factors = [None] * num_tables if self.factors is None else self.factors.split(sizes)
        return [RankBags(*each) for each in zip(lengths, self.ids.split(sizes), factors, strict=True)]


def joined(parts: Sequence[RankBags]) -> RankBags:
    """Return all bags of several parts, of which there is at least one."""
    factors = [part.factors for part in parts if part.factors is not None]
    return RankBags(
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.ids for part in parts]),
        torch.cat(factors) if factors else None,
    )


class Collected(NamedTuple):
    """The bags of a batch that this rank looks up.

    Attributes:
        num_bags: Number of bags of each rank's part of the batch.
        parts: The bags of each rank.
    """

    num_bags: list[int]
    parts: list[RankBags]


@dataclass(frozen=True)
class BatchExchange:
    """The all-to-all of bags from ranks with parts of a batch to the ranks that look them up.

    Args:
        axis: The ranks with different parts of the batch.
        name: Name of the table in error messages.
    """

    axis: Axis
    name: str

    def collect(
        self,
        cut: Callable[[], tuple[int, Sequence[RankBags]] | None],
        *,
        param: Tensor,
        action: str = "the batch",
    ) -> Collected | None:
        """Return the bags that all ranks have for this one; collective.

        Args:
            cut: Function that returns the number of bags of this rank's part of the batch, and the bags for
                each rank, or None after the last batch; it communicates with no other rank.
            param: A cache, which has the device of tensors that are sent, and the data type of factors.
            action: The action in error messages, which is the same on all ranks.

        Returns:
            The bags; None after the last batch.

        Raises:
            RuntimeError: `cut` has failed on another rank, or is after the last batch on some ranks only.
            ValueError: Some ranks have factors and others have not.
            TypeError: Factors have another data type.
        """
        failure: Exception | None = None
        parts: Sequence[RankBags] = ()
        numbers = [_OVER] * (3 + 2 * self.axis.size)
        try:
            num_bags, parts = cut() or (0, ())
            factors = [part.factors for part in parts if part.factors is not None]
            if factors and factors[0].dtype != param.dtype:
                raise TypeError(
                    f"per_sample_weights are of type {factors[0].dtype}, and the table is of {param.dtype}: "
                    "pass those of its type"
                )
            has_grad = torch.is_grad_enabled() and any(each.requires_grad for each in factors)
            sizes = [len(each) for part in parts for each in part[:2]]
            if parts:
                numbers = [_READY, num_bags, bool(factors) + has_grad, *sizes]
        except Exception as error:
            failure = error
        axis, name, device = self.axis, self.name, param.device
        found = agree(action, numbers, failure, axis=axis, name=name, device=device)
        states, num_bags_of_ranks, kinds, *_ = zip(*found, strict=True)
        self._check_states(states)
        self._check_factors(kinds)
        if not parts:
            return None
        own = 3 + 2 * self.axis.rank
        received_sizes = [size for numbers in found for size in numbers[own : own + 2]]
        received = self._exchange_integers(parts, received_sizes, device).split(received_sizes)
        lengths, ids = received[::2], received[1::2]
        factors_of_ranks: Sequence[Tensor | None] = [None] * self.axis.size
        if kinds[0]:
            sent = [part.factors.to(device) for part in parts if part.factors is not None]
            factors_of_ranks = _ExchangeFactors.apply(self.axis, [len(each) for each in ids], *sent)
        bags = [RankBags(*each) for each in zip(lengths, ids, factors_of_ranks, strict=True)]
        return Collected([*num_bags_of_ranks], bags)

    def _check_states(self, states: Sequence[int]) -> None:
        """Check that all ranks have a batch, or none."""
        if len({*states}) > 1:
            raise RuntimeError(
                f"the loader for {self.name} has ended on rank {states.index(_OVER)} along {self.axis.name}, "
                f"and goes on on rank {states.index(_READY)}: give all ranks as many batches, as "
                "plugin.prepare_dataloader and DistributedSampler do"
            )

    def _check_factors(self, kinds: Sequence[int]) -> None:
        """Check that all ranks have factors, or none, and gradients of them."""
        if len({*kinds}) > 1:
            texts = ("no per_sample_weights", "some without a gradient", "some with a gradient")
            text = ", ".join(f"{texts[kind]} on rank {rank}" for rank, kind in enumerate(kinds))
            raise ValueError(
                f"{self.name} was given different per_sample_weights along {self.axis.name} ({text}): pass "
                "them alike on all ranks"
            )

    def _exchange_integers(
        self, parts: Sequence[RankBags], received_sizes: Sequence[int], device: torch.device
    ) -> Tensor:
        """Send lengths and ids; return those of all ranks, one after the other."""
        sent = torch.cat([each.to(device, torch.int64) for part in parts for each in part[:2]])
        pairs = [received_sizes[2 * rank] + received_sizes[2 * rank + 1] for rank in range(self.axis.size)]
        return exchange_pieces(
            sent,
            send_sizes=[len(part.lengths) + len(part.ids) for part in parts],
            receive_sizes=pairs,
            parallel_mode=self.axis,
        )


class _ExchangeFactors(torch.autograd.Function):
    """The all-to-all of factors; gradients go back to their ranks.

    They are multiplied by the number of ranks, by which `BagExchange` has divided those of bags.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, sizes: Sequence[int], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.sizes = axis, [len(part) for part in parts]
        received = [parts[0].new_empty(size) for size in sizes]
        exchange([part.contiguous() for part in parts], received, axis)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        own = [grads[0].new_empty(size) for size in ctx.sizes]
        exchange([grad.contiguous() for grad in grads], own, ctx.axis)
        return None, None, *(grad.mul_(ctx.axis.size) for grad in own)


@dataclass(frozen=True)
class IdsOfRanks:
    """Ids of batches that are read ahead, whose parts are on several ranks.

    Args:
        batches: The exchange.
        param: A cache, on the device of tensors that are sent.
        cut: Function of the ids of this rank's part of a batch that returns those for each rank.
        by_cache: Function of the ids for this rank that returns those of each of its caches.
    """

    batches: BatchExchange
    param: Tensor
    cut: Callable[[Tensor], Sequence[Tensor]]
    by_cache: Callable[[Tensor], Sequence[Tensor]]

    def collect(self, ids: Tensor | None, failure: Exception | None) -> Sequence[Tensor]:
        """Return the ids of all parts of a batch, for each cache of this rank; collective.

        Args:
            ids: The ids of this rank's part; None after the last batch.
            failure: The error in the place of the batch.

        Raises:
            RuntimeError: Another rank has failed, or some ranks have a batch and others have not.
        """

        def cut() -> tuple[int, list[RankBags]] | None:
            if failure is not None:
                raise failure
            return None if ids is None else (0, [RankBags(each[:0], each, None) for each in self.cut(ids)])

        collected = self.batches.collect(cut, param=self.param, action="the next batch of the loader")
        if collected is None:
            return []
        return self.by_cache(torch.cat([part.ids for part in collected.parts]).cpu())
