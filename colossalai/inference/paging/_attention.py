"""Paged attention: keys and values in blocks of a pool, for sequences of any lengths in one step.

The tokens of all sequences of a step are concatenated without padding: (tokens, heads, head_size). A layer
first writes their keys and values to blocks, then each token attends to its own sequence.

[Note: attention as bags of rows]
Few queries over long caches (each sequence adds one token) form no efficient matrix product: the cost is one
read of the cache, in place. `torch.embedding_bag` with weights does exactly that: it sums weighted rows of a
table over arbitrary indices, with a vectorized kernel of torch. The output of attention is such a sum: of
rows of V, each times its probability. The scores of 16 keys are one, too, if the features of keys are stored
apart: of the rows K[feature, 16 keys], each times that feature of the query. So blocks of K
are (heads, head_size, block_size), blocks of V (block_size, heads, head_size); nothing is gathered, padded or
copied, and queries may belong to one sequence or to many. Measured in docs/design/serving_speed.md.

Prompts have many queries for the same keys: these are products, and use scaled_dot_product_attention.

[Note: attention by gathered blocks]
On an accelerator the kernel of `embedding_bag` is slow, and its indices, one for each feature of each block
of each head, take longer to build and to copy than a step takes. Memory is fast there: blocks are gathered by
a block table, and multiplied.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colossalai.inference.paging._bags import BagIndices, BagsMemo, SeenSlots
from colossalai.inference.paging._cache import LayerCache, TokenSlots

# Longest chunk that is computed as bags, in tokens. Products are faster for longer ones, the more so the
# longer the sequence; chunks of `PromptPace`'s least size are products.
BAG_TOKENS = 7
# Rows of one group are padded to the longest; a group is padded to at most this multiple of its content.
_MOST_PADDING = 1.5
# With batch invariance, rows of scores have a multiple of so many positions: zeros in whole vectors at the
# end do not change a sum, but a shorter vector at the end does.
_WHOLE_ROW = 64


@dataclass(frozen=True)
class AttentionOptions:
    """Options of an attention layer.

    Attributes:
        scale: Factor of the scores.
        window: Number of last keys visible to a query, itself included; None for all.
        softcap: Smooth bound of the scores: softcap * tanh(score / softcap); None for none.
        sinks: (heads,) extra logit of each head's softmax, without a value; None for none.
        slopes: (heads,) ALiBi: the score of a key at position p gets p * slope (2108.12409); None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether `scaled_dot_product_attention` supports these options."""
        return self.softcap is None and self.sinks is None and self.slopes is None


@dataclass(frozen=True)
class _Prompt:
    """A chunk of a sequence for attention by products.

    Attributes:
        first: Index of its first token in the step.
        start: Position of its first token in the sequence.
        length: Number of its tokens.
        blocks: Blocks of the sequence.
    """

    first: int
    start: int
    length: int
    blocks: Tensor


@dataclass(frozen=True, kw_only=True)
class _Queries(ABC):
    """Abstract: queries of similar cache lengths, few of each sequence, with their keys.

    Attributes:
        tokens: Their tokens in the step; None for all tokens in order.
        hidden: (queries, 1, positions from `first_hidden` on) mask of invisible keys.
        first_hidden: First position in the mask; all earlier positions are visible to every query.
        positions: (queries, positions) positions of the keys.
    """

    tokens: Tensor | None
    hidden: Tensor
    first_hidden: int
    positions: Tensor

    def attend(self, cache: LayerCache, query: Tensor, options: AttentionOptions) -> Tensor:
        """Return (queries, heads, value_size) of queries (queries, heads, key_size)."""
        scores = self._scores(cache, query if options.scale == 1 else query * options.scale)
        if not options.is_plain:
            scores = _adjust(scores, self.positions.unsqueeze(1), options)
        scores[..., self.first_hidden :].masked_fill_(self.hidden, -math.inf)
        probabilities = _softmax(scores, options.sinks, query.dtype)
        return self._sums(cache, probabilities).view(*query.shape[:2], -1)

    @abstractmethod
    def _scores(self, cache: LayerCache, query: Tensor) -> Tensor:
        """Return (queries, heads, positions): products of queries and keys."""

    @abstractmethod
    def _sums(self, cache: LayerCache, probabilities: Tensor) -> Tensor:
        """Return (queries x heads, value_size): sums of values, each times its probability."""


@dataclass(frozen=True, kw_only=True)
class _Bags(_Queries):
    """Queries computed as bags. See [Note: attention as bags of rows].

    Attributes:
        key_rows: Rows of the key table, for (query, head, block, feature).
        key_starts: Offsets of the bags of `key_rows`.
        value_rows: Rows of the value table, for (query, head, position).
        value_starts: Offsets of the bags of `value_rows`.
        num_blocks: Number of blocks of a query, padding included.
    """

    key_rows: Tensor
    key_starts: Tensor
    value_rows: Tensor
    value_starts: Tensor
    num_blocks: int

    def _scores(self, cache: LayerCache, query: Tensor) -> Tensor:
        weights = query.unsqueeze(2).expand(-1, -1, self.num_blocks, -1).reshape(-1)
        scores = cache.score(self.key_rows, self.key_starts, weights, self.value_rows)
        return scores.view(*query.shape[:2], -1)

    def _sums(self, cache: LayerCache, probabilities: Tensor) -> Tensor:
        return cache.sum_values(self.value_rows, self.value_starts, probabilities.view(-1))


@dataclass(frozen=True, kw_only=True)
class _Gathered(_Queries):
    """Queries with gathered blocks. See [Note: attention by gathered blocks].

    Attributes:
        table: (queries, blocks) blocks of each query.
        slots: (queries, positions) slots of the values; the query's own slot replaces invisible ones.
    """

    table: Tensor
    slots: Tensor

    def _scores(self, cache: LayerCache, query: Tensor) -> Tensor:
        keys = cache.keys_of(self.table)  # (queries, key heads, key_size, positions)
        by_key_head = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        return (by_key_head @ keys).flatten(1, 2)

    def _sums(self, cache: LayerCache, probabilities: Tensor) -> Tensor:
        values = cache.values_of(self.slots)  # (queries, key heads, positions, value_size)
        by_key_head = probabilities.view(*values.shape[:2], -1, values.shape[2])
        return (by_key_head @ values).flatten(0, 2)


@dataclass
class PagedStep:
    """The tokens of a step and the blocks of their sequences, shared by the attention of all layers.

    Args:
        starts: Position of the first token of each chunk.
        counts: Number of tokens of each chunk.
        tables: Blocks of each chunk's sequence up to its last token.
        block_size: Number of tokens of a block.
        device: Device of the model.
        bags_only: Whether everything is computed as bags, including prompts, so that the result of a token
            depends on its own sequence only.
        memo: Indices of the previous step; None for none.
        gathers: Whether blocks are gathered unless `bags_only`. Default: on every device but a CPU.
    """

    starts: np.ndarray
    counts: np.ndarray
    tables: Sequence[np.ndarray]
    block_size: int
    device: torch.device
    bags_only: bool = False
    memo: BagsMemo | None = None
    gathers: bool | None = None
    places: TokenSlots = field(init=False)
    positions: np.ndarray = field(init=False)
    _slots: np.ndarray = field(init=False)
    _chunk_of: np.ndarray = field(init=False)
    _prompts: list[_Prompt] = field(init=False)
    _in_bags: np.ndarray = field(init=False)
    _known: dict[tuple[int, int, int, int | None], list[_Queries]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.memo is not None:
            self.memo.begin_step()
        firsts = np.cumsum(self.counts) - self.counts
        self._chunk_of = np.repeat(np.arange(len(self.counts)), self.counts)
        self.positions = np.arange(int(self.counts.sum())) - np.repeat(firsts - self.starts, self.counts)
        blocks = np.empty_like(self.positions)
        for first, start, count, table in zip(firsts, self.starts, self.counts, self.tables, strict=True):
            blocks[first : first + count] = table[np.arange(start, start + count) // self.block_size]
        offsets = self.positions % self.block_size
        self._slots = blocks * self.block_size + offsets
        self.places = TokenSlots(self._tensor(blocks), self._tensor(offsets), self._tensor(self._slots))
        most = int(self.counts.max()) if self.bags_only else BAG_TOKENS
        self._prompts = [
            _Prompt(int(first), int(start), int(count), self._tensor(table.astype(np.int64)))
            for first, start, count, table in zip(firsts, self.starts, self.counts, self.tables, strict=True)
            if count > most
        ]
        self._in_bags = np.flatnonzero(np.repeat(self.counts <= most, self.counts))

    def attend(
        self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store the keys and values of the step's tokens, and let each query attend to its own sequence.

        Args:
            cache: Cache of the layer.
            query: (tokens, query heads, key_size); adjacent query heads share a key head.
            key: (tokens, heads, key_size).
            value: (tokens, heads, value_size).
            options: Options of the layer.

        Returns:
            (tokens, query heads, value_size).
        """
        key, value = cache.write(self.places, key, value)
        groups = self._groups(cache, query.shape[1], options.window)
        if not self._prompts and len(groups) == 1:
            return groups[0].attend(cache, query, options)
        output = query.new_empty(*query.shape[:2], cache.shape.value_size)
        for group in groups:
            assert group.tokens is not None, "tokens of several groups are named"
            found = group.attend(cache, query.index_select(0, group.tokens), options)
            output.index_copy_(0, group.tokens, found)
        for same in self._group_prompts():
            self._attend_prompts(same, cache, (query, key, value), options, output)
        return output

    def _groups(self, cache: LayerCache, num_query_heads: int, window: int | None) -> list[_Queries]:
        """Return the queries of short chunks in groups of similar lengths, cached for other layers."""
        known = (cache.shape.num_heads, cache.shape.key_size, num_query_heads, window)
        if known not in self._known:
            self._known[known] = self._make_groups(known)
        return self._known[known]

    def _make_groups(self, known: tuple[int, int, int, int | None]) -> list[_Queries]:
        if not len(self._in_bags):
            return []
        size, window = self.block_size, known[-1]
        last = self.positions[self._in_bags] // size
        # Blocks before the window are skipped.
        oldest = self.positions[self._in_bags] - (window - 1) if window else np.zeros_like(last)
        first = np.maximum(oldest, 0) // size
        lengths = last - first + 1
        order = np.argsort(lengths, kind="stable")[::-1]
        groups: list[_Queries] = []
        begin = 0
        while begin < len(order):
            # Extend the group while its padding stays within the bound; `order` is by descending length.
            longest = lengths[order[begin]]
            held = np.cumsum(lengths[order[begin:]])
            padded = longest * np.arange(1, len(held) + 1)
            end = begin + int(np.flatnonzero(padded <= _MOST_PADDING * held)[-1]) + 1
            chosen = np.sort(order[begin:end])
            is_all = len(chosen) == len(self.positions)
            if self.bags_only:
                longest += -longest % (_WHOLE_ROW // math.gcd(_WHOLE_ROW, size))
            groups.append(
                self._make_queries(self._in_bags[chosen], first[chosen], int(longest), known, is_all=is_all)
            )
            begin = end
        return groups

    def _make_queries(
        self,
        tokens: np.ndarray,
        first_blocks: np.ndarray,
        num_blocks: int,
        known: tuple[int, int, int, int | None],
        *,
        is_all: bool,
    ) -> _Queries:
        size = self.block_size
        at = self.positions[tokens]  # (queries,)
        table = np.empty((len(tokens), num_blocks), dtype=np.int64)
        for row, (token, first) in enumerate(zip(tokens, first_blocks, strict=True)):
            blocks = self.tables[self._chunk_of[token]][first : at[row] // size + 1]
            # Pad with the query's own block, so that no block of another sequence is read.
            table[row, : len(blocks)], table[row, len(blocks) :] = blocks, blocks[0]
        # Without a window every query sees all positions but the end of its last block: mask only these.
        first_hidden = int((at - first_blocks * size).min()) + 1 if known[-1] is None else 0
        chosen = None if is_all else self._tensor(tokens)
        is_gathered = self.device.type != "cpu" if self.gathers is None else self.gathers
        if is_gathered and not self.bags_only:
            seen = SeenSlots.of(table, at, first_blocks, self._slots[tokens], known[-1], size)
            return _Gathered(
                tokens=chosen,
                hidden=self._tensor(seen.hidden[:, None, first_hidden:]),
                first_hidden=first_hidden,
                positions=self._tensor(seen.positions),
                table=self._tensor(table),
                slots=self._tensor(seen.slots),
            )
        indices = BagIndices.of(table, at, first_blocks, self._slots[tokens], known, size, self.memo)
        return _Bags(
            tokens=chosen,
            hidden=self._tensor(indices.hidden[:, None, first_hidden:]),
            first_hidden=first_hidden,
            positions=self._tensor(indices.positions),
            key_rows=self._tensor(indices.key_rows.reshape(-1)),
            key_starts=self._tensor(indices.key_starts),
            value_rows=self._tensor(indices.value_rows.reshape(-1)),
            value_starts=self._tensor(indices.value_starts),
            num_blocks=num_blocks,
        )

    def _group_prompts(self) -> list[list[_Prompt]]:
        """Group chunks of equal length at the beginning of their sequences; the others stay alone."""
        found: dict[object, list[_Prompt]] = {}
        for number, prompt in enumerate(self._prompts):
            found.setdefault(prompt.length if prompt.start == 0 else (number,), []).append(prompt)
        return list(found.values())

    def _attend_prompts(
        self,
        prompts: list[_Prompt],
        cache: LayerCache,
        new: tuple[Tensor, Tensor, Tensor],
        options: AttentionOptions,
        output: Tensor,
    ) -> None:
        length, start = prompts[0].length, prompts[0].start
        spans = [slice(prompt.first, prompt.first + length) for prompt in prompts]
        query = torch.stack(
            [new[0][span].transpose(0, 1) for span in spans]
        )  # (prompts, heads, length, size)
        if start == 0:
            key, value = (torch.stack([part[span].transpose(0, 1) for span in spans]) for part in new[1:])
        else:
            key, value = (part.unsqueeze(0) for part in cache.read(prompts[0].blocks, start + length))
        found = _attend_by_products(query, key, value, start, options)
        for span, each in zip(spans, found, strict=True):
            output[span] = each.transpose(0, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, start: int, options: AttentionOptions
) -> Tensor:
    """Return (prompts, heads, length, value_size) for chunks that start at position `start`."""
    length = query.shape[2]
    is_whole = start == 0 and (options.window is None or options.window >= length)
    visible = None if is_whole and options.is_plain else _visible(start, length, options.window, query.device)
    if options.is_plain:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None,
            scale=options.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    assert visible is not None, "it is made where there is more than a mask"
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, 1).transpose(2, 3) * options.scale
    positions = torch.arange(key.shape[2], device=query.device)[None, None, None]
    heads_last = _adjust(scores.transpose(1, 2), positions, options)  # (prompts, length, heads, keys)
    scores = heads_last.transpose(1, 2).masked_fill(~visible, -math.inf)
    sinks = None if options.sinks is None else options.sinks[:, None]
    return _softmax(scores, sinks, query.dtype) @ value.repeat_interleave(shared, 1)


def _visible(start: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return (length, start + length), the mask of keys that the queries from `start` on see."""
    ahead = (
        torch.arange(start + length, device=device)
        - torch.arange(start, start + length, device=device)[:, None]
    )
    return ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)


def _adjust(scores: Tensor, positions: Tensor, options: AttentionOptions) -> Tensor:
    """Apply softcap and ALiBi to scores (..., heads, keys); `positions` broadcast to them."""
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.slopes is not None:
        scores = scores + positions * options.slopes[:, None].to(scores.dtype)
    return scores


def _softmax(scores: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return probabilities over the last dimension, summed in float32 or better."""
    if sinks is None:
        return torch.softmax(scores, -1)  # in float32 inside
    logits = torch.cat((scores, sinks.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)), -1)
    precise = torch.promote_types(dtype, torch.float32)
    return torch.softmax(logits, -1, dtype=precise)[..., :-1].to(dtype).contiguous()
