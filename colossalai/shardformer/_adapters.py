"""Adapters of low rank (LoRA, 2106.09685) around layers that are cut: they are cut as their layers are.

An adapter adds B A x to what its layer says of x. peft puts it around the layer, so a rule that names the
layer finds the adapter, and the layer inside of it.

[Note: how an adapter is cut]
Of a column layer B is cut along its outputs, of a row layer A along its inputs, each as the weight of the
layer itself; the other factor is whole on every rank. Between the two lie as many features as the rank is:

    column:  x whole, A x computed by all ranks alike; the gradient of A x is summed over them
    row:     x cut, A x summed over the ranks; B and what follows is computed by all ranks alike

So one sum of `rank` features is all that travels, A and B find their whole gradients without a hook of their
own, and the outputs, the bias with them, are added once. The factor that is cut becomes what the layer
becomes, which has these sums. B A is on each rank the very slice of the weight, so peft can merge it there.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from colossalai.shardformer._layers import DrawsApart, DrawsTogether, LinearShard, put_before


def is_adapter(module: object) -> bool:
    """Return whether a module is what peft puts around a layer, whatever it adds to it."""
    return type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")


def without_adapter(layer: Any) -> Any:
    """Return the layer inside of an adapter; any other layer itself."""
    return layer.base_layer if is_adapter(layer) else layer


def reason_against_adapter(layer: Any) -> str:
    """Return why an adapter cannot be cut with its layer; empty where it can, and for a layer without one."""
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
    """Return the parameters of adapters that are cut with a layer; none where none can be cut.

    Args:
        layer: A linear layer, or what peft has put around one.
        cuts_outputs: Whether the layer is a column layer; else it is a row layer.
    """
    if not is_adapter(layer) or reason_against_adapter(layer):
        return []
    # A bias of B is cut with the outputs; A has none.
    return list((layer.lora_B if cuts_outputs else layer.lora_A).parameters())


def cut_with_adapter(adapter: Any, cut: Callable[[nn.Module], LinearShard]) -> None:
    """Cut a layer and the factors of its adapters, in place. See [Note: how an adapter is cut].

    Args:
        adapter: What peft has put around the layer.
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
            # Ranks that see the same features leave out the same ones; others may draw apart around them.
            put_before(drawing, dropout)
