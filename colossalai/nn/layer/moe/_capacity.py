"""The capacity of experts: how many tokens of a rank each of them serves, and which (2006.16668)."""

import math

import torch
from torch import Tensor


def capacity_of(*, num_tokens: int, num_experts: int, num_choices: int, factor: float, least: int) -> int:
    """Return how many choices an expert serves: choices x tokens x factor / experts, rounded up to be even.

    Args:
        num_tokens: The tokens of this rank.
        num_experts: Over all ranks.
        num_choices: The choices of a token.
        factor: 1 if each expert serves its share and no more.
        least: What it is at least.
    """
    from fractions import Fraction  # which imports decimal: jobs without experts do without

    # As a fraction: 20 x 1.1 is 22, and a little more in floating point.
    share = math.ceil(Fraction(str(factor)) * num_choices * num_tokens / num_experts)
    capacity = max(share, least)
    return capacity + capacity % 2


def serve(experts: Tensor, num_experts: int, capacity: int, *, order: Tensor | None = None) -> Tensor:
    """Return which choices are served, (tokens, choices).

    First choices come before all second ones, and so on; among equals who comes first is served first.

    Args:
        experts: (tokens, choices): the chosen experts.
        num_experts: How many there are.
        capacity: How many choices an expert serves.
        order: (tokens,): the tokens in the order in which they come; default: as they are.
    """
    num_tokens, num_choices = experts.shape
    if order is not None:
        served = torch.empty_like(experts, dtype=torch.bool)
        served[order] = serve(experts[order], num_experts, capacity)
        return served
    queue = experts.t().reshape(-1)  # by choice, then by token
    by_expert = torch.argsort(queue, stable=True)
    counts = torch.bincount(queue, minlength=num_experts)
    before = (counts.cumsum(0) - counts)[queue[by_expert]]  # how many there are for smaller experts
    places = torch.empty_like(queue)
    places[by_expert] = torch.arange(len(queue), device=queue.device) - before
    return (places < capacity).view(num_choices, num_tokens).t()
