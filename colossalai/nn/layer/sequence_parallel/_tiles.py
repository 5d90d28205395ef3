"""Attention of some queries to some keys: a tile of scores that exists only while it is used.

With s = scale q k^T, the forward keeps for each query the maximum m of the scores seen so far, the sum
l = sum exp(s - m) and the sum o = sum exp(s - m) v; a tile with a greater maximum scales l and o down first
(Milakov and Gimelshein 2018, 1805.02867; Dao et al. 2022, 2205.14135). At the end out = o / l and
logsumexp = m + log l. The backward draws on out and logsumexp alone:

    p = exp(s - logsumexp)     D = sum_d dout out     dp = dout v^T
    dv = (p z)^T dout          ds = p (dp z - D)      dq = scale ds k      dk = scale ds^T q

with z the dropout factors: 0, or 1 / (1 - dropout_p).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from colossalai.nn.layer.sequence_parallel._dropout import dropout_factors
from colossalai.nn.layer.sequence_parallel._order import Order, TokenSpan, spans

_NEVER = float("-inf")


class ScoreBlock(NamedTuple):
    """The keys of one rank, in the type of the accumulators.

    Attributes:
        k: (batch, heads, sub_seq, head_size).
        v: The same.
        padding: (batch, sub_seq), True where there is nothing to attend to; None for no padding.
    """

    k: torch.Tensor
    v: torch.Tensor
    padding: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of an attention over shared positions.

    Attributes:
        order: Which positions a rank holds.
        axis_rank: This rank's position in the ring.
        axis_size: Number of ranks in it.
        sub_seq: Number of positions on a rank.
        tile_size: The longest side of a tile.
        causal: Whether a query attends to its own and earlier positions only.
        scale: Factor of the scores.
        dropout_p: Probability that a weight is dropped.
        dropout_seed: Seed of their choice.
        lanes: The numbers of samples and heads that do, too; None: they are counted.
    """

    order: Order
    axis_rank: int
    axis_size: int
    sub_seq: int
    tile_size: int
    causal: bool
    scale: float
    dropout_p: float
    dropout_seed: int | torch.Tensor
    lanes: torch.Tensor | None = field(default=None, compare=False)

    def tiles(self, owner: int) -> list[tuple[TokenSpan, TokenSpan]]:
        """Return (queries of this rank, keys of the owner) of all tiles in which anything is visible."""
        queries, keys = (
            spans(self.order, rank, self.axis_size, self.sub_seq, longest=self.tile_size)
            for rank in (self.axis_rank, owner)
        )
        return [(q, k) for k in keys for q in queries if not self.causal or k.start < q.start + q.size]

    def scores(self, q: torch.Tensor, block: ScoreBlock, queries: TokenSpan, keys: TokenSpan) -> torch.Tensor:
        """Return the scores of a tile, minus infinity where a query does not see a key."""
        result = queries.take(q) @ keys.take(block.k).transpose(-1, -2)
        result.mul_(self.scale)
        if block.padding is not None:
            result.masked_fill_(keys.take(block.padding, -1)[:, None, None], _NEVER)
        if self.causal and keys.start + keys.size - 1 > queries.start:
            hidden = keys.positions(q.device) > queries.positions(q.device)[:, None]
            result.masked_fill_(hidden, _NEVER)
        return result

    def factors(self, like: torch.Tensor, queries: TokenSpan, keys: TokenSpan) -> torch.Tensor | None:
        """Return the dropout factors of a tile, None without dropout."""
        if self.dropout_p == 0.0:
            return None
        return dropout_factors(
            like, queries, keys, dropout_seed=self.dropout_seed, dropout_p=self.dropout_p, lanes=self.lanes
        )


class Forward:
    """The sums of the forward for the queries of this rank.

    Args:
        q: The queries, in the type of the sums.
        rules: Rules of attention between positions.
    """

    def __init__(self, q: torch.Tensor, rules: Rules) -> None:
        self._q, self._rules = q, rules
        self._out = torch.zeros_like(q)
        self._total = q.new_zeros(*q.shape[:-1], 1)
        self._top = q.new_full((*q.shape[:-1], 1), _NEVER)

    def add(self, block: ScoreBlock, owner: int) -> None:
        """Attend to the keys of one rank."""
        for queries, keys in self._rules.tiles(owner):
            self._add_tile(block, queries, keys)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out, 0 for a query that sees no key, and logsumexp, plus infinity for such a query."""
        blind = self._total == 0
        out = self._out.div_(self._total.masked_fill(blind, 1.0))
        return out, (self._top + self._total.log()).masked_fill_(blind, float("inf"))

    def _add_tile(self, block: ScoreBlock, queries: TokenSpan, keys: TokenSpan) -> None:
        out, total, top = (queries.take(part) for part in (self._out, self._total, self._top))
        scores = self._rules.scores(self._q, block, queries, keys)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == _NEVER, 0.0)  # a query that has seen no key yet
        weights = scores.sub_(base).exp_()
        decay = (top - base).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        factors = self._rules.factors(weights, queries, keys)
        if factors is not None:
            weights.mul_(factors)
        out.mul_(decay).add_(weights @ keys.take(block.v))
        top.copy_(new_top)


class Backward:
    """The sum of the gradient of this rank's queries, and the parts of those of keys and values.

    Args:
        q: The queries, in the type of the sums.
        grad: Gradient of out, in the same type.
        out: Output of the forward.
        logsumexp: Output of the forward.
        rules: Rules of attention between positions.
    """

    def __init__(
        self,
        q: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        rules: Rules,
    ) -> None:
        self._q, self._grad, self._rules, self._logsumexp = q, grad, rules, logsumexp
        self._mean = (grad * out).sum(-1, keepdim=True)
        self.grad_q = torch.zeros_like(q)

    def add(self, block: ScoreBlock, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contribution of this rank's queries to the gradients of one rank's keys and values."""
        grad_k, grad_v = torch.zeros_like(block.k), torch.zeros_like(block.v)
        for queries, keys in self._rules.tiles(owner):
            weights = self._rules.scores(self._q, block, queries, keys)
            weights.sub_(queries.take(self._logsumexp)).exp_()
            factors = self._rules.factors(weights, queries, keys)
            grad = queries.take(self._grad)
            grad_scores = grad @ keys.take(block.v).transpose(-1, -2)
            kept = weights
            if factors is not None:
                grad_scores.mul_(factors)
                kept = weights * factors
            keys.take(grad_v).add_(kept.transpose(-1, -2) @ grad)
            grad_scores.sub_(queries.take(self._mean)).mul_(weights).mul_(self._rules.scale)
            queries.take(self.grad_q).add_(grad_scores @ keys.take(block.k))
            keys.take(grad_k).add_(grad_scores.transpose(-1, -2) @ queries.take(self._q))
        return grad_k, grad_v
