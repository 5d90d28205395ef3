"""Layers that send each token to a few experts."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.communication import outside_graphs
from colossalai.context import MOE_CONTEXT
from colossalai.nn.layer.moe._balance import auxiliary_loss
from colossalai.nn.layer.moe._experts import Experts, MoeExperts
from colossalai.nn.layer.moe._losses import AddsLosses
from colossalai.nn.layer.moe._router import MoeRouter, Noise, NormalNoiseGenerator, UniformNoiseGenerator
from colossalai.nn.layer.moe._top import Top1Router, Top2Router, TopKRouter


class TokenGate(nn.Module):
    """The linear layer whose outputs a router chooses by, in float32 or better; without bias.

    Args:
        dim_model: The width of tokens.
        num_experts: The number of experts.
    """

    def __init__(self, dim_model: int, num_experts: int) -> None:
        super().__init__()
        deviation = math.sqrt(0.1 / dim_model)  # 2101.03961
        self.weight = nn.Parameter(torch.empty(num_experts, dim_model))
        nn.init.trunc_normal_(self.weight, std=deviation, a=-2 * deviation, b=2 * deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (tokens, dim_model) to (tokens, experts)."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return functional.linear(tokens.to(wide), self.weight.to(wide))


class MoeLayer(AddsLosses):
    """Sends each token to the experts that a router chooses, and adds their results by weight.

    A router, and experts, may be shared by several layers: only the gate is the layer's own. In training the
    auxiliary loss is left to `MoeLoss`, by way of `moe_env`; in evaluation it is zero.

    Args:
        dim_model: The width of tokens.
        num_experts: The number of experts, that of `experts`.
        router: Chooses.
        experts: Compute.

    Raises:
        ValueError: `router` is no `MoeRouter`, or `experts` are none of this package, or not `num_experts`.
    """

    def __init__(self, dim_model: int, num_experts: int, router: MoeRouter, experts: MoeExperts) -> None:
        super().__init__()
        if not isinstance(router, MoeRouter):
            raise ValueError(
                f"router is a {type(router).__name__}; it must be a MoeRouter, as Top1Router(), Top2Router() "
                "or TopKRouter(k)"
            )
        if not isinstance(experts, MoeExperts):
            raise ValueError(
                f"experts is a {type(experts).__name__}; it must be Experts(expert=..., num_experts=...), "
                "FFNExperts or TPExperts"
            )
        if experts.num_experts != num_experts:
            raise ValueError(
                f"num_experts is {num_experts}, and experts are {experts.num_experts}: both must be the same"
            )
        self.dim_model = dim_model
        self.gate = TokenGate(dim_model, num_experts)
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim_model) to the same shape.

        Raises:
            ValueError: The last dimension of `x` is not `dim_model`.
        """
        if x.shape[-1] != self.dim_model:
            raise ValueError(
                f"MoeLayer got an input of shape {tuple(x.shape)}: its last dimension must be dim_model = "
                f"{self.dim_model}; it takes whole features, also where a layer before it cuts them"
            )
        result: Tensor = outside_graphs(self._send)(x)
        return result

    def _send(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.router(self.gate(tokens))
        result: Tensor = self.experts(tokens, routes)
        loss = routes.probabilities.new_zeros(())
        if self.training:
            loss = auxiliary_loss(
                routes,
                self.experts.mesh.axis("dp"),
                balance=self.router.balances_by_loss,
                z_weight=self.router.z_loss_weight,
            )
        MOE_CONTEXT.add_loss(loss, layer=self)
        return result.reshape(x.shape)


class MoeModule(nn.Module):
    """A `MoeLayer` with router and experts of its own, and optionally a residual expert for all tokens.

    With `use_residual` the results of the experts and of the residual expert are added, by two weights of a
    softmax over a linear layer for each token (2201.05596).

    Args:
        dim_model: The width of tokens.
        num_experts: The number of experts.
        top_k: Number of experts of a token: `Top1Router`, `Top2Router`, or `TopKRouter` with a capacity.
        capacity_factor_train: See `MoeRouter`.
        capacity_factor_eval: See `MoeRouter`.
        min_capacity: See `MoeRouter`.
        noisy_policy: "Jitter" for `UniformNoiseGenerator`, "Gaussian" for `NormalNoiseGenerator`, or None.
        drop_tks: See `MoeRouter`.
        use_residual: Whether there is a residual expert.
        residual_instance: Residual expert. Default: `expert_cls(**expert_args)`.
        expert_instance: The experts; default: `Experts(expert_cls, num_experts, **expert_args)`.
        expert_cls: The class of an expert.
        expert_args: Arguments of `expert_cls`.

    Raises:
        ValueError: `expert_instance` and `expert_cls` are both left out, `residual_instance` is given without
            `use_residual`, or `noisy_policy` is none of these.
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
        residual_instance: nn.Module | None = None,
        expert_instance: MoeExperts | None = None,
        expert_cls: type[nn.Module] | None = None,
        **expert_args: Any,
    ) -> None:
        super().__init__()
        if expert_instance is None and expert_cls is None:
            raise ValueError("MoeModule needs experts: pass expert_cls and its arguments, or expert_instance")
        if residual_instance is not None and not use_residual:
            raise ValueError("residual_instance has no effect without use_residual=True")
        if use_residual and residual_instance is None and expert_cls is None:
            raise ValueError("use_residual=True needs residual_instance, or expert_cls to build one of")
        capacity = (capacity_factor_train, capacity_factor_eval, min_capacity)
        options: dict[str, Any] = {"noisy_func": _noise_of(noisy_policy, num_experts), "drop_tks": drop_tks}
        router: MoeRouter
        if top_k == 1:
            router = Top1Router(*capacity, **options)
        elif top_k == 2:
            router = Top2Router(*capacity, **options)
        else:
            router = TopKRouter(top_k, *capacity, **options)
        if expert_instance is None:
            assert expert_cls is not None, "seen to above"
            expert_instance = Experts(expert_cls, num_experts, **expert_args)
        self.moe_layer = MoeLayer(dim_model, num_experts, router, expert_instance)
        self.residual: nn.Module | None = None
        if use_residual:
            if residual_instance is None:
                assert expert_cls is not None, "seen to above"
                residual_instance = expert_cls(**expert_args)
            self.residual = residual_instance
            self.residual_mix = nn.Linear(dim_model, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim_model) to the same shape."""
        result: Tensor = self.moe_layer(x)
        if self.residual is None:
            return result
        shares = self.residual_mix(x).softmax(-1)
        mixed: Tensor = self.residual(x) * shares[..., :1] + result * shares[..., 1:]
        return mixed


def _noise_of(policy: str | None, num_experts: int) -> Noise | None:
    if policy is None:
        return None
    if policy == "Jitter":
        return UniformNoiseGenerator()
    if policy == "Gaussian":
        return NormalNoiseGenerator(num_experts)
    raise ValueError(f"noisy_policy is {policy!r}; it must be 'Jitter', 'Gaussian' or None")
