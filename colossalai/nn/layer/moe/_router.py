"""Routers: from the logits of a gate to the experts of each token, and by how much their results count.

Logits are converted to float32 or better in any model: a softmax over many experts in 16 bits cannot
distinguish the second from the third. Noise on the logits tries experts that are nearly chosen. Ranks that
hold different tokens draw different noise, those that share tokens (along `tp`) the same
(`context.drawing_by_batch`).

The capacity of an expert is the number of choices of a rank that it serves (2006.16668).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossalai.context import drawing_by_batch

Noise = Callable[[Tensor], Tensor]
"""From logits to logits with noise."""


@dataclass(frozen=True)
class Routes:
    """Result of a router for T tokens.

    Attributes:
        experts: (T, choices): the numbers of the chosen experts, the first choice first.
        weights: (T, choices): weights of their results.
        served: (T, choices): whether a choice counts; None if all do.
        probabilities: (T, experts): the probabilities of the choice, with noise.
        logits: (T, experts): without noise.
    """

    experts: Tensor
    weights: Tensor
    served: Tensor | None
    probabilities: Tensor
    logits: Tensor


class MoeRouter(nn.Module):
    """Base of the routers: the experts with the greatest probabilities, as far as they have capacity.

    Args:
        k_value: Number of experts of a token.
        capacity_factor_train: Capacity of an expert in training: this factor times its even share, rounded up
            to an even number; counted on each rank separately.
        capacity_factor_eval: The same in evaluation.
        min_capacity: Lower bound of the capacity.
        noisy_func: Puts noise on the logits in training; None for none.
        drop_tks: Whether choices beyond the capacity are dropped, those that come last; False: all count.
        z_loss_weight: Factor of the mean squared logsumexp of the logits (2202.08906) in the auxiliary loss.

    Raises:
        ValueError: `k_value` or a capacity factor is not positive, or `min_capacity` or `z_loss_weight` is
            negative.
    """

    def __init__(
        self,
        k_value: int,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: Noise | None = None,
        drop_tks: bool = True,
        *,
        z_loss_weight: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("k_value", k_value),
            ("capacity_factor_train", capacity_factor_train),
            ("capacity_factor_eval", capacity_factor_eval),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be greater than 0")
        for name, value in (("min_capacity", min_capacity), ("z_loss_weight", z_loss_weight)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must not be negative")
        self.k_value = k_value
        self.capacity_factor_train = capacity_factor_train
        self.capacity_factor_eval = capacity_factor_eval
        self.min_capacity = min_capacity
        self.noisy_func = noisy_func
        self.drop_tks = drop_tks
        self.z_loss_weight = z_loss_weight

    def forward(self, logits: Tensor) -> Routes:
        """Choose experts by logits (tokens, experts).

        Raises:
            ValueError: `logits` has fewer experts than `k_value`, or not two dimensions.
        """
        if logits.dim() != 2 or logits.shape[1] < self.k_value:
            raise ValueError(
                f"{type(self).__name__} got logits of shape {tuple(logits.shape)}; it must be (tokens, "
                f"experts), of at least k = {self.k_value} experts"
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        noisy = logits
        if self.training and self.noisy_func is not None:
            with drawing_by_batch():
                noisy = self.noisy_func(logits)
        probabilities = noisy.softmax(-1)
        experts = self.choose(probabilities)
        weights = self.weigh(probabilities.gather(1, experts))
        return Routes(experts, weights, self.served(experts, logits.shape[1]), probabilities, logits)

    @property
    def balances_by_loss(self) -> bool:
        """Whether the auxiliary loss is to make the use of experts even."""
        return True

    def choose(self, probabilities: Tensor) -> Tensor:
        """Return the chosen experts, (tokens, choices); the one with the smaller number if two are equal."""
        return greatest(probabilities, self.k_value)

    def weigh(self, chosen: Tensor) -> Tensor:
        """Return the weights of the chosen experts, (tokens, choices), by their probabilities: just these."""
        return chosen

    def arrival(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return the order in which tokens come to their experts, (tokens,); None: as they are."""
        return None

    def served(self, experts: Tensor, num_experts: int) -> Tensor | None:
        """Return which choices (tokens, choices) are served; None if all are in any case."""
        if not self.drop_tks:
            return None
        num_tokens = experts.shape[0]
        factor = self.capacity_factor_train if self.training else self.capacity_factor_eval
        capacity = capacity_of(
            num_tokens=num_tokens,
            num_experts=num_experts,
            num_choices=self.k_value,
            factor=factor,
            least=self.min_capacity,
        )
        if capacity >= num_tokens:
            return None
        return serve(experts, num_experts, capacity, order=self.arrival(num_tokens, experts.device))

    def extra_repr(self) -> str:
        """See the base class."""
        capacity = f"capacity_factor={self.capacity_factor_train}/{self.capacity_factor_eval}"
        return f"k={self.k_value}, {capacity if self.drop_tks else 'drop_tks=False'}"


