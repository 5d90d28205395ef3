"""Wrapped model under one of the methods of ZeRO, without Booster."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from colossalai.amp import Masters, Precision, apply_precision
from colossalai.context import Axis, global_context, relayout
from colossalai.nn.parallel import (
    AppliedDataMethod,
    AppliedModel,
    ArrivingParams,
    DataMethod,
    check_row_caches,
    remove_owners,
)
from colossalai.tensor import (
    CHUNK_PLACE,
    as_memory,
    as_plain_parameter,
    process_group_of,
    without_row_caches,
)

if TYPE_CHECKING:
    from colossalai.zero._low_level import LowLevelZeroOptimizer


class ZeroModel(AppliedModel):
    """A model whose optimizers are cut over the data-parallel ranks, and with stage 3 the model itself.

    Names and attributes are those of the model (see `AppliedModel`), except the attributes below.

    Args:
        raw: The model; it is moved to the device of this rank and changed in place.
        method: The way in which it is cut.
        precision: The precision.

    Attributes:
        module: The model, as it computes in the precision.
        data: The method at work.
        replicas: The ranks over which optimizers are cut.
        masters: Float32 masters that no optimizer has taken yet.
        precision: As given; with the options of the first optimizer's loss scale, when there is one.
        first_optimizer: The first one of its optimizers.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `raw` is not a module, is prepared already, has a parameter without values, or is refused
            by the method.
    """

    _mutable = frozenset({"masters", "precision", "first_optimizer"})

    @as_memory()
    def __init__(self, raw: nn.Module, method: DataMethod, precision: Precision) -> None:
        _check(raw)
        if (group := process_group_of(raw)) is not None:
            relayout(group.layout)
        for param in raw.parameters():
            as_plain_parameter(param)
        device, mesh = global_context.device, global_context.mesh
        replicas = mesh.axis(mesh.batch_axes)  # those that share a sequence hold the same weights
        check_row_caches(raw, [], replicas)
        with without_row_caches(raw):
            method.check(raw, [], blocks=[], replicas=replicas)
        float32_grads = method.allows_float32_grads(replicas)
        arriving = ArrivingParams(raw, precision.casts(raw, float32_grads=float32_grads), device)
        if not method.takes_runs:
            arriving.all()
        computing = apply_precision(raw, precision, device.type)
        remove_owners(raw.parameters())
        with without_row_caches(raw):
            data = method.apply(computing, blocks=[], replicas=replicas, arriving=arriving)
        super().__init__(data)
        self.replicas: Axis = replicas
        self.masters: Masters = arriving.masters()
        self.masters.start_equal(self.replicas)
        self.precision = precision
        self.first_optimizer: LowLevelZeroOptimizer | None = None
        self._stand_for(raw)


def check_device(device: torch.device | str | int | None) -> None:
    """Refuse a device that is not the one on which this rank computes; None stands for that one.

    Raises:
        ValueError: `device` is another one, or none at all.
    """
    if device is None:
        return
    own = global_context.device
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which is not a device: {error}") from error
    if asked.type != own.type or (own.index is not None and asked.index not in (None, own.index)):
        raise ValueError(
            f"device is {device!r}, and this rank computes on {own}: give get_current_device(), which "
            "the launch has set"
        )


def has_been_through_a_door(module: nn.Module) -> bool:
    """Return whether a data method is at work on a module or a part of it."""
    return any(
        isinstance(value, AppliedDataMethod) for part in module.modules() for value in vars(part).values()
    ) or any(CHUNK_PLACE in vars(param) for param in module.parameters())


def _check(raw: nn.Module) -> None:
    if not isinstance(raw, nn.Module):
        raise ValueError(f"the model is a {type(raw).__name__}; it must be a torch.nn.Module")
    if has_been_through_a_door(raw):
        raise ValueError(
            f"this {type(raw).__name__} is already wrapped: pass the model that you built "
            "yourself, and build another one for another wrapper"
        )
    for name, param in raw.named_parameters():
        if param.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} has no values yet: call "
                "LazyInitContext.materialize(model) before this call"
            )
