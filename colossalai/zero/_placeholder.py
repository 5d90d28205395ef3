"""What `.grad` holds while the gradient of a parameter is a mean of which each rank has a slice.

[Note: placeholders of gradients]
When a bucket has been averaged, the whole gradients of its parameters are gone. Each parameter then has a
placeholder as its gradient: a tensor of the same shape without memory. Users' code that forgets gradients in
torch's ways is heard by it: before the next backward, and before a step, a parameter whose placeholder is
gone (`param.grad = None`, `module.zero_grad()`) loses its part of the mean, and one whose placeholder was set
to zero (`zero_grad(set_to_none=False)`) has a mean of zero. Every other operation on a placeholder raises,
since a number that is computed from a slice would be wrong.

They are taken away before a backward, and those that it gave nothing come back after it. A backward that was
not announced (that of another model, which goes through this one) adds to a placeholder, which keeps what it
is given for the hook that follows. All parameters of a bucket get placeholders, on all ranks, whether or not
there is a gradient on this one: what a user drops is dropped on all ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

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
        added: What a backward that was not announced has added to it.
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
        """Take a zero, and what a backward adds; refuse all else.

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
            if func is torch.ops.aten.add.Tensor:  # of a backward with create_graph=True
                return args[1]
            args[0].added = args[1]
            return args[0]
        flat = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else [arg])]
        found = next((part for part in flat if isinstance(part, GradPlaceholder)), None)
        shape = "unknown" if found is None else tuple(found.shape)
        raise ValueError(_REFUSED.format(name=str(func), shape=shape))


class BucketPlaceholders:
    """The placeholders of the parameters of a bucket.

    Args:
        params: The parameters.
        dtype: The dtype of their gradients.
    """

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._params = params
        self._dtype = dtype
        self._all: list[GradPlaceholder] = []  # made with the first mean
        self._put: set[int] = set()  # parameters whose mean is dropped with their placeholder
        self._covered: set[int] = set()  # those of them that have got new gradients on top of the mean
        self._is_lifted = False  # whether a backward runs for which they were taken away

    def __getstate__(self) -> dict[str, Any]:
        # Copies of parameters have no gradients.
        return {**vars(self), "_all": [], "_put": set(), "_covered": set(), "_is_lifted": False}

    def is_real(self, index: int) -> bool:
        """Return whether a parameter has a gradient that is not a placeholder."""
        grad = self._params[index].grad
        return grad is not None and not (self._all and grad is self._all[index])

    def put(self) -> None:
        """Give every parameter its placeholder in the place of a gradient."""
        if not self._all:
            self._all = [GradPlaceholder(param, self._dtype) for param in self._params]
        for param, placeholder in zip(self._params, self._all, strict=True):
            placeholder.is_zeroed = False
            param.grad = placeholder
        self._put = set(range(len(self._params)))
        self._covered.clear()
        self._is_lifted = False

    def withdraw(self, indices: Iterable[int]) -> None:
        """Let parameters have no gradient in the place of their placeholder, since no rank has one."""
        for index in self._put.intersection(indices):
            self._put.discard(index)
            if self._params[index].grad is self._all[index]:
                self._params[index].grad = None

    def lift(self) -> None:
        """Take placeholders away before a backward; `lower` follows it."""
        for index in self._put:
            if self._params[index].grad is self._all[index]:
                self._params[index].grad = None
        self._is_lifted = True

    def lower(self) -> None:
        """Give placeholders back after a backward to the parameters that it gave nothing."""
        if not self._is_lifted:
            return
        self._is_lifted = False
        for index in self._put:
            if self._params[index].grad is None:
                self._params[index].grad = self._all[index]
            else:
                self._covered.add(index)

    def take_grad(self, index: int) -> bool:
        """Take what a backward has added to a placeholder; return whether the parameter has a gradient."""
        param = self._params[index]
        if index not in self._put:
            return param.grad is not None
        placeholder = self._all[index]
        if param.grad is placeholder and placeholder.added is not None:
            param.grad, placeholder.added = placeholder.added, None
        if param.grad is None or param.grad is placeholder:
            return False
        self._covered.add(index)
        return True

    def changed(self) -> tuple[list[int], list[int]]:
        """Return, once, the parameters whose placeholder is gone, and those whose placeholder is zero now.

        Raises:
            ValueError: A hook of the user's has added to a placeholder during a backward.
        """
        if self._is_lifted or not self._put:
            return [], []
        gone, zeroed = [], []
        for index in self._put:
            placeholder, grad = self._all[index], self._params[index].grad
            if grad is None or (grad is not placeholder and index not in self._covered):
                gone.append(index)
            elif placeholder.added is not None:
                placeholder.added = None
                raise ValueError(_REFUSED.format(name="an addition", shape=tuple(placeholder.shape)))
            elif placeholder.is_zeroed:
                placeholder.is_zeroed = False
                zeroed.append(index)
        self._put.difference_update(gone)
        self._covered.difference_update(gone)
        return gone, zeroed
