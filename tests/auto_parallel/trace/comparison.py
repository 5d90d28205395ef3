"""What profiles say of a model beside what is counted in real steps of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from colossalai.auto_parallel.trace._live_bytes import live_bytes
from colossalai.auto_parallel.trace._profile_ops import OpProfile, saved_bytes
from colossalai.auto_parallel.trace._trace import ModelTrace
from tests.auto_parallel.trace.cases import counted_bytes, run_backward, run_forward

ALLOWED = 0.005  # relative, of bytes; what is not equal are a few small integer tensors


def disagreements(
    model: nn.Module, arguments: dict[str, Any], trace: ModelTrace, profiles: Mapping[str, OpProfile]
) -> dict[str, tuple[float, float]]:
    """Return what profiles say and what is counted, where they are not the same.

    Compared are the FLOPs of forward and backward (`FlopCounterMode`), the bytes that live behind the
    forward, and the peak of a step, with gradients of parameters made in it or there before (`LiveBytes`).
    """
    own = {
        name: sum(getattr(each, name) for each in profiles.values())
        for name in ("forward_flops", "backward_flops")
    }
    flops = dict(zip(own, zip(own.values(), counted_flops(model, arguments), strict=True), strict=True))
    kept, peak = counted_bytes(model, arguments, with_param_grads=False)
    _, peak_with_grads = counted_bytes(model, arguments, with_param_grads=True)
    sizes = {
        "kept": (kept_after_forward(trace, profiles), kept),
        "peak": (live_bytes(trace, profiles), peak),
        "peak with gradients": (live_bytes(trace, profiles, with_param_grads=True), peak_with_grads),
    }
    found = {name: pair for name, pair in flops.items() if pair[0] != pair[1]}
    found.update(
        {name: pair for name, pair in sizes.items() if abs(pair[0] - pair[1]) > ALLOWED * abs(pair[1])}
    )
    return found


def kept_after_forward(trace: ModelTrace, profiles: Mapping[str, OpProfile]) -> int:
    """Return what is saved or returned by a forward."""
    saved = {name for profile in profiles.values() for name in profile.saved}
    returned = {trace.storage_of(name) for name in trace.outputs} - saved - trace.outside
    unsaved = {*returned, *trace.constants}
    return saved_bytes(trace, profiles, trace.operations) + sum(trace.tensors[x].num_bytes for x in unsaved)


def counted_flops(model: nn.Module, arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the FLOPs of forward and backward; torch leaves out the attention of CPUs."""
    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        _, starts = run_forward(model, arguments)
        forward = counter.get_total_flops()
        run_backward(starts)
    return forward, counter.get_total_flops() - forward


def _attention(query, key, value, *rest, out_shape=None, **options):
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


def _attention_backward(grad, query, key, value, *rest, out_shape=None, **options):
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (3 * size + 2 * value[3])
