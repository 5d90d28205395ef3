"""Dispatch of tokens to experts that other ranks hold, without a capacity, and the way back (2006.16668).

A router has chosen k experts for each of T tokens. The choices are T k *slots*, in the order of the
tokens; a slot that no expert serves (its token was dropped) is ignored. Experts are numbered over
the ranks of an axis: rank r of p has the experts from r E / p on.

    slots  --sort by expert-->  rows  --exchange-->  rows of my experts, by sender
           --regroup-->  rows by expert  --compute-->  the same  --and all of it back-->  slots

A row is sent to the rank of its expert and comes back: with H numbers in a row, k T H (p - 1)/p numbers each
way if experts are used evenly, and the same for the gradients. Counts go first, so no row is padded and none
is left out. Sorting is stable, and a token's results are added in the order of its choices, in float32 or
better: two runs are equal bit for bit.

[Note: participation of all ranks]
A rank without tokens, or whose experts were not chosen, sends and receives nothing, but takes part in each
exchange of the forward and of the backward. So no line here depends on the number of rows, and experts
compute without rows as well, which gives their weights gradients of zeros and not none.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from colossalai.communication import (
    exchange_forward_exchange_backward,
    exchange_pieces,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from colossalai.context import Axis, Mesh, ParallelMode, drawing_apart, get_seeds, seed

_BLOCK = 1 << 17  # elements

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""The experts of a rank as a function of rows (R, H) sorted by expert and their counts; returns (R, H)."""

EXPERT_AXES = ("ep", "tp")
"""The axes that cut experts, the coarser cut first; ranks along `tp` have the same tokens, and share them."""


@dataclass(frozen=True)
class SlotOrder:
    """Which slot is in which row, before rows leave the rank.

    Attributes:
        slot_of_row: (rows,): sorted by expert, then by slot.
        row_of_slot: (tokens, choices); -1 for a slot without a row.
        all_served: Whether every slot has one.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    all_served: bool

    @property
    def num_choices(self) -> int:
        """The choices of a token."""
        return self.row_of_slot.shape[1]


def dispatch(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    *,
    num_experts: int,
    mesh: Mesh,
    served: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """Compute the chosen experts on their ranks, and add their results by weight.

    Collective over the ranks along `EXPERT_AXES`, of which those along `tp` hold the same tokens.

    Args:
        hidden: (tokens, features) of this rank.
        experts: (tokens, choices): the numbers of the chosen experts.
        weights: (tokens, choices): weights of their results.
        compute: The function of this rank's experts.
        num_experts: Over all ranks.
        mesh: The ranks.
        served: (tokens, choices): whether a choice counts; default: all do.
        training: Whether the experts are in training.

    Returns:
        (tokens, features): sums over the choices that count; zeros for a token that has none.
    """
    compute = _drawing_apart(compute, training)
    sharing = mesh.axis("tp") if "tp" in mesh.axes else None
    if sharing is None or sharing.size == 1:
        return _dispatch(hidden, experts, weights, compute, num_experts, mesh.axis("ep"), served)
    # Each of the ranks with the same tokens takes its part of them. It needs no communication; the
    # gradients, and the results, are gathered. The rest is padded by slots that no expert serves.
    num_tokens = hidden.shape[0]
    if served is None:
        served = torch.ones_like(experts, dtype=torch.bool)
    parts = [_padded(tensor, sharing.size) for tensor in (hidden, experts, weights, served)]
    mine = [split_forward_gather_backward(part, sharing, 0) for part in parts]
    is_whole = num_tokens % sharing.size == 0 and bool(served.all())
    result = _dispatch(
        *(mine[0], mine[1], mine[2], compute, num_experts, mesh.axis(EXPERT_AXES)),
        None if is_whole else mine[3],
    )
    return gather_forward_split_backward(result, sharing, 0)[:num_tokens]


def dispatch_here(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    *,
    num_experts: int,
    served: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """Do as `dispatch` where this rank has all experts, or a part of each; no communication."""
    return _here(hidden, experts, weights, _drawing_apart(compute, training), num_experts, served)


def _here(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    num_experts: int,
    served: Tensor | None,
) -> Tensor:
    slots, counts = sort_slots(experts, num_experts, served)
    rows = _TakeRows.apply(hidden, slots)
    return _added(compute(rows, counts.tolist()), weights, slots)


def _padded(tensor: Tensor, num_parts: int) -> Tensor:
    """Return a tensor with so many rows of zeros behind it that the parts are equal."""
    missing = -tensor.shape[0] % num_parts
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _dispatch(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    num_experts: int,
    axis: Axis,
    served: Tensor | None,
) -> Tensor:
    if axis.size == 1:
        return _here(hidden, experts, weights, compute, num_experts, served)
    slots, counts = sort_slots(experts, num_experts, served)
    rows = _TakeRows.apply(hidden, slots)
    # Counts of the ranks' choices for my experts: (ranks, experts of a rank). The host waits here, once.
    counts = counts.view(axis.size, num_experts // axis.size)
    num_own = [counts.shape[1]] * axis.size
    counted = exchange_pieces(
        counts.flatten(), send_sizes=num_own, receive_sizes=num_own, parallel_mode=axis
    ).view(counts.shape)
    num_sent, num_received = counts.sum(1).tolist(), counted.sum(1).tolist()
    # One name for all of them: a tensor is freed after its exchange, unless the backward needs it.
    rows = exchange_forward_exchange_backward(rows, axis, num_sent=num_sent, num_received=num_received)
    sizes = counted.tolist()
    rows = _regrouped(rows, sizes)
    rows = compute(rows, counted.sum(0).tolist())
    rows = _regrouped(rows, [list(of_expert) for of_expert in zip(*sizes, strict=True)])
    # Results return to the ranks of their tokens: the same all-to-all with the counts swapped.
    rows = exchange_forward_exchange_backward(rows, axis, num_sent=num_received, num_received=num_sent)
    return _added(rows, weights, slots)


def _drawing_apart(compute: Compute, training: bool) -> Compute:
    """Let all ranks draw different numbers in experts; in evaluation the state in force does not move on."""

    def computed(rows: Tensor, sizes: Sequence[int]) -> Tensor:
        with drawing_apart(only_if_drawn=True) if training else _evaluating():
            return compute(rows, sizes)

    return computed


def _evaluating() -> AbstractContextManager[None]:
    return seed(ParallelMode.TENSOR) if ParallelMode.TENSOR in get_seeds() else nullcontext()


def sort_slots(experts: Tensor, num_experts: int, served: Tensor | None = None) -> tuple[SlotOrder, Tensor]:
    """Return the slots in the order of their experts, and their numbers by expert, (num_experts,).

    Args:
        experts: (tokens, choices).
        num_experts: Number of experts.
        served: (tokens, choices), or None for all.
    """
    flat = experts.reshape(-1)
    if served is not None:
        flat = torch.where(served.reshape(-1), flat, num_experts)  # behind the last expert
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    if served is not None:
        order = order[: int(counts.sum())]
    row_of_slot = torch.full_like(flat, -1) if served is not None else torch.empty_like(flat)
    row_of_slot[order] = torch.arange(len(order), device=flat.device)
    return SlotOrder(order, row_of_slot.view(experts.shape), all_served=len(order) == len(flat)), counts


def _regrouped(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return rows that come in groups of groups, inner and outer exchanged: by sender, then by expert."""
    pieces = rows.split([size for group in sizes for size in group])
    num_inner = len(sizes[0])
    return torch.cat([piece for inner in range(num_inner) for piece in pieces[inner::num_inner]])


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type that sums of a tensor are computed in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _terms(rows: Tensor, slots: SlotOrder, choice: int) -> Tensor:
    """Return for each token the row of one of its choices, zeros where there is none: (tokens, features)."""
    row = slots.row_of_slot[:, choice]
    if slots.all_served:
        return rows.index_select(0, row)
    if len(rows) == 0:
        return rows.new_zeros(len(row), rows.shape[1])
    return rows.index_select(0, row.clamp(min=0)).masked_fill_((row < 0).unsqueeze(1), 0)


