"""Routers to one expert (2101.03961), to two (2006.16668), and to k without a capacity.

[Note: balance without a loss]
A bias on the scores, which affects the choice of experts but not their weights, moves after each step against
the load: up by `bias_update_rate` for an expert with less than the mean load, down for one with more
(2408.15664, DeepSeek-V3). Balance needs no gradient. The load is counted over all ranks, in the forwards of a
step; a recomputed forward does not count again.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor

from colossalai.context import drawing_by_batch, is_in_backward
from colossalai.nn.layer.moe._router import MoeRouter, Noise, Routes, greatest
from colossalai.tensor import keep_dtype


class Top1Router(MoeRouter):
    """Sends each token to one expert, weighted by its probability (Switch).

    Args:
        capacity_factor_train: See `MoeRouter`, as for the other arguments without a description.
        capacity_factor_eval: See there.
        min_capacity: See there.
        select_policy: Which tokens an expert serves if there are too many in training: the "first", or
            "random" ones. In evaluation the first, so that it gives the same again.
        noisy_func: See there.
        drop_tks: See there.
        z_loss_weight: See there.

    Raises:
        ValueError: `select_policy` is another one, or `MoeRouter` refuses an argument.
    """

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        select_policy: Literal["first", "random"] = "first",
        noisy_func: Noise | None = None,
        drop_tks: bool = True,
        *,
        z_loss_weight: float = 0.0,
    ) -> None:
        super().__init__(
            1,
            capacity_factor_train,
            capacity_factor_eval,
            min_capacity,
            noisy_func,
            drop_tks,
            z_loss_weight=z_loss_weight,
        )
        if select_policy not in ("first", "random"):
            raise ValueError(f"select_policy is {select_policy!r}; it must be 'first' or 'random'")
        self.select_policy = select_policy

    def arrival(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """See the base class."""
        if self.select_policy == "first" or not self.training:
            return None
        with drawing_by_batch():
            return torch.randperm(num_tokens, device=device)


class Top2Router(MoeRouter):
    """Sends each token to two experts, weighted by their probabilities (GShard).

    Args:
        capacity_factor_train: See `MoeRouter`, as for all others.
        capacity_factor_eval: See there.
        min_capacity: See there.
        noisy_func: See there.
        drop_tks: See there.
        z_loss_weight: See there.

    Raises:
        ValueError: `MoeRouter` refuses an argument.
    """

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: Noise | None = None,
        drop_tks: bool = True,
        *,
        z_loss_weight: float = 0.0,
    ) -> None:
        super().__init__(
            2,
            capacity_factor_train,
            capacity_factor_eval,
            min_capacity,
            noisy_func,
            drop_tks,
            z_loss_weight=z_loss_weight,
        )


class TopKRouter(MoeRouter):
    """Sends each token to k experts, all of which serve it unless `drop_tks` is set.

    Args:
        k: Number of experts of a token.
        capacity_factor_train: See `MoeRouter`, as for the other arguments without a description; used with
            `drop_tks`.
        capacity_factor_eval: See there.
        min_capacity: See there.
        noisy_func: See there.
        drop_tks: See there.
        norm_topk_prob: Divide the weights of a token by their sum.
        z_loss_weight: See there.
        bias_update_rate: Change of an expert's bias after each step, for example 0.001; 0 for no bias. See
            [Note: balance without a loss].
        num_experts: The number of experts; needed for the bias.

    Raises:
        ValueError: `bias_update_rate` is given without `num_experts`, or `MoeRouter` refuses an argument.
    """

    e_score_correction_bias: Tensor | None
    """(experts,), float32 under every precision: in bfloat16 a step of 0.001 would be lost."""

    def __init__(
        self,
        k: int,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: Noise | None = None,
        drop_tks: bool = False,
        *,
        norm_topk_prob: bool = True,
        z_loss_weight: float = 0.0,
        bias_update_rate: float = 0.0,
        num_experts: int | None = None,
    ) -> None:
        super().__init__(
            k,
            capacity_factor_train,
            capacity_factor_eval,
            min_capacity,
            noisy_func,
            drop_tks,
            z_loss_weight=z_loss_weight,
        )
        if bias_update_rate < 0 or (bias_update_rate > 0 and num_experts is None):
            raise ValueError(
                f"bias_update_rate is {bias_update_rate} and num_experts {num_experts}: a bias needs a rate "
                "that is not negative, and the number of experts"
            )
        self.norm_topk_prob = norm_topk_prob
        self.bias_update_rate = bias_update_rate
        bias = torch.zeros(num_experts or 0, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", keep_dtype(bias) if bias_update_rate else None)
        self._load: Tensor | None = None  # no buffer: those are given from the first rank to all

    def forward(self, logits: Tensor) -> Routes:
        """See the base class."""
        routes = super().forward(logits)
        if self.bias_update_rate and self.training and torch.is_grad_enabled() and not is_in_backward():
            load = torch.bincount(routes.experts.reshape(-1), minlength=logits.shape[1])
            self._load = load if self._load is None else self._load + load
        return routes

    @property
    def balances_by_loss(self) -> bool:
        """See the base class; where a bias does, the loss need not."""
        return not self.bias_update_rate

    def choose(self, probabilities: Tensor) -> Tensor:
        """See the base class; with a bias, by probability and bias."""
        bias = self.e_score_correction_bias
        return greatest(probabilities if bias is None else probabilities + bias, self.k_value)

    def weigh(self, chosen: Tensor) -> Tensor:
        """See the base class."""
        return chosen / chosen.sum(-1, keepdim=True) if self.norm_topk_prob else chosen

    def take_load(self) -> Tensor:
        """Return how often each expert was chosen since the last call, (experts,); there is a bias."""
        bias = self.e_score_correction_bias
        assert bias is not None, "the load is counted where there is a bias"
        load, self._load = self._load, None
        return torch.zeros_like(bias, dtype=torch.long) if load is None else load

    @torch.no_grad()
    def move_bias(self, load: Tensor) -> None:
        """Move the bias against the load of a step, (experts,), that of all ranks."""
        assert self.e_score_correction_bias is not None, "there is a load where there is a bias"
        ahead = load.double() - load.double().mean()
        self.e_score_correction_bias -= self.bias_update_rate * ahead.sign().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if before is not None and moved is not None:
            if moved.dtype != torch.float32:
                moved = moved.float() if before.is_meta else before.to(moved.device)
            self.e_score_correction_bias = keep_dtype(moved)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_load": None}
