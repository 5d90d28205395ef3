"""Feed-forward experts, whose products are computed for all experts of a rank at a time.

`FFNExperts` are cut between experts: a rank has whole ones, and tokens are sent to them. `TPExperts` are cut
within: a rank has a part of the inner width of all experts, and every token is sent to all ranks, which add
their results. The whole parameters are the same, so a checkpoint of one loads into the other.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.communication import (
    all_gather,
    copy_forward_reduce_backward,
    gather_forward_scatter_backward,
    reduce_forward_copy_backward,
    scatter_forward_gather_backward,
)
from colossalai.context import drawing_by_batch, drawing_expert
from colossalai.nn.layer.moe._dispatch import dispatch, dispatch_here
from colossalai.nn.layer.moe._experts import MoeExperts
from colossalai.nn.layer.moe._grouped import grouped_linear
from colossalai.nn.layer.moe._router import Routes
from colossalai.tensor import cut_dims, set_spec

Activation = Callable[[Tensor], Tensor]


class FeedForwardExperts(MoeExperts):
    """Base of both kinds: w2 dropout(activation(w1 x + b1)) + b2.

    Weights start as in 2101.03961: normal, cut off at 2, with a deviation of sqrt(0.1 / inputs); biases at 0.
    """

    w1: nn.Parameter  # (experts, d_ff, d_model), as all here of the whole
    b1: nn.Parameter  # (experts, d_ff)
    w2: nn.Parameter  # (experts, d_model, d_ff)
    b2: nn.Parameter  # (experts, d_model)

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        activation: Activation | None,
        drop_rate: float,
        *,
        cut_dim: int,
    ) -> None:
        """Draw all whole experts that this rank has something of, one by one, and keep its part.

        Args:
            num_experts: Over all ranks.
            d_model: The width of tokens.
            d_ff: The inner width.
            activation: Between the products; None for GELU.
            drop_rate: Of the dropout behind the activation, and behind the result.
            cut_dim: Which dimension is cut: 0, the experts, or 1, the inner width.
        """
        super().__init__(num_experts)
        self.activation = functional.gelu if activation is None else activation
        self.drop_rate = drop_rate
        own = self.own_experts() if cut_dim == 0 else range(num_experts)
        axes = (self.axes, ()) if cut_dim == 0 else ((), self.axes)
        layer = int(torch.randint(2**31, ()))  # see [Note: initial values of experts]
        for name, shape, dims in (
            ("w1", (d_ff, d_model), (axes[1], ())),
            ("b1", (d_ff,), (axes[1],)),
            ("w2", (d_model, d_ff), ((), axes[1])),
            ("b2", (d_model,), ((),)),
        ):
            spec = cut_dims((num_experts, *shape), [axes[0], *dims], self.mesh)
            of_one = cut_dims(shape, dims, self.mesh)
            param = nn.Parameter(torch.zeros(spec.local_shape))
            if len(shape) == 2:
                deviation = math.sqrt(0.1 / shape[1])
                for place, number in enumerate(own):
                    with drawing_expert(layer + (name == "w2"), number), torch.no_grad():
                        whole = nn.init.trunc_normal_(
                            torch.empty(shape), std=deviation, a=-2 * deviation, b=2 * deviation
                        )
                        param[place] = of_one.cut(whole)
            set_spec(param, spec)
            self.register_parameter(name, param)

    def _compute(self, rows: Tensor, sizes: Sequence[int], *, bias: bool = True) -> Tensor:
        inner = self.activation(grouped_linear(rows, self.w1, sizes, bias=self.b1))
        inner = functional.dropout(inner, self.drop_rate, self.training)
        return grouped_linear(inner, self.w2, sizes, bias=self.b2 if bias else None)


class FFNExperts(FeedForwardExperts):
    """Feed-forward experts, of which each rank holds some.

    Args:
        num_experts: Over all ranks.
        d_model: The width of tokens.
        d_ff: The inner width.
        activation: Between the products, elementwise; None for GELU.
        drop_rate: Of the dropout behind the activation, and behind the result.

    Raises:
        ValueError: The ranks do not divide `num_experts`, or `MoeExperts` refuses it.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        activation: Activation | None = None,
        drop_rate: float = 0,
    ) -> None:
        super().__init__(num_experts, d_model, d_ff, activation, drop_rate, cut_dim=0)

    def forward(self, hidden: Tensor, routes: Routes) -> Tensor:
        """See the base class."""
        return dispatch(
            hidden,
            routes.experts,
            routes.weights,
            self._compute_and_drop,
            num_experts=self.num_experts,
            mesh=self.mesh,
            served=routes.served,
            training=self.training,
        )

    def _compute_and_drop(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        return functional.dropout(self._compute(rows, sizes), self.drop_rate, self.training)


class TPExperts(FeedForwardExperts):
    """Feed-forward experts, of each of which a rank holds a part of the inner width.

    Every token goes to all ranks that share the experts: for few experts, or where ranks do not divide them.

    Args:
        num_experts: Any number.
        d_model: The width of tokens.
        d_ff: The inner width.
        activation: Between the products, elementwise; None for GELU.
        drop_rate: Of the dropout behind the activation, and behind the sum of a token's results.

    Raises:
        ValueError: The ranks do not divide `d_ff`, or `MoeExperts` refuses `num_experts`.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        activation: Activation | None = None,
        drop_rate: float = 0,
    ) -> None:
        super().__init__(num_experts, d_model, d_ff, activation, drop_rate, cut_dim=1)

    def forward(self, hidden: Tensor, routes: Routes) -> Tensor:
        """See the base class."""
        num_tokens = len(hidden)
        experts, weights, served = routes.experts, routes.weights, routes.served
        everyone, all_experts, all_weights, all_served = hidden, experts, weights, served
        if "tp" in self.axes:  # those that have the same tokens compute with other parts of the experts
            everyone, all_weights = (
                copy_forward_reduce_backward(tensor, self.mesh.axis("tp")) for tensor in (hidden, weights)
            )
        if "ep" in self.axes:
            axis = self.mesh.axis("ep")
            counts = all_gather(torch.tensor([num_tokens], device=hidden.device), 0, axis)
            missing = (
                int(counts.max()) - num_tokens
            )  # padding rows, which no expert serves, make the parts equal
            served = torch.ones_like(experts, dtype=torch.bool) if served is None else served
            everyone, all_weights = (
                gather_forward_scatter_backward(functional.pad(tensor, (0, 0, 0, missing)), axis, 0)
                for tensor in (everyone, all_weights)
            )
            all_experts, all_served = (
                all_gather(functional.pad(tensor, (0, 0, 0, missing)), 0, axis)
                for tensor in (experts, served)
            )
        total = dispatch_here(
            everyone,
            all_experts,
            all_weights,
            self._without_bias,
            num_experts=self.num_experts,
            served=all_served,
            training=self.training,
        )
        if "tp" in self.axes:
            total = reduce_forward_copy_backward(total, self.mesh.axis("tp"))
        if "ep" in self.axes:
            total = scatter_forward_gather_backward(total, self.mesh.axis("ep"), 0)[:num_tokens]
        # The second bias is whole on each rank, and added to the rank's own tokens.
        shares = weights if served is None else weights * served
        by_expert = shares.new_zeros(num_tokens, self.num_experts).scatter_add(1, experts, shares)
        total = total + (by_expert @ self.b2.to(by_expert.dtype)).to(total.dtype)
        with self._state():
            return functional.dropout(total, self.drop_rate, self.training)

    def _state(self) -> AbstractContextManager[Any]:
        return drawing_by_batch() if self.drop_rate > 0 and self.training else nullcontext()

    def _without_bias(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._compute(rows, sizes, bias=False)


def build_ffn_experts(
    num_experts: int,
    d_model: int,
    d_ff: int,
    activation: Activation | None = None,
    drop_rate: float = 0,
) -> FeedForwardExperts:
    """Return `FFNExperts` where the ranks divide the experts, else `TPExperts`.

    Args:
        num_experts: Over all ranks.
        d_model: The width of tokens.
        d_ff: The inner width.
        activation: Between the products, elementwise; None for GELU.
        drop_rate: Of the dropouts.

    Raises:
        ValueError: The ranks divide neither `num_experts` nor `d_ff`.
    """
    num_ranks = MoeExperts(num_experts).num_ranks
    if num_experts % num_ranks == 0:
        return FFNExperts(num_experts, d_model, d_ff, activation, drop_rate)
    if d_ff % num_ranks == 0:
        return TPExperts(num_experts, d_model, d_ff, activation, drop_rate)
    raise ValueError(
        f"{num_ranks} ranks share experts, and divide neither num_experts={num_experts} nor d_ff={d_ff}: "
        f"choose a multiple of {num_ranks} for one of them"
    )
