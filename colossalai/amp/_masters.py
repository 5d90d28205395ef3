"""Float32 copies of the weights of a model that computes in a lower precision.

[Note: weights in two precisions]
The model holds each parameter in the low precision, the optimizer its float32 copy, the master. Between two
steps both agree: the parameter is the rounded master. A step copies the gradient from the parameter to the
master, updates the master, and rounds it into the parameter. Updates that are smaller than the rounding
accumulate in the master. If a user overwrites a parameter between two steps (loads weights, clips them), its
elements that differ from the rounded master are copied to the master. In-place writes are detected by the
version that torch counts for every tensor; writes through `param.data`, which torch does not count, are not.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp._sharded_params import MASTERS_KEY, STATE_KEY, OptimizerParams
from colossalai.amp._step_plan import params_of
from colossalai.context import Axis
from colossalai.tensor import (
    gradient_sync,
    keep_full_precision,
    keeps_dtype,
    row_cache_of,
    scale_grads,
    set_output_dtype,
)


class Masters(OptimizerParams):
    """The masters of an optimizer's parameters; without masters, every method does nothing.

    See [Note: weights in two precisions].

    Args:
        pairs: The master of each parameter with one.
    """

    is_paged = False

    def __init__(self, pairs: Mapping[nn.Parameter, nn.Parameter] | None = None) -> None:
        self._master_of = dict(pairs or {})
        self._param_of = {master: param for param, master in self._master_of.items()}
        self._versions = {param: param._version for param in self._master_of}
        # Gradients that have been copied to masters, and their versions then.
        self._taken: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_taken": {}}  # a copy has no weak references

    def __len__(self) -> int:
        return len(self._master_of)

    def master_of(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return the master of a parameter, or None."""
        return self._master_of.get(param)

    def without(self, params: Collection[nn.Parameter]) -> "Masters":
        """Return the masters of all other parameters."""
        return Masters({param: master for param, master in self._master_of.items() if param not in params})

    def param_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the model's parameter of a master; other tensors are returned unchanged."""
        param: torch.Tensor = self._param_of.get(tensor, tensor)  # type: ignore[call-overload]
        return param

    def with_masters(self, param_names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Return the names, with the names of parameters also for their masters."""
        names = dict(param_names)
        names.update({self._master_of[param]: names[param] for param in self._master_of if param in names})
        return names

    def start_equal(self, replicas: Axis) -> None:
        """Broadcast each master from the first rank that holds its parameter; parameters are not changed."""
        for master in self._param_of:
            holders = gradient_sync(master, replicas).axis
            if holders.size > 1:
                # In the order of parameters, which is the same on all ranks that hold them.
                dist.broadcast(master.detach(), src=holders.ranks[0], group=holders.group)

    def replace_params(self, optimizer: Optimizer) -> "Masters":
        """Replace an optimizer's parameters by masters, states included, and return those masters."""
        held = {param for group in optimizer.param_groups for param in group["params"]}
        _exchange(optimizer, self._master_of)
        return Masters({param: master for param, master in self._master_of.items() if param in held})

    def scale_grads(self, factor: float) -> None:
        """Multiply gradients from backwards, before `take_grads`."""
        scale_grads(self._master_of, factor)

    @torch.no_grad()
    def put_back_grads(self, factor: float, *, untaken: float | torch.Tensor) -> None:
        """See the base class; a gradient that users have written since then is not overwritten."""
        for param, master in self._master_of.items():
            if param.grad is None:
                continue
            taken, version = self._taken.get(param, (None, 0))
            if taken is None or taken() is not param.grad:  # users have assigned another tensor
                param.grad.mul_(factor)
            elif master.grad is None or param.grad._version != version:
                param.grad.mul_(untaken)
            else:
                param.grad.copy_(master.grad * factor)

    def take_grads(self) -> None:
        """Give each master the gradient of its parameter: the same memory, if that is float32 already."""
        self._taken.clear()
        for param, master in self._master_of.items():
            grad = param.grad
            master.grad = None if grad is None else grad.to(master.dtype)
            if grad is not None and master.grad is not grad:
                self._taken[param] = (weakref.ref(grad), grad._version)

    def follow_users(self) -> None:
        """See the base class."""
        for param, master in self._master_of.items():
            if param.grad is None:
                master.grad = None

    def has_grads(self, params: Sequence[nn.Parameter]) -> bool:
        """See the base class."""
        return any(self.param_of(param).grad is not None for param in params)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the parameters."""
        for param, master in self._master_of.items():
            master.grad = None
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Update the masters with values written into parameters since the last `write_weights`."""
        for param, master in self._master_of.items():
            if param._version != self._versions[param]:
                master.copy_(torch.where(param == master.to(param.dtype), master, param.to(master.dtype)))
                self._versions[param] = param._version

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """See the base class."""
        self.take_weights()
        result = optimizer.step(closure)
        self.write_weights()
        return result

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into their parameters."""
        if self._master_of:
            torch._foreach_copy_(list(self._master_of), list(self._master_of.values()))
        self._versions = {param: param._version for param in self._master_of}

    @contextmanager
    def as_states(self, optimizer: Optimizer, *, loads: bool = True) -> Iterator[None]:
        """Context in which the optimizer holds the model's parameters, with masters as their states.

        So a checkpoint is saved and loaded under the names of the model. Afterwards, a parameter whose state
        has a master takes its value, whether it has a master here or not.
        """
        self.take_weights()
        _exchange(optimizer, self._param_of)
        for param, master in self._master_of.items():
            optimizer.state.setdefault(param, {})[STATE_KEY] = master.detach()
        try:
            yield
        finally:
            self.take_weights()  # some may have been loaded in the block
            _exchange(optimizer, self._master_of)
            for tensor in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
                _take_from_state(tensor, optimizer)
            self.write_weights()

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, with torch's numbers, and the masters."""
        content = optimizer.state_dict()
        if not self._master_of:
            return content
        self.take_weights()
        # Outside of the states: torch's optimizers expect in a state all their own entries, or none.
        return {
            **content,
            MASTERS_KEY: {
                number: param.detach()
                for number, param in enumerate(params_of(optimizer))
                if param in self._param_of
            },
        }

    def load_state_dict(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """Load a result of `state_dict`, with or without masters, into parameters with or without them."""
        self.take_weights()
        optimizer.load_state_dict(content)
        params = params_of(optimizer)
        with torch.no_grad():
            for number, master in content.get(MASTERS_KEY, {}).items():
                params[number].copy_(master)
        self.write_weights()


@dataclass(frozen=True, eq=False)
class Casts:
    """The dtypes that a precision gives to the parameters and buffers of a model, all at once or in runs.

    Attributes:
        dtype: Dtype of floating-point tensors; None: nothing is cast.
        keep: The `id` of each parameter and buffer that is not cast.
        grad_dtype: The dtype in which gradients of parameters with a master accumulate; None: `dtype`.
        with_masters: Whether trainable parameters that are cast get a master; False: the optimizer updates
            the model's tensors.
        keeps_buffers: Whether buffers keep their float32 values, and only behave as tensors of `dtype`.
    """

    dtype: torch.dtype | None = None
    keep: Collection[int] = ()
    grad_dtype: torch.dtype | None = None
    with_masters: bool = False
    keeps_buffers: bool = False

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of a parameter or buffer after the cast."""
        return tensor.dtype if self.dtype is None or not self._is_cast(tensor) else self.dtype

    def has_master(self, param: nn.Parameter) -> bool:
        """Return whether a parameter gets a master, also before the cast."""
        return self.with_masters and param.requires_grad and self._is_cast(param)

    def cast(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Cast parameters in place, and return the new masters by parameter.

        The parameters remain the same objects. Their gradients are dropped.
        """
        masters = {}
        for param in filter(self._is_cast, params):
            if self.has_master(param):
                masters[param] = _master_of(param)
            param.grad = None
            param.data = param.data.to(self.dtype)
            if param in masters and self.grad_dtype not in (None, self.dtype):
                param.grad_dtype = self.grad_dtype
        return masters

    def cast_buffers(self, model: nn.Module) -> None:
        """Cast the floating buffers of a model, and outputs of its cached tables; see `keeps_buffers`."""
        if self.dtype is not None:
            set_output_dtype(model, self.dtype)
        if self.dtype is not None and self.keeps_buffers:
            keep_full_precision(model, self.dtype, is_plain=lambda buffer: not self._is_cast(buffer))
            return
        for buffer in filter(self._is_cast, model.buffers()):
            buffer.data = buffer.data.to(self.dtype)

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        if self.dtype is None or not tensor.is_floating_point():
            return False
        return id(tensor) not in self.keep and not keeps_dtype(tensor) and row_cache_of(tensor) is None


def _master_of(param: nn.Parameter) -> nn.Parameter:
    # The master takes the memory of a float32 parameter, which gets new memory in the low precision.
    master = nn.Parameter(param.data.float())
    vars(master).update(vars(param))  # the sharding spec, and attributes of the user
    return master


def _exchange(optimizer: Optimizer, successors: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in the groups of an optimizer, and as keys of its state."""
    for group in optimizer.param_groups:
        group["params"] = [successors.get(param, param) for param in group["params"]]
    for param, successor in successors.items():
        if param in optimizer.state:
            optimizer.state[successor] = optimizer.state.pop(param)


def _keeps_its_own(param: torch.Tensor, optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps its own master of a parameter of low precision."""
    is_low = param.dtype in (torch.float16, torch.bfloat16)
    return is_low and getattr(optimizer, "keeps_masters", False)


@torch.no_grad()
def _take_from_state(param: torch.Tensor, optimizer: Optimizer) -> None:
    state = optimizer.state.get(param, {})
    if STATE_KEY not in state or _keeps_its_own(param, optimizer):
        return
    stored = state.pop(STATE_KEY)
    if stored.data_ptr() != param.data_ptr():
        param.copy_(stored)
    if not state:  # an optimizer initializes a state only if there is none
        del optimizer.state[param]
