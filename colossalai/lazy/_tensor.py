"""The lazy tensor: a tensor on the meta device with a record of its computation.

[Note: inside a context] A model may read the device of its tensors, to make others there or, as some of
torch's initializers do, to skip tensors on the meta device. So inside a context a lazy tensor reports its
future device, and the model is built as in an eager build. Outside of it, it reports the meta device.
"""

from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from colossalai.lazy._record import Surroundings, is_factory, run_lazily
from colossalai.lazy._replay import value_of
from colossalai.lazy._tape import tape_of


class LazyTensor(Tensor):
    """A tensor on the meta device whose storage has a tape.

    As a subclass it also records operations outside of a `LazyInitContext`: a deep copy, a change of dtype,
    an initialization by hand.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record an operation outside of a context."""
        return run_lazily(op, args, kwargs or {}, context=None, wrap=as_lazy)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The meta device; inside a context the future device of the tensor."""
        # See [Note: inside a context]
        tape = tape_of(self) if is_recording() else None
        return torch.device("meta") if tape is None else tape.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether `device` is the meta device."""
        return self.device.type == "meta"

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the values."""
        return value_of(self).requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as Python numbers."""
        return value_of(self).tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not isinstance(self, nn.Parameter):
            copied: Self = super().__deepcopy__(memo)
            return copied
        if id(self) not in memo:  # like torch's copy of a parameter, without its attributes
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"a lazy tensor of shape {tuple(self.shape)} has no values to save: call "
            "LazyInitContext.materialize(model) first"
        )


def as_lazy(tensor: Tensor) -> LazyTensor:
    """Return a lazy tensor on the storage of a tensor on the meta device."""
    return Tensor._make_subclass(LazyTensor, tensor)


class RecordingMode(TorchDispatchMode):
    """Intercepts every operation inside a context, also those without tensors among their arguments.

    Args:
        device: Device of tensors that are made on no device or on the meta device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.context = Surroundings(device)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation that makes a tensor or has a lazy one as an argument, and run any other."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        has_lazy = any(isinstance(leaf, Tensor) and tape_of(leaf) is not None for leaf in leaves)
        if has_lazy or is_factory(op, args, kwargs):
            return run_lazily(op, args, kwargs, context=self.context, wrap=as_lazy)
        return op(*args, **kwargs)


def is_recording() -> bool:
    """Return whether this code runs inside a context, and outside of the recording of an operation."""
    return any(isinstance(mode, RecordingMode) for mode in _get_current_dispatch_mode_stack())
