"""Start-up summary of a training: model, plan, and the memory of a rank as it is known after `boost`.

It uses no communication and no device, so one rank alone can write it. Parameters, masters and slices exist,
and are counted; gradients and optimizer states are allocated in the first step, and are computed from
the parameters and the class of the optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.context import Axis, Mesh
from colossalai.nn.optimizer import FusedSGD, Lamb, Lars
from colossalai.runtime._plan import Plan
from colossalai.runtime._wrapper import ModelWrapper
from colossalai.tensor import CHUNK_PLACE, gradient_sync, local_slice

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_optim = torch.optim

# Number of state tensors of a parameter's size in an optimizer, by its class and options.
_STATES: Mapping[type[Optimizer], Callable[[dict[str, Any]], int]] = {
    **dict.fromkeys((_optim.SGD, FusedSGD, Lars), lambda group: int(group.get("momentum", 0) != 0)),
    _optim.RMSprop: lambda group: 1 + int(group["momentum"] > 0) + int(group["centered"]),
    **dict.fromkeys((_optim.Adagrad, _optim.ASGD), lambda group: 1),
    **dict.fromkeys((_optim.Adam, _optim.AdamW), lambda group: 2 + int(group["amsgrad"])),
    **dict.fromkeys((_optim.NAdam, _optim.RAdam, _optim.Adamax, _optim.Adadelta), lambda group: 2),
    **dict.fromkeys((_optim.Rprop, Lamb), lambda group: 2),
}


def start_line(
    model: ModelWrapper, optimizers: Sequence[OptimizerWrapper], *, plan: Plan, mesh: Mesh, described: str
) -> str:
    """Return the line for a model that has been assembled.

    Args:
        model: The wrapped model.
        optimizers: Its wrapped optimizers.
        plan: The plan.
        mesh: The ranks.
        described: Its class and number of parameters, before the ranks took their parts.
    """
    dtypes = dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in model.parameters())
    held, unknown = held_from_the_first_step(model, optimizers, plan=plan, mesh=mesh)
    if optimizers and len(unknown) == len(optimizers) and not held["optimizer states"]:
        del held["optimizer states"]
    kinds = ", ".join(f"{name} {bytes_text(size)}" for name, size in held.items())
    if any(getattr(each.optim, "offloads_states", False) for each in optimizers):
        kinds += ", a part of them on disk"
    more = f", and the states of {' and '.join(unknown)}" if unknown else ""
    words = plan.describe(" and ".join(_SHORT.get(name, name) for name in dtypes) or "no parameters")
    return f"{described}: {words}; rank {mesh.rank} holds {bytes_text(sum(held.values()))} ({kinds}){more}"


def held_from_the_first_step(
    model: nn.Module, optimizers: Sequence[OptimizerWrapper], *, plan: Plan, mesh: Mesh
) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of this rank by kind, and the optimizers with unknown sizes of states.

    Float32 masters are optimizer states here. Activations, buckets and buffers are left out.

    Args:
        model: The wrapped model.
        optimizers: Its wrapped optimizers.
        plan: The plan.
        mesh: The ranks.
    """
    replicas = mesh.axis(mesh.batch_axes)
    params = list(model.parameters())
    held = {"parameters": sum(_held_of(param, replicas) for param in params)}
    unknown: list[str] = []
    if optimizers:
        grads = (_grad_bytes(param, plan, replicas) for param in params if param.requires_grad)
        held["gradients"], held["optimizer states"] = sum(grads), 0
    for optimizer in optimizers:
        states = num_states(optimizer.optim)
        for group in optimizer.optim.param_groups:
            for tensor in filter(_is_trained, group["params"]):
                param = optimizer.masters.param_of(tensor)
                if _has_own_memory(tensor, param):
                    held["optimizer states"] += local_slice(tensor).nbytes
                    if plan.data.name_in_pairs is None and _grad_dtype(param) != tensor.dtype:
                        held["gradients"] += tensor.nbytes  # copied for the step, in float32
                if states is not None:
                    held["optimizer states"] += _state_bytes(optimizer.optim, tensor, states(group))
        if states is None:
            unknown.append(type(optimizer.optim).__name__)
    return held, unknown


def num_states(optimizer: Optimizer) -> Callable[[dict[str, Any]], int] | None:
    """Return a function of a parameter group: the number of state tensors for each of its parameters.

    A class derived from a known one has the same states, unless it overrides `step`. None: the class is
    unknown.
    """
    own = _step_of(type(optimizer))
    for base in type(optimizer).__mro__:
        # HybridAdam and its kin have the states of AdamW.
        known = _STATES[_optim.AdamW] if "keeps_masters" in vars(base) else _STATES.get(base)
        if known is not None:
            return known if own is _step_of(base) else None
    return None


def _step_of(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the `step` of a class, without the wrapper that torch adds to it."""
    step: Callable[..., Any] = cls.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def bytes_text(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit that it reaches."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {name}"
    return f"{num_bytes} B"


def _held_of(param: nn.Parameter, replicas: Axis) -> int:
    num_bytes = local_slice(param).nbytes
    return num_bytes // _num_holders(param, replicas) if CHUNK_PLACE in vars(param) else num_bytes


def _grad_bytes(param: nn.Parameter, plan: Plan, replicas: Axis) -> int:
    num_bytes = local_slice(param).numel() * _grad_dtype(param).itemsize
    return num_bytes // _num_holders(param, replicas) if plan.data.cuts_gradients else num_bytes


def _num_holders(param: nn.Parameter, replicas: Axis) -> int:
    """Return the number of replicas that hold the same slice, along which ZeRO cuts it."""
    return gradient_sync(param, replicas).axis.size


def _grad_dtype(param: torch.Tensor) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype


def _is_trained(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _has_own_memory(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether an optimizer updates a copy of a parameter: a master, or a slice in another memory."""
    return tensor is not param and (tensor.dtype, tensor.device) != (param.dtype, param.device)


def _state_bytes(optimizer: Optimizer, tensor: nn.Parameter, num_tensors: int) -> int:
    is_low = tensor.dtype in (torch.float16, torch.bfloat16)
    if is_low and getattr(optimizer, "keeps_masters", False):  # float32 states, and a master
        return local_slice(tensor).numel() * 4 * (num_tensors + 1)
    return local_slice(tensor).nbytes * num_tensors
