"""Sampling: draws one token for each row of logits, independent of the other rows of the batch.

Each row has one uniform random number, and its token is the inverse of the cumulative distribution at that
number, in the order of token ids. So a draw is a function of its row alone: the same in every batch, on every
rank, again after a preemption, and for drafted positions.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colossalai.inference.sampling._draws import HAS_INFINITY, HAS_NAN, HAS_NO_TOKEN, Drawn, Draws

# [Note: draws independent of the batch]
# Every value that affects a row is computed from that row in a fixed order of operations: softmax and cumsum
# run row by row, and sums are taken over blocks of fixed size, then over the sums of these (torch would
# divide one long row among threads, but not many rows). The algorithm of a row (first candidates, more of
# them, or all tokens) also follows from its own numbers.
# A sort of 128,000 logits takes 9 ms and finding the largest of each block 0.01, so candidates come from the
# blocks with the largest maxima: the k largest logits are all in the k best blocks.

_SEARCH_BLOCK = 64
_SUM_BLOCK = 256
_CANDIDATES = 64
"""Number of most likely tokens to try before all tokens."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BANS = np.where(_BITS, 0, -np.inf).astype(np.float32)
"""Additions to eight logits for each byte of a mask."""


def draw_tokens(logits: Tensor, draws: Draws) -> Drawn:
    """Draw the token of each row.

    Args:
        logits: (rows, vocab), of any floating dtype, on any device; not modified. Dtypes below float32 are
            computed in float32.
        draws: Parameters of the draws.

    Returns:
        The tokens. A row of `logits` with a NaN or an infinity, or without an allowed token, has none:
        `Drawn.failure_at` returns the reason. Other rows are unaffected.

    Raises:
        ValueError: `draws` has a token outside the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    assert num_rows == len(draws.temperature), (logits.shape, len(draws.temperature))
    for tokens in (draws.seen, draws.answered, draws.biased):
        if tokens.size and tokens.max() >= vocab_size:
            raise ValueError(
                f"token {tokens.max()} has a bias or a penalty; the vocabulary has {vocab_size} tokens"
            )
    token_ids = np.empty(num_rows, np.int64)
    is_greedy = draws.temperature == 0
    for rows in (np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)):
        if rows.size:
            values = _adjust(logits, rows, draws)
            draw = _most_likely(values) if is_greedy[rows[0]] else _sample(values, rows, draws)
            token_ids[rows] = draw.cpu().numpy()
    return logprobs_of(logits, token_ids, draws.num_top)


def logprobs_of(logits: Tensor, token_ids: np.ndarray, num_top: np.ndarray) -> Drawn:
    """Return log-probabilities of given tokens, as of a prompt, by the unmodified model in float32.

    Args:
        logits: (rows, vocab).
        token_ids: (rows,), the tokens; negative for none, with meaningless log-probabilities.
        num_top: (rows,), number of alternatives; -1 for no log-probabilities at all.
    """
    num_rows, most = len(token_ids), max(0, int(num_top.max(initial=0)))
    logprobs = np.full(num_rows, np.nan, np.float32)
    top_ids, top_logprobs = np.zeros((num_rows, most), np.int64), np.zeros((num_rows, most), np.float32)
    rows = np.flatnonzero(num_top >= 0)
    if rows.size:
        of_rows = _rows_of(logits, rows).log_softmax(-1)
        index = torch.from_numpy(token_ids[rows].clip(min=0)).to(logits.device)
        logprobs[rows] = of_rows.gather(-1, index[:, None])[:, 0].float().cpu().numpy()
        if most:
            width = min(most, of_rows.shape[1])
            values, ids = _first(of_rows, most + 16)
            if values.shape[1] < of_rows.shape[1]:
                for row in (values[:, width - 1] == values[:, -1]).nonzero()[:, 0].tolist():
                    in_order = torch.sort(of_rows[row], descending=True, stable=True)
                    values[row], ids[row] = (column[: values.shape[1]] for column in in_order)
            top_ids[rows, :width] = ids[:, :width].cpu().numpy()
            top_logprobs[rows, :width] = values[:, :width].float().cpu().numpy()
    return Drawn(
        token_ids=token_ids, num_top=num_top, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs
    )


def _rows_of(logits: Tensor, rows: np.ndarray) -> Tensor:
    """Return rows in the dtype of the computation; may share memory with `logits`."""
    if len(rows) < len(logits):
        logits = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
    return logits if logits.dtype == torch.float64 else logits.float()


def _adjust(logits: Tensor, rows: np.ndarray, draws: Draws) -> Tensor:
    """Apply biases, masks and penalties to rows, in this order; without any, may return `logits` itself."""
    values = _rows_of(logits, rows)
    if not any(map(len, (draws.biased, draws.masked_rows, draws.seen, draws.answered))):
        return values
    num_rows, vocab_size = values.shape
    place = np.full(len(logits), -1)
    place[rows] = np.arange(num_rows)

    def chosen(owners: np.ndarray, *columns: np.ndarray) -> list[Tensor]:
        """Select the entries of `rows`, with rows renumbered."""
        is_here = place[owners] >= 0
        kept = (place[owners[is_here]], *(column[is_here] for column in columns))
        return [torch.from_numpy(column).to(values.device) for column in kept]

    biased = chosen(draws.biased_rows, draws.biased, draws.biases)
    masked = chosen(draws.masked_rows, draws.masks)
    seen = chosen(draws.seen_rows, draws.seen, draws.seen_penalties)
    answered = chosen(draws.answered_rows, draws.answered, draws.answered_penalties)
    if not any(len(columns[0]) for columns in (biased, masked, seen, answered)):
        return values
    if values.data_ptr() == logits.data_ptr():
        values = values.clone()
    flat = values.view(-1)

    def index_of(owners: Tensor, tokens: Tensor) -> Tensor:
        return owners * vocab_size + tokens

    if len(biased[0]):
        index = index_of(*biased[:2])
        flat[index] += biased[2].to(values.dtype)
    if len(masked[0]):
        owners, masks = masked
        width = min(4 * masks.shape[1], (vocab_size + 7) // 8)
        bans = np.full(
            (len(masks), (vocab_size + 7) // 8, 8), -np.inf, np.float32
        )  # also beyond the tokenizer
        np.take(
            _BANS, masks.cpu().numpy().astype("<i4").view(np.uint8)[:, :width], axis=0, out=bans[:, :width]
        )
        bans = bans.reshape(len(masks), -1)[:, :vocab_size]
        values.index_add_(0, owners, torch.from_numpy(bans).to(values))  # a sum, so that a NaN stays one
    if len(seen[0]):
        index, penalty = index_of(*seen[:2]), seen[2].to(values.dtype)
        flat[index] = torch.where(flat[index] > 0, flat[index] / penalty, flat[index] * penalty)
    if len(answered[0]):
        index = index_of(*answered[:2])
        flat[index] -= answered[2].to(values.dtype)
    return values


def _failures(largest: Tensor) -> Tensor:
    """Return the failure codes of rows with these maxima, 0 for none."""
    failures = torch.zeros(largest.shape, dtype=torch.int64, device=largest.device)
    failures[largest.isnan()] = HAS_NAN
    failures[largest == torch.inf] = HAS_INFINITY
    failures[largest == -torch.inf] = HAS_NO_TOKEN
    return failures


def _block_maxima(values: Tensor) -> Tensor:
    """Return the maximum of each `_SEARCH_BLOCK` consecutive values; the last block may be shorter."""
    whole = values.shape[1] // _SEARCH_BLOCK * _SEARCH_BLOCK
    maxima: Tensor = values[:, :whole].unflatten(1, (-1, _SEARCH_BLOCK)).amax(-1)
    if whole < values.shape[1]:
        maxima = torch.cat([maxima, values[:, whole:].amax(-1, keepdim=True)], 1)
    return maxima


def _inside(values: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and ids in blocks, (rows, blocks * block); -inf beyond the last id."""
    ids = (blocks[:, :, None] * _SEARCH_BLOCK + torch.arange(_SEARCH_BLOCK, device=values.device)).flatten(1)
    last = values.shape[1] - 1
    inside = values.gather(1, ids.clamp(max=last))
    return inside.masked_fill_(ids > last, -torch.inf), ids


