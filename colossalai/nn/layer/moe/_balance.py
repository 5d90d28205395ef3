"""Balance of experts: an auxiliary loss over the tokens of all ranks, or a bias that follows the load.

With f_e the fraction of all choices that are e, and p_e the probability of e, the loss is (2101.03961)

    E  sum_e  f_e  mean over tokens of p_e

over the T tokens of the batch, which is 1 for even use. It is not linear in the batch: f_e is of all tokens.
So the ranks along `dp`, R of them, add up E + 1 numbers, their choices and tokens, through which no gradient
goes, and a rank's own loss is

    E  sum_e  f_e  (sum of p_e over the tokens of the rank)  R / T

The mean over the ranks is the loss of the batch, for any numbers of tokens; so the average of gradients is
its gradient. Under accumulation, and in a pipeline, it is the loss of each microbatch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from colossalai.communication import all_reduce
from colossalai.context import Axis
from colossalai.nn.layer.moe._router import Routes
from colossalai.nn.layer.moe._top import TopKRouter


def auxiliary_loss(routes: Routes, replicas: Axis, *, balance: bool = True, z_weight: float = 0.0) -> Tensor:
    """Return this rank's loss, such that the mean over the ranks is that of their tokens together.

    Args:
        routes: The router's result for the tokens of this rank.
        replicas: The ranks with other tokens; they all call this.
        balance: Whether uneven use counts.
        z_weight: Factor of the mean squared logsumexp of the logits.
    """
    num_experts = routes.probabilities.shape[1]
    if not balance and z_weight == 0.0:
        return routes.probabilities.new_zeros(())
    with torch.no_grad():
        counts = torch.bincount(routes.experts.reshape(-1), minlength=num_experts)
        counts = torch.cat([counts, counts.new_tensor([len(routes.experts)])])
        if replicas.size > 1:
            counts = all_reduce(counts, replicas)
        num_tokens = counts[-1].clamp(min=1)
        share = replicas.size / num_tokens.to(routes.probabilities.dtype)
    loss = routes.probabilities.new_zeros(())
    if balance:
        num_choices = routes.experts.shape[1] * num_tokens
        fractions = counts[:-1].to(routes.probabilities.dtype) / num_choices
        loss = loss + num_experts * (fractions * routes.probabilities.sum(0)).sum() * share
    if z_weight > 0.0:
        loss = loss + z_weight * routes.logits.logsumexp(-1).square().sum() * share
    return loss


def bias_updates(module: nn.Module, replicas: Axis) -> tuple[Callable[[], None], ...]:
    """Return the updates of the biases of a model's routers after each step; empty without such routers.

    Args:
        module: The model, or a stage of it.
        replicas: The ranks with other tokens.
    """
    routers = [part for part in module.modules() if isinstance(part, TopKRouter)]
    return (partial(_move_biases, routers, replicas),) if routers else ()


def _move_biases(routers: Sequence[TopKRouter], replicas: Axis) -> None:
    """Move the biases of routers against the load of a step; see [Note: balance without a loss]."""
    moved = [router for router in routers if router.bias_update_rate]
    if not moved:
        return
    loads = [router.take_load() for router in moved]
    total = torch.cat(loads)
    if replicas.size > 1:
        total = all_reduce(total, replicas)  # of the numbers of tokens; all replicas call it after each step
    for router, load in zip(moved, total.split([len(load) for load in loads]), strict=True):
        router.move_bias(load)