@torch.no_grad()
def greatest(scores: Tensor, num_choices: int) -> Tensor:
    """Return the columns of the greatest values of each row, the greatest first: (rows, choices).

    Of equal ones the first comes first, which `topk` does not promise.
    """
    left, found = scores.detach(), []
    for number in range(num_choices):
        found.append(left.argmax(1, keepdim=True))
        if number + 1 < num_choices:
            left = left.scatter(1, found[-1], -torch.inf)
    return torch.cat(found, 1)


class NormalNoiseGenerator:
    """Adds normal noise of mean 0 and standard deviation 1 / experts to logits (1701.06538).

    Args:
        num_experts: The number of experts.

    Raises:
        ValueError: `num_experts` is not positive.
    """

    def __init__(self, num_experts: int) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; it must be at least 1")
        self.num_experts = num_experts

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits of any shape with noise."""
        return logits + torch.randn_like(logits) / self.num_experts


class UniformNoiseGenerator:
    """Multiplies logits by uniform noise from 1 - eps to 1 + eps: the jitter of 2101.03961.

    Args:
        eps: Largest deviation of the factors from 1.

    Raises:
        ValueError: `eps` is negative.
    """

    def __init__(self, eps: float = 1e-2) -> None:
        if eps < 0:
            raise ValueError(f"eps is {eps}; it must not be negative")
        self.eps = eps

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits of any shape with noise."""
        return logits * torch.empty_like(logits).uniform_(1 - self.eps, 1 + self.eps)


def capacity_of(*, num_tokens: int, num_experts: int, num_choices: int, factor: float, least: int) -> int:
    """Return the capacity of an expert: choices x tokens x factor / experts, rounded up to an even number.

    Args:
        num_tokens: The tokens of this rank.
        num_experts: Over all ranks.
        num_choices: The choices of a token.
        factor: 1 if each expert serves its share and no more.
        least: Lower bound.
    """
    from fractions import Fraction  # which imports decimal: jobs without experts do without

    # As a fraction: 20 x 1.1 is 22, and a little more in floating point.
    share = math.ceil(Fraction(str(factor)) * num_choices * num_tokens / num_experts)
    capacity = max(share, least)
    return capacity + capacity % 2


def serve(experts: Tensor, num_experts: int, capacity: int, *, order: Tensor | None = None) -> Tensor:
    """Return which choices are served, (tokens, choices).

    First choices come before all second ones, and so on; equal ones are served in the order of tokens.

    Args:
        experts: (tokens, choices): the chosen experts.
        num_experts: Number of experts.
        capacity: Number of choices that an expert serves.
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
    before = (counts.cumsum(0) - counts)[
        queue[by_expert]
    ]  # number of choices of experts with smaller numbers
    places = torch.empty_like(queue)
    places[by_expert] = torch.arange(len(queue), device=queue.device) - before
    return (places < capacity).view(num_choices, num_tokens).t()
