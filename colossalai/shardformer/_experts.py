"""Expert parallelism for models that were not written for it: experts are cut over ranks, tokens travel.

In transformers 5 a block of experts is two modules: a router, which chooses experts for each token, and one
whose name ends with Experts, called with (tokens, chosen experts, weights). The second has one parameter for
the matrices of all experts, (experts, ..., ...). Cutting it along dimension 0 and putting `dispatch` around
its forward is enough: the router, shared experts and the rest of the model are not changed, and the
parameters keep their names and their order.

[Note: classes of experts]
These are classes with a rule that has `experts`, and classes of transformers whose name ends with Experts and
whose module has the attributes of the layout of its parameters (`is_transposed`, `has_gate` and `has_bias`,
set by the decorator of these classes). The computation of the latter follows from these attributes, and uses
our own grouped products. A class with a rule computes by its own forward, as on one process, with the rows of
this rank as tokens with one expert of weight 1 each. Other classes with such a name have another interface;
if they have to be cut, they are refused by name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.communication import outside_graphs
from colossalai.context import Mesh
from colossalai.logging import get_dist_logger
from colossalai.nn.layer.moe import EXPERT_AXES, dispatch, grouped_linear
from colossalai.shardformer._layers import cut_param, keep_specs
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.tensor import SpecKeeper, keep_dtype

_LAYOUT = ("has_gate", "has_bias", "is_transposed")


def shard_experts(model: nn.Module, mesh: Mesh) -> int:
    """Cut the experts of a model over the ranks along `ep`, and along `tp` together with it, in place.

    All ranks hold the same values before. No communication. See [Note: classes of experts].

    Args:
        model: The model, or a stage of it.
        mesh: The ranks.

    Returns:
        The number of modules of experts that were cut.

    Raises:
        ValueError: `model` has experts that the ranks do not divide, or whose class has an interface of its
            own. Nothing has been changed then.
    """
    axes = tuple(axis for axis in EXPERT_AXES if mesh.axes.get(axis, 1) > 1)
    if not axes:
        return 0
    is_asked = mesh.axes.get("ep", 1) > 1  # else tensor parallelism cuts them where it can
    found = [(name, part, names) for name, part in parts_of(model) if (names := _names_of_experts(part))]
    if is_asked:
        _refuse_others(model, {part for _, part, _ in found})
    num_ranks = mesh.axis_size(axes)
    chosen = [each for each in found if _can_cut(*each, num_ranks=num_ranks, is_asked=is_asked)]
    cut = {module for _, module, _ in chosen}
    of_chosen = [adapter for adapter in _adapters_in(model) if adapter.get_base_layer() in cut]
    for adapter in of_chosen:
        _check_adapter(adapter, num_ranks)
    for _, module, names in chosen:
        for name in names:
            param = module.get_parameter(name)
            cut_param(param, (axes, *[()] * (param.dim() - 1)), mesh, parts=(1,) * param.dim())
        is_ruled = rule_of(module) is not None
        keep_specs(module, mesh, RuledExperts if is_ruled else KnownExperts)
    for adapter in of_chosen:
        _cut_adapter(adapter, axes, mesh)
    return len(chosen)


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has experts that `shard_experts` cuts."""
    return any(_names_of_experts(part) for _, part in parts_of(model))


def expert_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return by the names of modules of experts the names of the parameters that `shard_experts` cuts.

    All are full names. Dimension 0 of these parameters counts experts.
    """
    return {
        name: tuple(f"{name}.{each}" for each in names)
        for name, part in parts_of(model)
        if (names := _names_of_experts(part))
    }


def experts_to_cut(model: nn.Module, mesh: Mesh) -> dict[nn.Parameter, str]:
    """Return the parameters that `shard_experts` would cut, with their names; nothing is changed.

    Args:
        model: The model.
        mesh: The ranks.
    """
    num_ranks = mesh.axis_size(tuple(axis for axis in EXPERT_AXES if axis in mesh.axes))
    is_asked = mesh.axes.get("ep", 1) > 1
    chosen: set[nn.Parameter] = set()
    cut = set()
    for _, part in parts_of(model):
        params = [part.get_parameter(name) for name in _names_of_experts(part)]
        if params and (is_asked or params[0].shape[0] % num_ranks == 0):
            chosen.update(params)
            cut.add(part)
    for adapter in _adapters_in(model):
        if adapter.get_base_layer() in cut:
            chosen.update((*adapter.lora_A.parameters(), *adapter.lora_B.parameters()))
    return {param: name for name, param in model.named_parameters() if param in chosen}


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts of a model that `shard_experts` cuts or has cut."""
    return [
        part for _, part in parts_of(model) if isinstance(part, DispatchedExperts) or _names_of_experts(part)
    ]


def keep_float32(model: nn.Module) -> None:
    """Exclude the parameters that a model of transformers requires in float32 from casts of any precision.

    It is the bias that balances experts, which moves by steps of 0.001 that 16 bits would lose, and a few
    routers: `_keep_in_fp32_modules_strict` of the model's class.

    Args:
        model: The model, or a stage of it.
    """
    for _, part in parts_of(model):
        words = getattr(type(part), "_keep_in_fp32_modules_strict", None) or ()
        for name, tensor in (*part.named_parameters(), *part.named_buffers()) if words else ():
            if any(word in name for word in words):
                keep_dtype(tensor)


