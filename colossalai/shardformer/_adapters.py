"""Low-rank adapters (LoRA, 2106.09685) around cut layers: they are cut like their layers.

An adapter adds B A x to the output of its layer. peft wraps the layer, so the name of a layer in a rule
refers to the adapter, with the layer inside of it.

[Note: cuts of an adapter]
With a column layer B is cut along its outputs, with a row layer A along its inputs, each like the weight of
the layer itself; the other factor is whole on every rank. Between the two there are `rank` features:

    column:  x whole, A x computed by all ranks alike; the gradient of A x is summed over them
    row:     x cut, A x summed over the ranks; B and the rest are computed by all ranks alike

So a single sum of `rank` features is communicated, A and B get their whole gradients without further hooks,
and the outputs, including the bias, are added once. The cut factor is replaced like the layer, by a module
with these sums. B A on each rank is exactly the slice of the weight, so peft can merge it there.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from colossalai.shardformer._layers import DrawsApart, DrawsTogether, LinearShard, put_before


def is_adapter(module: object) -> bool:
    """Return whether a module is a wrapper of peft around a layer, with any kind of adapter."""
    return type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")


def without_adapter(layer: Any) -> Any:
    """Return the layer inside of an adapter; any other layer itself."""
    return layer.base_layer if is_adapter(layer) else layer


def reason_against_adapter(layer: Any) -> str:
    """Return the reason why an adapter cannot be cut with its layer; empty if it can, or without one."""
    if not is_adapter(layer):
        return ""
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if kind != "peft.tuners.lora.layer.Linear":
        return (
            f"has an adapter of {kind}, and of adapters only LoRA of linear layers can be cut: leave this "
            "layer out of them, merge them, or leave tensor parallelism out"
        )
    if layer.lora_variant:
        named = ", ".join(sorted({type(each).__name__ for each in layer.lora_variant.values()}))
        return (
            f"has an adapter with {named}, which needs more than the two factors that can be cut: take plain "
            "LoRA, merge it, or leave tensor parallelism out"
        )
    return ""


def factors_to_cut(layer: Any, *, cuts_outputs: bool) -> list[nn.Parameter]:
    """Return the parameters of adapters that are cut with a layer; none if none can be cut.

    Args:
        layer: A linear layer, or its wrapper by peft.
        cuts_outputs: Whether the layer is a column layer; otherwise it is a row layer.
    """
    if not is_adapter(layer) or reason_against_adapter(layer):
        return []
    # A bias of B is cut with the outputs; A has none.
    return list((layer.lora_B if cuts_outputs else layer.lora_A).parameters())


def cut_with_adapter(adapter: Any, cut: Callable[[nn.Module], LinearShard]) -> None:
    """Cut a layer and the factors of its adapters, in place. See [Note: cuts of an adapter].

    Args:
        adapter: The wrapper of the layer by peft.
        cut: Cuts a linear layer.
    """
    adapter.base_layer = cut(adapter.base_layer)
    cuts_outputs = bool(adapter.base_layer.scheme.w_out)
    factors = adapter.lora_B if cuts_outputs else adapter.lora_A
    for name in list(factors):
        factors[name] = cut(factors[name])
    sees_all = cuts_outputs or adapter.base_layer.takes_all
    drawing = DrawsTogether if sees_all else DrawsApart
    for dropout in adapter.lora_dropout.values():
        if isinstance(dropout, nn.Dropout):
            # Ranks with the same features drop the same ones; the surrounding dropouts may draw separately.
            put_before(drawing, dropout)
