"""Weights of losses: a mean over tokens is the mean over all ranks, microbatches and backwards of a window.

[Note: sums until the step]
If the losses l of backwards, microbatches and ranks are means over different numbers w of labels, the loss of
a window is L = sum(w l) / W with W = sum(w), over the replicas and over all backwards since `zero_grad`. W is
known only after the last of them. So a backward starts from w / u instead of 1, and the gradients of sums add
up, in units u. The data methods compute their mean over the R replicas. Before the first use of the gradients
(clipping, the step) one all-reduce of two numbers gives W, and they are multiplied by R u / W: once, in
`Gradients.prepare`, together with the division by the loss scale.

The unit is W / R of the window before, rounded up to a power of two; in the first window, the largest first
weight of a replica. So sums are as large as means would be, which float16 needs. As u is a power of two,
gradients have the same digits with any unit, except for overflow and underflow.

Without any label (W = 0) gradients are 0, and the step is made, as in one process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from colossalai.amp._loss_scaling import LossScaler
from colossalai.communication import all_reduce, all_reduce_in_place
from colossalai.context import Axis

Weight = Tensor | float
GivenLoss = Tensor | tuple[Tensor, Weight]


@dataclass(frozen=True, eq=False)
class LossTerm:
    """The given loss of a batch.

    Attributes:
        value: The mean over the batch; with `is_sum` the sum. One value.
        weight: Number of labels or samples of the mean, as a scalar in float64 (on MPS in float32); None: not
            given.
        is_sum: Whether `value` is a sum.
    """

    value: Tensor
    weight: Tensor | None = None
    is_sum: bool = False

    @property
    def mean(self) -> Tensor:
        """The mean, detached; 0 for a weight of 0."""
        value = self.value.detach()
        if self.weight is None:
            return value
        return self.total.div(self.weight).masked_fill(self.weight == 0, 0.0).to(value.dtype)

    @property
    def total(self) -> Tensor:
        """The sum, detached, in the dtype of the weight."""
        assert self.weight is not None
        value = self.value.detach().to(self.weight.dtype)
        return value if self.is_sum else (value * self.weight).masked_fill(self.weight == 0, 0.0)


def check_loss(loss: torch.Tensor, *, is_seed_given: bool = False) -> None:
    """Refuse a loss without a backward.

    Args:
        loss: The loss.
        is_seed_given: Whether the caller passes the gradient of a loss of several elements.

    Raises:
        ValueError: `loss` has several elements, or was computed without a graph.
    """
    if loss.numel() != 1 and not is_seed_given:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}; it must be one number: take its mean first"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was computed under torch.no_grad(), from detached tensors, or from "
            "parameters that are all frozen (requires_grad=False)"
        )


def read_loss(loss: GivenLoss, weight: Weight | None = None) -> LossTerm:
    """Return the term of a given loss.

    Args:
        loss: A mean, or a pair (sum, count).
        weight: Number of labels or samples of the mean; None: it has no weight.

    Raises:
        ValueError: `loss` is neither a tensor nor a pair, a weight is negative or not one number, or a pair
            has a second weight.
    """
    if isinstance(loss, Tensor):
        if weight is None:
            return LossTerm(loss)
        return LossTerm(_scalar(loss), _weight_on(loss.device, weight))
    if not (isinstance(loss, tuple | list) and len(loss) == 2 and isinstance(loss[0], Tensor)):
        raise ValueError(
            f"the loss is {loss!r:.80}; it must be the tensor that the criterion returned: None, .item() and "
            "float() have no gradient. It may be a pair of a sum, a tensor, and its count, too"
        )
    if weight is not None:
        raise ValueError("a loss (sum, count) has its weight, the count: leave weight=... out")
    return LossTerm(_scalar(loss[0]), _weight_on(loss[0].device, loss[1]), is_sum=True)


def _scalar(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"a loss with a weight has shape {tuple(loss.shape)}; it must have one value: the mean, or the "
            "sum in a pair (sum, count)"
        )
    return loss.reshape(())


def _weight_on(device: torch.device, weight: Any) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if isinstance(weight, Tensor) and weight.numel() == 1:
        found = weight.detach().reshape(()).to(device=device, dtype=dtype)
        is_known = weight.device.type == "cpu"  # the value of a device tensor would be waited for
    elif is_number:
        found, is_known = torch.tensor(float(weight), device=device, dtype=dtype), True
    else:
        raise ValueError(
            f"the weight of a loss is {weight!r}; it must be one number, such as a count of labels"
        )
    if is_known and not 0 <= float(weight) < math.inf:
        raise ValueError(f"the weight of a loss is {float(weight):g}; it must be at least 0, and finite")
    return found


class LossKind(Enum):
    """The kind of the losses whose gradients an optimizer holds."""

    NOTHING = auto()
    MEANS = auto()
    SUMS = auto()  # losses with weights, by which their gradients have not been divided
    SPENT = auto()  # gradients have been divided, or stepped with, and not been cleared


class LossWeights:
    """The weights of the losses whose gradients an optimizer holds; see [Note: sums until the step].

    Args:
        scaler: The loss scaler, which keeps the unit: optimizers that share a backward share both.
        replicas: The ranks over which gradients are averaged; None for this process alone.

    Attributes:
        kind: The kind of the losses.
        replicas: As given.
        mean_loss: The mean of the losses of the last window over all replicas, a scalar; None if they had no
            weights.
        are_used: Whether the losses of the present window have weights, also after the gradients are divided.
    """

    def __init__(self, scaler: LossScaler, replicas: Axis | None) -> None:
        self.mean_loss: Tensor | None = None
        self.are_used = False
        self.replicas = replicas
        self._scaler = scaler
        self.kind = LossKind.NOTHING
        self._sums: Tensor | None = None  # (2,): the weights and the weighted losses on this rank
        self._next_unit: Tensor | None = None

    def add(self, weight: Tensor | None, total: Tensor | None, *, is_own: bool) -> None:
        """Record a backward.

        Args:
            weight: The weight of its loss, None if it has none.
            total: The loss times the weight.
            is_own: Whether this optimizer runs it, rather than another one of the same model.

        Raises:
            ValueError: Weighted losses would add to other losses, or to gradients that have been divided.
        """
        if self.kind is LossKind.SPENT and not is_own:
            return  # it adds to gradients that will be cleared
        if weight is None:
            if self.kind is LossKind.SUMS:
                raise ValueError(_MIXED)
            self.kind, self.are_used = LossKind.MEANS, False
            return
        if self.kind is LossKind.MEANS:
            raise ValueError(_MIXED)
        if self.kind is LossKind.SPENT:
            raise ValueError(
                "the gradients have been divided by the weight of their losses already (by clipping, or by a "
                "step): clip after the last backward of a window only, and call optimizer.zero_grad() "
                "before the next one"
            )
        assert total is not None
        self.kind, self.are_used = LossKind.SUMS, True
        sums = torch.stack([weight, total])
        self._sums = sums if self._sums is None else self._sums + sums

    def unit(self, weight: Tensor) -> Tensor:
        """Return the unit of weights; at the first call all replicas agree on it: one all-reduce of a number.

        Args:
            weight: The first weight on this rank.
        """
        if self._scaler.weight_unit is None:
            if self.replicas is not None:
                weight = all_reduce(weight, self.replicas, dist.ReduceOp.MAX)  # all replicas: first weights
            self._scaler.weight_unit = _power_of_two(weight, torch.ones_like(weight))
        self._scaler.weight_unit = self._scaler.weight_unit.to(weight)  # after loading it is on the host
        return self._scaler.weight_unit

    def adopt_unit(self, unit: Tensor) -> None:
        """Use the unit that other ranks have agreed on, if there is none here."""
        if self._scaler.weight_unit is None:
            self._scaler.weight_unit = unit

    def factor(self) -> Tensor | None:
        """Return the factor R u / W from sums to means; None if there are no sums; collective over replicas.

        One all-reduce of two numbers, which also gives `mean_loss`.
        """
        self.mean_loss = self._next_unit = None
        if self.kind is not LossKind.SUMS:
            return None
        assert self._sums is not None
        num_replicas = 1 if self.replicas is None else self.replicas.size
        sums = self._sums.clone()
        if self.replicas is not None:
            all_reduce_in_place(sums, self.replicas)  # of two numbers, before the first use of gradients
        weight, total = sums.unbind()
        unit = self.unit(weight)
        self.mean_loss = (total / weight).masked_fill(weight == 0, 0.0)
        self._next_unit = _power_of_two(weight / num_replicas, unit)
        return (num_replicas * unit / weight).masked_fill(weight == 0, 0.0)

    def spend(self) -> None:
        """Record that the gradients have been divided, or stepped with."""
        self.kind, self._sums = LossKind.SPENT, None

    def forget(self) -> None:
        """Record that there are no gradients."""
        self.kind, self._sums, self.are_used = LossKind.NOTHING, None, False

    def renew_unit(self) -> None:
        """Use the unit from the last window; no optimizer that shares it may have weighted gradients."""
        if self._next_unit is not None:
            self._scaler.weight_unit = self._next_unit


_MIXED = (
    "losses with a weight and losses without one add to the same gradients: pass weight=... (or let the "
    "criterion return (sum, count)) with every backward between two optimizer.zero_grad(), or with none"
)


def _power_of_two(value: Tensor, otherwise: Tensor) -> Tensor:
    """Return a power of two from `value` to twice it; `otherwise` if it is 0."""
    safe = torch.where(value > 0, value, torch.ones_like(value))
    mantissa, _ = torch.frexp(safe)
    return torch.where(value > 0, safe / mantissa, otherwise)


class Silenced:
    """Context in which the backward of a mean without weight gives zeros for any value.

    The mean over no labels is 0 / 0, and so is its gradient; times the weight 0 that is still NaN. So the
    gradients of the single numbers that a backward visits first, up to and including the first tensor of
    several elements, are set to 0. With a weight above 0 nothing changes.

    Args:
        loss: The mean.
        weight: Its weight.
    """

    def __init__(self, loss: Tensor, weight: Tensor) -> None:
        self._root = loss.grad_fn
        self._is_nothing = weight == 0  # a tensor: reading its value would wait for the device
        self._handles: list[RemovableHandle] = []
        self._seen: set[Node] = set()

    def __enter__(self) -> None:
        if self._root is not None:
            self._watch(self._root)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, node: Node) -> None:
        if node in self._seen:
            return
        self._seen.add(node)

        def silence(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            if all(grad is None or grad.numel() == 1 for grad in grads):
                for child, _ in node.next_functions:
                    if child is not None:
                        self._watch(child)
            return tuple(None if grad is None else grad.masked_fill(self._is_nothing, 0.0) for grad in grads)

        self._handles.append(node.register_prehook(silence))
