"""A model under one of the methods of ZeRO: what the doors without Booster return for it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colossalai.amp import Masters, Precision, apply_precision
from colossalai.context import MOE_CONTEXT, Axis, global_context, relayout
from colossalai.nn.parallel import (
    AppliedDataMethod,
    ArrivingParams,
    DataMethod,
    params_called,
    remove_owners,
)
from colossalai.tensor import (
    CHUNK_PLACE,
    TransparentModule,
    as_memory,
    as_plain_parameter,
    nested_tensors,
    process_group_of,
)

if TYPE_CHECKING:
    from colossalai.zero._low_level import LowLevelZeroOptimizer


class ZeroModel(TransparentModule):
    """A model whose optimizers are cut over the data-parallel ranks, and with stage 3 the model itself.

    Names and attributes are those of the model that was given, in reading and in setting (see
    `TransparentModule`), except the attributes below.

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
        ValueError: `raw` is no module, has been through a door already, has a parameter without values, or is
            refused by the method.
    """

    _mutable = frozenset({"masters", "precision", "first_optimizer"})

    @as_memory()
    def __init__(self, raw: nn.Module, method: DataMethod, precision: Precision) -> None:
        super().__init__()
        _check(raw)
        if (group := process_group_of(raw)) is not None:
            relayout(group.layout)
        for param in raw.parameters():
            as_plain_parameter(param)
        device, mesh = global_context.device, global_context.mesh
        self.replicas: Axis = mesh.axis(mesh.batch_axes)  # those that share a sequence hold the same weights
        method.check(raw, [], blocks=[], replicas=self.replicas)
        float32_grads = method.allows_float32_grads(self.replicas)
        arriving = ArrivingParams(raw, precision.casts(raw, float32_grads=float32_grads), device)
        if not method.takes_runs:
            arriving.all()
        computing = apply_precision(raw, precision, device.type)
        remove_owners(raw.parameters())
        self.data: AppliedDataMethod = method.apply(
            computing, blocks=[], replicas=self.replicas, arriving=arriving
        )
        self.module = self.data.module
        self.masters: Masters = arriving.masters()
        self.masters.start_equal(self.replicas)
        self.precision = precision
        self._has_experts = MOE_CONTEXT.has_layers(raw)
        self.first_optimizer: LowLevelZeroOptimizer | None = None
        self._stand_for(raw)

    def unwrap(self) -> nn.Module:
        """Return the model that was given."""
        raw: nn.Module = self.__dict__["_raw"]
        return raw

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its outputs lead to the auxiliary losses of its layers with experts."""
        if not MOE_CONTEXT.expects_losses or (torch.compiler.is_compiling() and not self._has_experts):
            return self.module(*args, **kwargs)  # which torch.compile can trace
        with MOE_CONTEXT.forward_of(self, nested_tensors((args, kwargs))) as losses:
            output = self.module(*args, **kwargs)
        MOE_CONTEXT.assign(losses, nested_tensors(output))
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backwards add to gradients; with stage 1 they send nothing."""
        self.data.set_sync(enabled=False)
        try:
            yield
        finally:
            self.data.set_sync(enabled=True)

    def gathered(self, *parts: str | nn.Module | nn.Parameter) -> AbstractContextManager[None]:
        """Return a block within which parameters can be read and written, where a rank holds parts of them.

        With stage 3 all ranks enter and leave it. What one has written, all have then; where several have
        written into one chunk, what the first of them has. With stages 1 and 2 it does nothing.

        Args:
            parts: Modules or parameters of the model, or their names; default: all.

        Raises:
            ValueError: `parts` holds what the model has not.
        """
        return self.data.gathered(params_called(self.unwrap(), parts) if parts else None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model that was given, under its own names.

        With stage 3 it has the whole values, in host memory, on every rank: all ranks call it, and the chunks
        are gathered one after the other. `colossalai.checkpoint_io` writes a model without gathering it.
        """
        return self.data.state_dict(self.unwrap(), *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the model that was given; with stage 3 all ranks call it, with the same state.

        Raises:
            ValueError: `assign` is set with stage 3.
        """
        return self.data.load_state_dict(self.unwrap(), state_dict, strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters under the names of the model that was given."""
        return self.unwrap().named_parameters(prefix, recurse, remove_duplicate)


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
        raise ValueError(f"device is {device!r}, which is no device: {error}") from error
    if asked.type != own.type or (own.index is not None and asked.index not in (None, own.index)):
        raise ValueError(
            f"device is {device!r}, and this rank computes on {own}: give get_current_device(); which one "
            "that is, the launch says"
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
            f"this {type(raw).__name__} has been through a door already: pass the model that you built "
            "yourself, and build another one for another door"
        )
    for name, param in raw.named_parameters():
        if param.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} has no values yet: call "
                "LazyInitContext.materialize(model) before this door"
            )