def _added(rows: Tensor, weights: Tensor, slots: SlotOrder) -> Tensor:
    total: Tensor = _AddByWeight.apply(rows, weights, slots)
    return total


class _TakeRows(torch.autograd.Function):
    """The token of each row; backward: the gradients of a token's rows added in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, slots: SlotOrder) -> Tensor:
        ctx.slots = slots
        return hidden.index_select(0, slots.slot_of_row // slots.num_choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slots: SlotOrder = ctx.slots
        if slots.num_choices == 1:
            return _terms(grad, slots, 0), None
        total = _terms(grad, slots, 0).to(_wide(grad))
        for choice in range(1, slots.num_choices):
            total += _terms(grad, slots, choice)
        return total.to(grad.dtype), None


class _AddByWeight(torch.autograd.Function):
    """The results of each token's choices, by weight; in the type of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, slots: SlotOrder) -> Tensor:
        ctx.slots = slots
        ctx.save_for_backward(rows, weights)
        wide = _wide(rows)
        first, *others = weights.to(wide).unsqueeze(2).unbind(1)
        total = _terms(rows, slots, 0).to(wide).mul_(first)
        for choice, factor in enumerate(others, start=1):
            total.addcmul_(_terms(rows, slots, choice), factor)
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        slots: SlotOrder = ctx.slots
        wide = _wide(rows)
        factors = weights.to(wide).reshape(-1)[slots.slot_of_row].unsqueeze(1)
        of_slots = torch.zeros(weights.numel(), dtype=wide, device=rows.device)
        grad_rows = torch.empty_like(rows)
        for part in _blocks(rows):
            slot = slots.slot_of_row[part]
            of_part = grad.index_select(0, slot // slots.num_choices).to(wide)  # memory of its own
            if ctx.needs_input_grad[1]:
                of_slots[slot] = torch.linalg.vecdot(of_part, rows[part].to(wide))
            grad_rows[part] = of_part.mul_(factors[part])
        return grad_rows, of_slots.view(weights.shape).to(weights.dtype), None


def _blocks(rows: Tensor) -> list[slice]:
    """Return parts of rows that are small enough for their results to stay in a core's cache."""
    if rows.device.type != "cpu":  # each step costs a launch there
        return [slice(None)]
    size = max(1, _BLOCK // max(1, rows.shape[1]))
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]