class DispatchedExperts(SpecKeeper):
    """Put before a class of experts: tokens travel to the ranks of the experts of their choice."""

    num_experts: int

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return for each token (tokens, features) the weighted sum of its experts' outputs."""
        found: Tensor = outside_graphs(self._dispatch)(*args, *kwargs.values())
        return found

    def _dispatch(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        num_experts = next(iter(self._specs.values())).shape[0]  # over all ranks
        return dispatch(
            hidden,
            experts,
            weights,
            self._compute,
            num_experts=num_experts,
            mesh=self.mesh,
            training=self.training,
        )

    def _compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        raise NotImplementedError


class KnownExperts(DispatchedExperts):
    """Put before a class of transformers with attributes of the layout of its parameters."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def _compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        wide = self._product("gate_up_proj" if self.has_gate else "up_proj", rows, sizes)
        module: Any = self  # the activation between the products is the module's own
        inner = module._apply_gate(wide) if self.has_gate else module.act_fn(wide)
        return self._product("down_proj", inner, sizes)

    def _product(self, name: str, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return grouped_linear(rows, getattr(self, name), sizes, bias=bias, transposed=self.is_transposed)


class RuledExperts(DispatchedExperts):
    """Put before a class with a rule, whose own forward computes."""

    def _compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        numbers = torch.arange(len(sizes), device=rows.device)
        chosen = numbers.repeat_interleave(torch.tensor(sizes, device=rows.device))
        kept = self.num_experts
        self.num_experts = len(sizes)  # the extent of its loop
        try:
            own_forward = super(DispatchedExperts, self).forward  # of the class that this one was put before
            results: Tensor = own_forward(rows, chosen.unsqueeze(1), rows.new_ones(len(rows), 1))
        finally:
            self.num_experts = kept
        if len(rows) == 0:  # then a loop has touched nothing: see [Note: participation of all ranks]
            results = results + rows.sum() + sum(param.sum() for param in self.parameters(recurse=False))
        return results


def _names_of_experts(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters to be cut along dimension 0; none where it has no experts."""
    rule = rule_of(module)
    if rule is not None:
        return rule.experts
    if not _is_called_experts(module) or any(word not in vars(module) for word in _LAYOUT):
        return ()
    if vars(module).get("has_post_expert_norm"):
        return ()
    return tuple(name for name, _ in module.named_parameters(recurse=False))


def _is_called_experts(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("Experts")


def _is_adapter(module: Any) -> bool:
    """Return whether a module is a wrapper of peft around experts for LoRA on one of their parameters."""
    kind = type(module)
    return kind.__module__.startswith("peft.") and kind.__name__ == "ParamWrapper"


def _adapters_in(model: nn.Module) -> list[Any]:
    return [part for _, part in parts_of(model) if _is_adapter(part)]


def _check_adapter(adapter: Any, num_ranks: int) -> None:
    if adapter.num_experts == num_ranks:
        raise ValueError(
            f"LoRA on {adapter.parameter_name}: each of {num_ranks} ranks would hold one of its "
            f"{adapter.num_experts} experts, whose update peft computes in another way than that of several: "
            "choose a smaller expert-parallel size"
        )


def _cut_adapter(adapter: Any, axes: tuple[str, ...], mesh: Mesh) -> None:
    """Cut the two factors of LoRA on the experts' matrices, with the experts.

    peft has the first ones of all experts one after the other, (experts * r, in), and of the second ones the
    columns with the expert varying fastest, (out, r * experts): r parts, each of which is cut for itself.
    """
    num_experts = adapter.num_experts
    for name in adapter.lora_A:
        first, second = adapter.lora_A[name], adapter.lora_B[name]
        cut_param(first.weight, (axes, ()), mesh, parts=(1, 1))
        cut_param(second.weight, ((), axes), mesh, parts=(1, second.weight.shape[1] // num_experts))
        for factor in (first, second):
            keep_specs(factor, mesh, SpecKeeper)
    adapter.num_experts = num_experts // mesh.axis_size(axes)


def _refuse_others(model: nn.Module, known: set[nn.Module]) -> None:
    """Refuse experts that have to be cut, but have an unknown interface."""
    for name, part in parts_of(model):
        if part not in known and _is_called_experts(part):
            raise ValueError(
                f"expert parallelism cannot cut {name!r}, a {type(part).__name__}, whose parameters or "
                "forward are of a kind of their own: leave expert parallelism out (ep_size=1, or no `moe` in "
                "`parallel`), or give its class a Rule(experts=...) by register_rule of "
                "colossalai.shardformer, if it is called with tokens, chosen experts and weights"
            )


def _can_cut(name: str, module: nn.Module, names: Sequence[str], *, num_ranks: int, is_asked: bool) -> bool:
    """Return whether the ranks divide the experts of a module.

    Raises:
        ValueError: `num_ranks` does not divide its experts, with expert parallelism requested.
    """
    param = module.get_parameter(names[0])
    num_experts = param.shape[0]
    if num_experts % num_ranks == 0:
        return True
    what = (
        f"{type(module).__name__} {name!r} has {num_experts} experts, which {num_ranks} ranks do not divide"
    )
    if is_asked:
        fitting = [size for size in range(2, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"{what} (expert-parallel size times tensor-parallel size): choose sizes whose product is one of "
            f"{fitting}"
        )
    get_dist_logger().log_once(f"{what}: each tensor-parallel rank computes all of them", ranks=[0])
    return False
