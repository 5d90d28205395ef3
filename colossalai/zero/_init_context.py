"""The documented context in which models are built: on a device, in a dtype."""

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

Device = torch.device | str | int


class ColoInitContext:
    """Builds models on a device and in a dtype, as `with torch.device(...)` does.

    The doors take a model that was built without a context as well. `LazyInitContext` builds one without
    memory.

    Args:
        device: Where parameters and buffers are made; `get_current_device()` is the device of this rank.
        dtype: The dtype of those that are made without one; None: torch's default.
        default_dist_spec: Not taken before ColoTensor has landed.
        default_pg: Not taken before ColoTensor has landed.

    Raises:
        ValueError: `device` is no device, `dtype` is not a floating one, or `default_dist_spec` or
            `default_pg` is given.

    Example:
        >>> with ColoInitContext(device="cpu", dtype=torch.bfloat16):
        ...     model = nn.Linear(4, 4)
    """

    def __init__(
        self,
        device: Device = torch.device("cpu"),  # noqa: B008 - a value
        dtype: torch.dtype | None = None,
        *,
        default_dist_spec: Any = None,
        default_pg: Any = None,
    ) -> None:
        self.device, self.dtype = _check(device, dtype, default_dist_spec, default_pg)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.dtype is not None:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
        self._stack.enter_context(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def post_process_colo_init_ctx(
    model: nn.Module,
    device: Device = torch.device("cpu"),  # noqa: B008 - a value
    dtype: torch.dtype | None = None,
    default_pg: Any = None,
    default_dist_spec: Any = None,
) -> None:
    """Bring what a model was given outside of a `ColoInitContext` to its device and dtype, in place.

    Args:
        model: The model.
        device: Where to.
        dtype: The dtype of its floating tensors; None: as they are.
        default_pg: Not taken before ColoTensor has landed.
        default_dist_spec: Not taken before ColoTensor has landed.

    Raises:
        ValueError: An argument is one that `ColoInitContext` refuses, or a tensor of `model` has no values.
    """
    place, floating = _check(device, dtype, default_dist_spec, default_pg)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has no values yet: call "
                "LazyInitContext.materialize(model) first"
            )
    model.to(device=place, dtype=floating)


def _check(
    device: Device, dtype: torch.dtype | None, default_dist_spec: Any, default_pg: Any
) -> tuple[torch.device, torch.dtype | None]:
    for name, value in (("default_dist_spec", default_dist_spec), ("default_pg", default_pg)):
        if value is not None:
            raise ValueError(
                f"{name} is given, and says how a ColoTensor is cut, which has not landed: leave it out; "
                "HybridParallelPlugin(tp_size=...) and layers of colossalai.nn cut models"
            )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; it must be a floating one such as torch.bfloat16, or None")
    try:
        return torch.device(device), dtype
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which is no device: {error}") from error
