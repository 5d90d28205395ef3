"""Placeholder in `.grad` while the gradient of a parameter is a mean of which each rank has a slice.

[Note: placeholders of gradients]
When a bucket has been averaged, the whole gradients of its parameters are gone. Each parameter then has a
placeholder as its gradient: a tensor of the same shape without memory. It detects users' code that drops
gradients in torch's ways: before the next backward, and before a step, a parameter whose placeholder is gone
(`param.grad = None`, `module.zero_grad()`) loses its part of the mean, and one whose placeholder was set to
zero (`zero_grad(set_to_none=False)`) has a mean of zero. Every other operation on a placeholder raises, since
a number computed from a slice would be wrong.

Placeholders are removed before a backward, and restored after it for parameters without a new gradient. An
unannounced backward (of another model, through this one) adds to a placeholder, which keeps the sum for the
hook that follows. All parameters of a bucket get placeholders, on all ranks, with or without a gradient on
this
one: a gradient dropped by the user is dropped on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_REFUSED = (
    "{name} was called on the gradient of a parameter of shape {shape}, which is cut over the ranks (ZeRO, "
    "Gemini) and has no values in `param.grad`. To clip, give max_norm to the plugin (clip_grad_norm in a "
    "config), or call clip_grad_by_norm or clip_grad_by_value of the optimizer that boost has returned; to "
    "read gradients, call booster.gathered_grads(model) or optimizer.gathered_grads() on all ranks; run "
    "backwards by booster.backward(loss, optimizer), and steps by the optimizer that boost has returned. "
    "`param.grad = None` and zero_grad() work as they do in one process"
)


_ADDITIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class GradPlaceholder(torch.Tensor):
    """The gradient of a parameter, in its shape and without memory; see [Note: placeholders of gradients].

    Attributes:
        is_zeroed: Whether it was set to zero.
        added: The gradient that an unannounced backward has added to it.
    """

    is_zeroed: bool
    added: torch.Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["GradPlaceholder"], param: torch.Tensor, dtype: torch.dtype) -> "GradPlaceholder":
        """Return the placeholder of a parameter whose gradients have a dtype."""
        placeholder: GradPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=dtype, device=param.device, storage_size=0
        )
        placeholder.is_zeroed = False
        placeholder.added = None
        return placeholder

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype}, cut over the ranks)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Accept a zero, and the addition of a backward; refuse all else.

        Raises:
            ValueError: The operation needs values, or sets others.
        """
        if func is torch.ops.aten.zero_.default:
            args[0].is_zeroed = True
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        if func in _ADDITIONS and torch._C._current_graph_task_id() >= 0 and args[0].added is None:
            if func is torch.ops.aten.add.Tensor:  # a backward with create_graph=True
                return args[1]
            args[0].added = args[1]
            return args[0]
        flat = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else [arg])]
        raise refused(str(func), next((part for part in flat if isinstance(part, GradPlaceholder)), None))


def refused(name: str, placeholder: GradPlaceholder | None) -> ValueError:
    """Return the error of an operation, by its name, on a placeholder, if that is known."""
    shape = "unknown" if placeholder is None else tuple(placeholder.shape)
    return ValueError(_REFUSED.format(name=name, shape=shape))
