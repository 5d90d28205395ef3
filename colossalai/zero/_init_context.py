"""The documented context in which models are built: on a device, in a dtype."""

from contextlib import ExitStack
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from colossalai.logging import get_dist_logger
from colossalai.tensor import DistSpec, ProcessGroup, as_colo_parameter
from colossalai.zero._elementwise import refuse_cut_parameters

Device = torch.device | str | int


class ColoInitContext:
    """Builds models on a device and in a dtype; their parameters are ColoParameters, which can be cut.

    `initialize` and `boost` also take models that were built without a context. `LazyInitContext` builds one
    without memory.

    Args:
        device: Device of parameters and buffers; `get_current_device()` is the device of this rank.
        dtype: The dtype of those that are made without one; None: torch's default.
        default_dist_spec: Cut of all parameters at the end of the block; parameters that the ranks do not
            divide
            stay whole. None: nothing is cut.
        default_pg: The process group of all parameters; None: they have none yet.

    Raises:
        ValueError: `device` is not a device, `dtype` is not a floating one, `default_dist_spec` is not a dist
            spec or is given without `default_pg`.

    Example:
        >>> with ColoInitContext(device="cpu", dtype=torch.bfloat16):
        ...     model = nn.Linear(4, 4)
    """

    def __init__(
        self,
        device: Device = torch.device("cpu"),  # noqa: B008 - a value
        dtype: torch.dtype | None = None,
        *,
        default_dist_spec: DistSpec | None = None,
        default_pg: ProcessGroup | None = None,
    ) -> None:
        self.device, self.dtype = _check(device, dtype, default_dist_spec, default_pg)
        self._spec, self._group = default_dist_spec, default_pg
        self._built: dict[nn.Parameter, None] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        _watch_optimizers()
        hook = register_module_parameter_registration_hook(self._note)
        self._stack.callback(hook.remove)
        if self.dtype is not None:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
        self._stack.enter_context(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        built, self._built = self._built, {}
        if error[0] is None and self._spec is not None and self._group is not None:
            for param in built:
                _cut(param, self._spec, self._group)

    def _note(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Called when a module gets a parameter."""
        if param is not None and not _has_own_class(param):
            self._built[as_colo_parameter(param, self._group)] = None


def post_process_colo_init_ctx(
    model: nn.Module,
    device: Device = torch.device("cpu"),  # noqa: B008 - a value
    dtype: torch.dtype | None = None,
    default_pg: ProcessGroup | None = None,
    default_dist_spec: DistSpec | None = None,
) -> None:
    """Apply a `ColoInitContext` to a model that was built outside of it, in place.

    Args:
        model: The model.
        device: The destination.
        dtype: The dtype of its floating tensors; None: as they are.
        default_pg: See `ColoInitContext`.
        default_dist_spec: Likewise.

    Raises:
        ValueError: `ColoInitContext` refuses an argument, or a tensor of `model` has no values.
    """
    place, floating = _check(device, dtype, default_dist_spec, default_pg)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has no values yet: call "
                "LazyInitContext.materialize(model) first"
            )
    model.to(device=place, dtype=floating)
    _watch_optimizers()
    for param in model.parameters():
        if not _has_own_class(param):
            as_colo_parameter(param, default_pg)
            if default_dist_spec is not None and default_pg is not None:
                _cut(param, default_dist_spec, default_pg)


@cache
def _watch_optimizers() -> None:
    """Refuse steps on slices of ColoParameters that `boost` would refuse, in loops without `boost`."""
    register_optimizer_step_pre_hook(_refuse_slices)


def _refuse_slices(optimizer: Optimizer, *_: Any) -> None:
    refuse_cut_parameters(optimizer)


def _check(
    device: Device, dtype: torch.dtype | None, default_dist_spec: Any, default_pg: Any
) -> tuple[torch.device, torch.dtype | None]:
    if default_dist_spec is not None and not isinstance(default_dist_spec, DistSpec):
        raise ValueError(
            f"default_dist_spec is {default_dist_spec!r}; it must be a ShardSpec or a ReplicaSpec"
        )
    if default_pg is not None and not isinstance(default_pg, ProcessGroup):
        raise ValueError(f"default_pg is {default_pg!r}; it must be a ProcessGroup(tp_degree=...)")
    if default_dist_spec is not None and default_pg is None:
        raise ValueError("default_dist_spec is given, and no default_pg: pass ProcessGroup(tp_degree=...)")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; it must be a floating one such as torch.bfloat16, or None")
    try:
        return torch.device(device), dtype
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which is not a device: {error}") from error


def _has_own_class(param: nn.Parameter) -> bool:
    """Return whether a parameter has a class of its own, for example a lazy or a quantized one."""
    return type(param) is not nn.Parameter


def _cut(param: nn.Parameter, spec: DistSpec, group: ProcessGroup) -> None:
    """Cut a parameter; if the ranks do not divide it, it stays whole, with a log line."""
    try:
        as_colo_parameter(param, group).set_dist_spec(spec)
    except ValueError as error:
        get_dist_logger().log_once(
            f"a parameter of shape {tuple(param.shape)} stays whole: {error}", ranks=[0]
        )
