"""Runs of a model on fake tensors: a copy of the model without memory, and a record of its calls.

A fake tensor of torch has a shape, a dtype, strides and a storage without memory, so that views are
identified by their storage. The twin is a deep copy of the model with fake parameters and buffers: changes by
a forward (running statistics, counters, masks kept as attributes) happen in the twin.
"""

import copy
import difflib
import functools
import inspect
import logging
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_NUM_LISTED = 8  # names of arguments in a message
_MOST_KNOWN = 1 << 25  # elements of a tensor whose values are computed: a mask for sequences of 5,000


@dataclass(frozen=True, kw_only=True)
class FakeCall:
    """A call of an operation.

    Attributes:
        function: The overload, such as `torch.ops.aten.mm.default`.
        args: Its positional arguments.
        kwargs: Its other arguments.
        outputs: The tensors that it returned, in order.
        module: The full name of the innermost module of the model that called it.
        is_grad_enabled: Whether autograd was enabled.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    module: str
    is_grad_enabled: bool


class DataDependentShape(ValueError):
    """A shape or a branch depends on values, which a trace does not have.

    Args:
        operation: The operation whose result depends on values.
        module: The full name of its module.
        model: The name of the model's class.
    """

    def __init__(self, operation: str, module: str, model: str) -> None:
        super().__init__(
            f"{operation} in module {module!r} of {model} depends on the values of tensors, and so do the "
            "shapes or branches behind it, which a trace without values cannot know: compute them from "
            "shapes, or give them as arguments that are no tensors"
        )


def check_model(model: nn.Module) -> None:
    """Check that a value is a model.

    Raises:
        ValueError: `model` is not a module.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ValueError(
            f"the model is the class {model.__name__}: give an object of it, {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}: give a torch.nn.Module")


def check_named(meta_args: Mapping[str, Any]) -> None:
    """Check that arguments are given by name.

    Raises:
        ValueError: `meta_args` is not a mapping, or has a key that is not a name.
    """
    if not isinstance(meta_args, Mapping):
        raise ValueError(
            f"meta_args is a {type(meta_args).__name__}: give a dict of the arguments of the forward by name"
        )
    for name in meta_args:
        if not isinstance(name, str):
            raise ValueError(f"meta_args has the key {name!r}: give names of arguments of the forward")


def batch_of(meta_args: Mapping[str, Any]) -> int:
    """Return the number of samples in the whole batch: the extent of dimension 0 of the arguments.

    Raises:
        ValueError: `meta_args` is not a mapping, has no tensor with dimensions, tensors of several batch
            sizes, or a batch of 0 samples.
    """
    check_named(meta_args)
    batches = {
        name: value.shape[0]
        for name, value in meta_args.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    if not batches:
        raise ValueError("meta_args has no tensor with a batch: give the arguments of the forward by name")
    if len(set(batches.values())) > 1:
        raise ValueError(
            f"dimension 0 of the arguments is the batch, and it is {batches}: give all of them for one batch"
        )
    batch = next(iter(batches.values()))
    if batch == 0:
        raise ValueError("meta_args have a batch of 0 samples: give arguments of the batch to be trained on")
    return batch


def checked_arguments(model: nn.Module, meta_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a trace, with `use_cache=False` for models with a cache.

    Args:
        model: The model.
        meta_args: Arguments of its forward by name.

    Raises:
        ValueError: `model` is not a module, or `meta_args` has a name that its forward does not, or lacks a
            required one.
    """
    check_model(model)
    check_named(meta_args)
    kinds = inspect.Parameter
    named = {
        name: param
        for name, param in inspect.signature(model.forward).parameters.items()
        if param.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    takes_any = any(
        param.kind is kinds.VAR_KEYWORD for param in inspect.signature(model.forward).parameters.values()
    )
    owner = f"the forward of {type(model).__name__}"
    for name in meta_args:
        # A forward with `**kwargs` would silently accept a misspelled "label".
        near = difflib.get_close_matches(name, named, n=3, cutoff=0.8 if takes_any else 0.5)
        if name not in named and (near or not takes_any):
            known = " or ".join(map(repr, near or list(named)[:_NUM_LISTED]))
            raise ValueError(f"meta_args names {name!r}, which {owner} does not have: use {known}")
    missing = [
        name for name, param in named.items() if param.default is kinds.empty and name not in meta_args
    ]
    if missing:
        raise ValueError(
            f"meta_args lacks {', '.join(map(repr, missing))}, which {owner} requires: give "
            f'meta_args={{"{missing[0]}": torch.rand(...).to("meta"), ...}} with the shape of a batch'
        )
    # Models with adapters of peft accept any name, and pass it on.
    base_of = getattr(model, "get_base_model", None)
    handed_on = inspect.signature(base_of().forward).parameters if takes_any and base_of else {}
    may_cache = "use_cache" in named or "use_cache" in handed_on
    return {"use_cache": False, **meta_args} if may_cache else dict(meta_args)


class FakeTwin:
    """A copy of a model, and of arguments, on fake tensors of one mode.

    Args:
        model: The model, which is not changed: on any device, the meta device included, or lazily built.
        arguments: Keyword arguments of its forward. Tensors in them can be on the meta device.

    Raises:
        ValueError: A parameter of `model` has no shape yet, or `model` cannot be copied.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy

        for name, param in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(param, UninitializedParameter | UninitializedBuffer):
                raise ValueError(f"{name!r} has no shape yet: run one forward of the model before its trace")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = _device_of(model)  # of its tensors
        memo: dict[int, Any] = {}
        for part in model.modules():
            for held in (part._parameters, part._buffers):
                memo.update({id(each): self._fake(each) for each in held.values() if each is not None})
            # Attributes on the meta device become fake; the forward may read the values of all others.
            memo.update(
                {id(each): self._fake(each) for each in vars(part).values() if _is_without_values(each)}
            )
        try:
            self.model: nn.Module = copy.deepcopy(model, memo)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied for a trace on fake tensors: {error}"
            ) from error
        # The loop over experts reads which of them are chosen; a grouped product has the same total shapes.
        if getattr(getattr(self.model, "config", None), "_experts_implementation", None) == "eager":
            with suppress(ValueError):  # raised for a model without experts
                self.model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        # A tensor that is passed under two names is two tensors: in training they differ.
        self.arguments = tree_map(
            lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf, dict(arguments)
        )

    def _fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor of the same shape, strides and dtype; a parameter for a parameter."""
        with self.mode:
            made = torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=self.device
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def run_as_in_training(self) -> None:
        """Make later forwards run as in training, where they would run differently in a trace.

        Some models check whether they are exported, and then avoid operations that depend on values: those of
        transformers give every attention a mask that training leaves out.
        """
        forward = self.model.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
            torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False
            try:
                with KnownValues(), GroupedProducts():
                    return forward(*args, **kwargs)
            finally:
                torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags

        self.model.forward = run


def _device_of(model: nn.Module) -> torch.device:
    """Return the device that the model will run on: of its parameters, or the CPU without memory."""
    places = {param.device for param in model.parameters()} - {torch.device("meta")}
    return min(places, key=str, default=torch.device("cpu"))


def _is_without_values(held: Any) -> bool:
    return isinstance(held, Tensor) and held.device.type == "meta"


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the random states of torch and of Python as they were."""
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)