def _most_likely(values: Tensor) -> Tensor:
    """Return the token of the largest value of each row, the first of equal ones, or the failure code."""
    if values.shape[1] < 2 * _SEARCH_BLOCK:
        largest, tokens = values.max(-1)
    else:
        largest, block = _block_maxima(values).max(-1, keepdim=True)
        inside, ids = _inside(values, block)
        largest = largest[:, 0]
        tokens = ids.gather(1, inside.argmax(-1, keepdim=True))[:, 0]
    failures = _failures(largest)
    return torch.where(failures < 0, failures, tokens)


def _first(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count + 1` largest values and their ids, the smaller id first among equals.

    Any of the values equal to the last one may be among them.
    """
    num_values = min(count + 1, values.shape[1])
    if values.shape[1] <= 4 * _SEARCH_BLOCK * num_values:
        largest, ids = values.topk(num_values)
    else:
        blocks = _block_maxima(values).topk(num_values).indices
        inside, inside_ids = _inside(values, blocks)
        largest, index = inside.topk(num_values)
        ids = inside_ids.gather(1, index)
    ids, order = ids.sort(-1)
    largest, order = torch.sort(largest.gather(1, order), dim=-1, descending=True, stable=True)
    return largest, ids.gather(1, order)


@dataclass(frozen=True, kw_only=True)
class _Filters:
    """Filters of sampled rows, as (rows, 1) tensors on the device of the values."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, draws: Draws, rows: np.ndarray, device: torch.device) -> Self:
        columns = (getattr(draws, column.name)[rows, None] for column in fields(cls))
        return cls(
            **{
                column.name: torch.from_numpy(values).to(device)
                for column, values in zip(fields(cls), columns, strict=True)
            }
        )

    def at(self, rows: Tensor) -> Self:
        return type(self)(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def _sample(values: Tensor, rows: np.ndarray, draws: Draws) -> Tensor:
    """Draw the token of each row, all with temperature > 0, or return the failure code."""
    # See [Note: draws independent of the batch]
    filters = _Filters.of(draws, rows, values.device)
    vocab_size = values.shape[1]
    largest = values.amax(-1, keepdim=True)
    failures = _failures(largest[:, 0])
    if len(failed := (failures < 0).nonzero()[:, 0]):  # replaced by a uniform distribution
        values, largest = values.index_fill(0, failed, 0.0), largest.index_fill(0, failed, 0.0)
    tokens = torch.full((len(values),), -1, dtype=torch.int64, device=values.device)
    top_k = filters.top_k[:, 0]
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    is_narrow = has_top_k | (filters.top_p[:, 0] < 1) | (filters.min_p[:, 0] > 0)
    few = (is_narrow & ~(has_top_k & (top_k > _CANDIDATES))).nonzero()[:, 0]
    if len(few):
        # Weight of all tokens relative to the most likely one, the base of top_p.
        mass = torch.ones_like(filters.uniform)
        if len(nuclei := few[~has_top_k[few] & (filters.top_p[few, 0] < 1)]):
            probabilities = _probabilities(values, largest, filters, nuclei)
            mass[nuclei] = 1 / probabilities.amax(-1, keepdim=True).double()
        tokens[few] = _draw_among_first(_pick(values, few), filters.at(few), mass[few])
    if len(few := (tokens < 0).nonzero()[:, 0]):
        probabilities = _probabilities(values, largest, filters, few)
        narrow = is_narrow[few].nonzero()[:, 0]
        if len(narrow):
            probabilities[narrow] = _filter(probabilities[narrow], filters.at(few[narrow]))
        tokens[few] = _draw_among_all(probabilities, filters.uniform[few])
    return torch.where(failures < 0, failures, tokens)


def _pick(values: Tensor, rows: Tensor) -> Tensor:
    return values if len(rows) == len(values) else values.index_select(0, rows)


def _probabilities(values: Tensor, largest: Tensor, filters: _Filters, rows: Tensor) -> Tensor:
    """Return the probabilities of rows, padded to whole blocks with zeros."""
    relative = _pick(values, rows) - largest[rows]  # at most 0, so small temperatures do not overflow
    temperature = filters.temperature[rows].to(values.dtype).clamp(min=torch.finfo(values.dtype).tiny)
    relative /= temperature
    if missing := -relative.shape[1] % _SUM_BLOCK:
        relative = functional.pad(relative, (0, missing), value=-torch.inf)
    return relative.softmax(-1)


def _draw_among_first(values: Tensor, filters: _Filters, mass: Tensor) -> Tensor:
    """Draw where filters certainly keep only tokens among the candidates; -1 for other rows.

    Args:
        values: (rows, vocab).
        filters: Filters of the rows.
        mass: (rows, 1), weight of all tokens relative to the most likely one; with `top_k` the weight of
            its tokens is used instead.
    """
    first, ids = _first(values, _CANDIDATES)
    num_first, last = first.shape[1], first[:, -1:].double()
    first = first.double()
    tiny = torch.finfo(values.dtype).tiny
    weights = ((first - first[:, :1]) / filters.temperature.clamp(min=tiny)).exp()
    last_weight = weights[:, -1:]
    limit = torch.where(filters.top_k > 0, filters.top_k, num_first)
    is_kept = torch.arange(num_first, device=values.device) < limit
    weights = weights * is_kept
    above = functional.pad(weights.cumsum(-1), (1, 0))  # weight of all more likely tokens
    has_top_k = (filters.top_k > 0) & (filters.top_k < values.shape[1])
    mass = torch.where(has_top_k, above[:, -1:], mass)
    is_kept = is_kept & ((filters.top_p >= 1) | (above[:, :-1] < filters.top_p * mass))
    is_kept = is_kept & (weights >= filters.min_p)
    weights = weights * is_kept
    ids, order = ids.sort(-1)
    cumulative = weights.gather(1, order).cumsum(-1)
    place = (cumulative <= filters.uniform * cumulative[:, -1:]).sum(-1, keepdim=True)
    tokens = ids.gather(1, place)
    # The filters keep the first few in order. Tokens beyond the candidates are at most as likely as the last
    # candidate, so they are certainly excluded if the last kept one is more likely than that.
    last_kept = first.gather(1, is_kept.sum(-1, keepdim=True) - 1)
    is_certain = (last_kept > last) | (last_weight == 0)
    if num_first == values.shape[1]:
        is_certain = torch.ones_like(is_certain)
    return torch.where(is_certain, tokens, -1)[:, 0]


def _filter(probabilities: Tensor, filters: _Filters) -> Tensor:
    """Set the probabilities of excluded tokens to zero; (rows, whole blocks)."""
    num_tokens = probabilities.shape[1]
    in_order = _in_order(probabilities)
    top_k = torch.where(filters.top_k > 0, filters.top_k, num_tokens).clamp(max=num_tokens)
    size = torch.where(filters.top_p < 1, _nucleus(in_order, filters.top_p, top_k), top_k)
    is_likely = in_order >= (filters.min_p * in_order[:, :1]).to(in_order.dtype)
    size = torch.minimum(size, is_likely.sum(-1, keepdim=True))
    threshold = in_order.gather(1, size - 1)
    # Products with zeros and ones: a selection by an irregular mask takes ten times as long.
    kept = torch.ge(probabilities, threshold, out=torch.empty_like(probabilities))
    beyond = in_order.gather(1, size.clamp(max=num_tokens - 1))
    for row in ((beyond == threshold) & (size < num_tokens) & (threshold > 0)).nonzero()[:, 0].tolist():
        is_equal = probabilities[row] == threshold[row]
        num_equal = size[row] - (probabilities[row] > threshold[row]).sum()
        kept[row] *= ~(is_equal & (is_equal.cumsum(-1) > num_equal))  # of equal ones keep the smaller ids
    return kept.mul_(probabilities)


def _nucleus(in_order: Tensor, top_p: Tensor, limit: Tensor) -> Tensor:
    """Return the number of the first `limit` tokens of each row whose sum reaches `top_p` of their total."""
    blocks = in_order.unflatten(1, (-1, _SUM_BLOCK))
    cumulative = functional.pad(blocks.sum(-1).double().cumsum(-1), (1, 0))
    block = (limit - 1) // _SUM_BLOCK
    mass = cumulative.gather(1, block) + _cumulative_in(blocks, block).gather(1, (limit - 1) % _SUM_BLOCK)
    goal = top_p * mass
    block = (cumulative[:, 1:] < goal).sum(-1, keepdim=True).clamp(max=blocks.shape[1] - 1)
    missing = goal - cumulative.gather(1, block)
    place = (_cumulative_in(blocks, block) < missing).sum(-1, keepdim=True)
    return torch.minimum(block * _SUM_BLOCK + place + 1, limit)


def _cumulative_in(blocks: Tensor, block: Tensor) -> Tensor:
    """Return the cumulative sums within one block of each row, (rows, block) in float64."""
    return blocks.gather(1, block[:, :, None].expand(-1, -1, _SUM_BLOCK))[:, 0].double().cumsum(-1)


def _in_order(values: Tensor) -> Tensor:
    """Return the values of each row in descending order."""
    if values.device.type == "cpu":  # numpy sorts values only: 0.3 ms for 128,000; torch takes 9 ms
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return torch.sort(values, dim=-1, descending=True).values


def _draw_among_all(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw from (rows, whole blocks), the block first and then the token in it."""
    blocks = probabilities.unflatten(1, (-1, _SUM_BLOCK))
    cumulative = functional.pad(blocks.sum(-1).double().cumsum(-1), (1, 0))
    goal = uniform * cumulative[:, -1:]
    block = (cumulative[:, 1:] <= goal).sum(-1, keepdim=True)
    inside = _cumulative_in(blocks, block)
    place = (inside <= goal - cumulative.gather(1, block)).sum(-1, keepdim=True)
    # Rounding may place the goal after the block's last token with a nonzero probability.
    place = torch.minimum(place, (inside < inside[:, -1:]).sum(-1, keepdim=True))
    return (block * _SUM_BLOCK + place)[:, 0]