@contextmanager
def quiet_attempt() -> Iterator[None]:
    """Silence an export that can fail, and skip the source location of each node, which takes time."""
    logs = [
        logging.getLogger(f"torch.{name}")
        for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
    ]
    flag = "do_not_emit_stack_traces"  # not in torch 2.11
    config: Any = torch.fx.config if hasattr(torch.fx.config, flag) else SimpleNamespace(**{flag: False})
    kept = [log.disabled for log in logs], getattr(config, flag)
    for log in logs:
        log.disabled = True
    setattr(config, flag, True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about changed attributes of the twin
            yield
    finally:
        for log, was_disabled in zip(logs, kept[0], strict=True):
            log.disabled = was_disabled
        setattr(config, flag, kept[1])


class KnownValues(TorchFunctionMode):
    """Computes the values that do not depend on arguments: positions, and masks that follow from them.

    Some models branch on such values; they are real tensors here, and constants of the trace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}  # by identity, which is unique while the tensor is referenced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function without fake tensors if all of its inputs are known."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_range = func is torch.arange and not any(isinstance(leaf, float | torch.dtype) for leaf in leaves)
        is_known = all(id(tensor) in self._known for tensor in tensors) if tensors else is_range
        if not is_known or _broadcast_numel(tensors) > _MOST_KNOWN:
            return func(*args, **kwargs)
        # Outside of the fake mode and of this mode: the result is a real tensor.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._known[id(leaf)] = leaf
        return result


class GroupedProducts(TorchFunctionMode):
    """Allows fake tensors of any dtype in products with the matrices of experts.

    torch's own grouped product has a shape function for bfloat16 only, though its kernels accept other
    dtypes. transformers has a replacement for compilation: shapes, costs and saved tensors are the same.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, with the replacement for a grouped product that lacks a shape function."""
        kwargs = kwargs or {}
        if func is torch._grouped_mm and args[0].dtype is not torch.bfloat16:
            return torch.ops.transformers.grouped_mm_fallback(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _broadcast_numel(tensors: Sequence[Tensor]) -> int:
    """Return the number of elements of an elementwise result of some tensors."""
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:  # not broadcastable
        return max(tensor.numel() for tensor in tensors)


class CallRecorder(TorchDispatchMode):
    """Records every operation that a model calls, with the module that calls it.

    Operations are recorded below autograd: `aten.addmm` with the transposed weight for a linear layer.

    Args:
        model: The model, a twin without other users: its modules get hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[FakeCall] = []
        self.failed: tuple[str, str] | None = None
        self._modules = [""]
        for name, part in model.named_modules():
            part.register_forward_pre_hook(self._enter(name), prepend=True)
            part.register_forward_hook(self._leave, always_call=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it; store the location of an operation that lacks values."""
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        try:
            result = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.failed = (str(func), self._modules[-1])
            raise
        self.calls.append(
            FakeCall(
                function=func,
                args=args,
                kwargs=kwargs or {},
                outputs=tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)),
                module=self._modules[-1],
                is_grad_enabled=torch.is_grad_enabled(),
            )
        )
        return result

    def _enter(self, name: str) -> Any:
        return lambda module, args: self._modules.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()


def record(twin: FakeTwin) -> tuple[CallRecorder, Any]:
    """Run the forward of a twin once; return the recorder and the result.

    Raises:
        ValueError: An operation of the model needs values of tensors, or its forward fails; the message is
            the model's own.
    """
    recorder = CallRecorder(twin.model)
    try:
        with twin.mode, recorder:
            result = twin.model(**twin.arguments)
    except Exception as error:
        name = type(twin.model).__name__
        if recorder.failed is not None:
            raise DataDependentShape(*recorder.failed, name) from error
        raise ValueError(
            f"the forward of {name} fails with these meta_args: {type(error).__name__}: {error}"
        ) from error
    return recorder, result


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in a value, in containers and in attributes of objects, such as those of a cache.

    Args:
        value: Result of a model.
        seen: Identities of the values visited so far.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from tensors_in(each, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)
