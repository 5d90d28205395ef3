"""Full precision in a model of 16 bits: float32 buffers and inputs that behave as tensors of 16 bits.

[Note: full precision in 16 bits]
A `FullPrecisionTensor` has the values of a float32 tensor, and behaves as its copy in 16 bits does: `dtype`,
and the dtypes of results, are those of the copy. So a model runs as if its buffers and inputs had been cast,
and yet positions, time steps and tables keep the digits that 16 bits lack. A function of torch

- that takes no other floating-point tensor computes in float32, and returns such a tensor again;
- that takes a tensor of 16 bits, such as a weight or an activation, takes the copy, and returns 16 bits; a
  loss that is a difference takes the values, and its result is rounded;
- that writes into such a tensor writes the float32 values;
- that converts it to float32 or float64 returns the values, as an ordinary tensor.

Whatever reads memory without a function of torch in between (a kernel that takes an address) is given the
copy. The copy is remembered as long as something else needs it, for instance a graph.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch._guards import TracingContext
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.jit import ScriptModule
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from colossalai.tensor._torch_function import OF_AUTOGRAD

_OF_16_BITS = (torch.float16, torch.bfloat16)
# Of lists and dicts in each other. Other objects, such as configs, may refuse to be looked into.
_DEPTH_OF_ATTRIBUTES = 4


class FullPrecisionTensor(torch.Tensor):
    """A float32 tensor that behaves as one of 16 bits; see [Note: full precision in 16 bits].

    It is a view of the tensor that it is made of, by `with_full_precision`.

    Attributes:
        low_dtype: The 16-bit dtype.
    """

    low_dtype: ClassVar[torch.dtype]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch that gets one."""
        kwargs = dict(kwargs or {})
        low_dtype = cls.low_dtype
        if not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None:
            # The compiler itself calls, and makes a graph for the memory that there is.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        if _writes_into_arguments(func, args):
            return _with_copies_written_back(func, args, kwargs)
        if _writes(func, args, kwargs):
            func(*_map(_widened, args), **_map(_widened, kwargs))
            return kwargs.get("out", args[0] if args else None)
        # Next to 16 bits the copy is taken; else the values are, and the result is as full as its operands.
        others = [each for each in _tensors((args, kwargs)) if not isinstance(each, FullPrecisionTensor)]
        has_16_bits = any(each.dtype in _OF_16_BITS for each in others) and func not in _OF_SHAPE
        if not has_16_bits and not _asks_for_16_bits(func, args, kwargs):
            result = func(*_map(source_of, args), **_map(source_of, kwargs))
            is_full = not _is_of_32_bits(func, args, kwargs, others)
            if func in _CASTS and is_full is not isinstance(args[0], FullPrecisionTensor):
                result = result.clone()  # as a cast to another dtype does
            return _map(lambda each: with_full_precision(each, low_dtype), result) if is_full else result
        if func in _WIDENED:
            return _map(_in_16_bits(low_dtype), func(*_map(_widened, args), **_map(_widened, kwargs)))
        return func(*_map(rounded, args), **_map(rounded, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the values."""
        return f"FullPrecisionTensor({source_of(self)!r}, low_dtype={_low_dtype_of(self)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the float32 values, as an ordinary tensor."""
        return source_of(self).__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        """Return another one of the same tensor."""
        return with_full_precision(source_of(self), _low_dtype_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return another one, with memory of its own."""
        copy = with_full_precision(source_of(self).detach().clone(), _low_dtype_of(self))
        memo[id(self)] = copy
        return copy


class _InBFloat16(FullPrecisionTensor):
    low_dtype = torch.bfloat16


class _InFloat16(FullPrecisionTensor):
    low_dtype = torch.float16


_CLASSES: Mapping[torch.dtype, type[FullPrecisionTensor]] = {
    torch.bfloat16: _InBFloat16,
    torch.float16: _InFloat16,
}


def with_full_precision(tensor: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    """Return a float32 tensor as a `FullPrecisionTensor`; other tensors unchanged.

    A sparse tensor, which has no memory to share, is rounded.

    Args:
        tensor: The tensor, whose memory the result shares.
        low_dtype: The 16-bit dtype.
    """
    if type(tensor) is not torch.Tensor or tensor.dtype != torch.float32:
        return tensor
    if tensor.layout is not torch.strided:
        return tensor.to(low_dtype)
    result = tensor.as_subclass(_CLASSES[low_dtype])
    if not torch.compiler.is_dynamo_compiling():
        vars(result)["_source"] = tensor
    return result


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the float32 tensor of a `FullPrecisionTensor`; any other tensor as it is."""
    if not isinstance(tensor, FullPrecisionTensor):
        return tensor
    if not torch.compiler.is_dynamo_compiling():
        source: torch.Tensor | None = vars(tensor).get("_source")
        if source is not None and _own_node(tensor) is None:
            return source
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.view_as(tensor)


def _own_node(tensor: FullPrecisionTensor) -> Any:
    """Return the node of the result of a custom autograd function, which is not in its source's graph."""
    with torch._C.DisableTorchFunctionSubclass():
        node = tensor.grad_fn if tensor.requires_grad else None
        return None if node is None or node.name() == "AliasBackward0" else node


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a `FullPrecisionTensor` as an ordinary tensor of 16 bits; any other tensor as it is."""
    if not isinstance(tensor, FullPrecisionTensor):
        return tensor
    source = source_of(tensor)
    # A copy in a graph belongs to the modes that it was made in, and the compiler shares copies itself.
    if torch.compiler.is_dynamo_compiling() or source.requires_grad or source.is_inference():
        return source.to(_low_dtype_of(tensor))
    if "_has_data" in vars(tensor):  # torch does not count writes through `data`
        return source.to(_low_dtype_of(tensor))
    state = (source._version, torch.is_inference_mode_enabled())
    known, reference = vars(tensor).get("_copy", (None, None))
    copy: torch.Tensor | None = reference() if reference is not None else None
    if copy is None or known != state or (not copy.is_inference() and copy._version):
        # None is in use, the values were written to, or a reader wrote into it.
        copy = source.to(_low_dtype_of(tensor))
        vars(tensor)["_copy"] = (state, weakref.ref(copy))
    return copy


def without_full_precision(value: Any) -> Any:
    """Return a nested value in which each `FullPrecisionTensor` is its copy in 16 bits."""
    return _map(rounded, value)


class FullPrecisionBuffers(dict[str, torch.Tensor | None]):
    """Float32 buffers of a 16-bit module; `module.name` returns a `FullPrecisionTensor`.

    It replaces `module._buffers`. `module.buffers()` and `module.state_dict()` return the float32 tensors
    themselves, and a value that is assigned to `module.name` is stored in float32.

    Args:
        buffers: The buffers.
        low_dtype: The 16-bit dtype.
        plain: Names of buffers that are read as they are.
    """

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor | None],
        low_dtype: torch.dtype,
        plain: Iterable[str] = (),
    ) -> None:
        super().__init__(buffers)
        self._low_dtype = low_dtype
        self._plain = frozenset(plain)
        self._last_views: dict[str, torch.Tensor] = {}  # for addresses that were read of their copies

    def __getitem__(self, name: str) -> torch.Tensor | None:
        buffer = super().__getitem__(name)
        if buffer is None or name in self._plain:
            return buffer
        # A new one each time: between forwards come writes that torch does not count, such as broadcasts.
        view = with_full_precision(buffer, self._low_dtype)
        if not torch.compiler.is_dynamo_compiling():
            self._last_views[name] = view
        return view

    def get(self, name: str, default: Any = None) -> Any:
        """Return a buffer as `module.name` does."""
        return self[name] if name in self else default  # noqa: SIM401

    def __setitem__(self, name: str, buffer: torch.Tensor | None) -> None:
        if isinstance(buffer, torch.Tensor):
            buffer = source_of(buffer)
            before = None if name in self._plain else super().get(name)
            if before is not None and before.dtype == torch.float32 and buffer.dtype in _OF_16_BITS:
                self._low_dtype = buffer.dtype  # another one by `module.half()` or `bfloat16()`
                buffer = buffer.float()
        super().__setitem__(name, buffer)

    def __reduce__(self) -> Any:
        return FullPrecisionBuffers, (dict(self.items()), self._low_dtype, self._plain)


def keep_full_precision(
    module: nn.Module, low_dtype: torch.dtype, *, is_plain: Callable[[torch.Tensor], bool]
) -> None:
    """Let the buffers of a module, and of its children, be float32 and behave as tensors of 16 bits.

    A layer, which has parameters and no children, takes the copies in 16 bits of its inputs. A buffer is cast
    in place, to 16 bits, where no class of Python is between it and its readers: if a module has it under
    another attribute, too, or if it is a parameter, sparse or in TorchScript. So is one of another 16-bit
    dtype.

    Args:
        module: The module.
        low_dtype: The 16-bit dtype.
        is_plain: Returns whether a buffer stays as it is.
    """
    aliased = _attributes(module)
    for part in module.modules():
        plain = set()
        for name, buffer in part._buffers.items():
            if buffer is None or is_plain(buffer):
                plain.add(name)
            elif not _can_be_kept(buffer) or id(buffer) in aliased or isinstance(part, ScriptModule):
                buffer.data = buffer.data.to(low_dtype)
            elif buffer.dtype == torch.float64:
                buffer.data = buffer.data.float()
        if not isinstance(part, ScriptModule):
            vars(part)["_buffers"] = FullPrecisionBuffers(part._buffers, low_dtype, plain)
        has_params = any(param is not None for param in part._parameters.values())
        if has_params and not part._modules and not isinstance(part, ScriptModule):
            # A layer of torch refuses float32 next to 16 bits: for instance a buffer in a closure.
            hook = _cast_inputs if type(part).__module__.startswith("torch.nn.") else _round_inputs
            if hook not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(hook, with_kwargs=True)


def _can_be_kept(buffer: torch.Tensor) -> bool:
    is_wide = buffer.dtype in (torch.float32, torch.float64)
    return is_wide and type(buffer) is torch.Tensor and buffer.layout is torch.strided


def _attributes(module: nn.Module) -> set[int]:
    """Return the `id` of each tensor that a module has in an attribute, and not as a parameter or buffer."""
    members = ("_parameters", "_buffers", "_modules")
    values = [value for part in module.modules() for name, value in vars(part).items() if name not in members]
    found = set()
    for _ in range(_DEPTH_OF_ATTRIBUTES):
        found |= {id(value) for value in values if isinstance(value, torch.Tensor)}
        lists = [value for value in values if isinstance(value, list | tuple)]
        lists += [list(value.values()) for value in values if isinstance(value, dict)]
        values = [part for each in lists for part in each]
    return found


def _round_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Give a layer copies in 16 bits; the hook of a tool that copies hooks is called without `kwargs`."""
    return _changed(rounded, args, kwargs) if _has_full(args, kwargs) else None


def _cast_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Give a layer of torch inputs of the dtype of its parameters."""
    has_full = _has_full(args, kwargs)
    if not has_full and not any(each.dtype == torch.float32 for each in _tensors((args, kwargs))):
        return None
    dtype = next((param.dtype for param in layer._parameters.values() if param is not None), None)
    if dtype in _OF_16_BITS:
        return _changed(lambda each: _in_16_bits(dtype)(rounded(each)), args, kwargs)
    if not has_full:
        return None
    return _changed(rounded if isinstance(layer, _BatchNorm) else source_of, args, kwargs)


def _has_full(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    return any(isinstance(each, FullPrecisionTensor) for each in _tensors((args, kwargs)))


def _changed(
    function: Callable[[torch.Tensor], Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    args = _map(function, args)
    return args if kwargs is None else (args, _map(function, kwargs))


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to the tensors in tuples, lists, dicts and slices."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        parts = [_map(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [_map(function, each) for each in value]
    if type(value) is dict:
        return {key: _map(function, each) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif type(value) is dict:
        yield from _tensors(tuple(value.values()))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the float32 tensor of a `FullPrecisionTensor`, and a tensor of 16 bits in float32."""
    return tensor.float() if tensor.dtype in _OF_16_BITS and type(tensor) not in _LOW else source_of(tensor)


def _low_dtype_of(tensor: FullPrecisionTensor) -> torch.dtype:
    # The compiler does not read attributes of the class.
    return torch.float16 if isinstance(tensor, _InFloat16) else torch.bfloat16


def _in_16_bits(low_dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(low_dtype) if tensor.dtype == torch.float32 else tensor


def _writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into a `FullPrecisionTensor`."""
    written = [kwargs.get("out")] + ([args[0]] if args and _is_in_place(func) else [])
    return any(isinstance(each, FullPrecisionTensor) for each in _tensors(written))


def _is_in_place(func: Callable[..., Any]) -> bool:
    if torch.compiler.is_dynamo_compiling() or not isinstance(func, OpOverload | OpOverloadPacket):
        return func in _IN_PLACE or func is _TENSOR.__ipow__  # which the compiler does not find in a set
    return func.__name__.split(".")[0].endswith("_")


def _writes_into_arguments(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function writes into several arguments, whose dtypes it may compare."""
    if torch.compiler.is_dynamo_compiling():
        return False
    if isinstance(func, OpOverload):
        return func._schema.is_mutable and not _is_in_place(func)
    is_collective = getattr(func, "__module__", "").startswith("torch.distributed")
    if args and isinstance(args[0], list) and (is_collective or _is_in_place(func)):
        return any(type(each) not in _LOW and each.dtype in _OF_16_BITS for each in args[0])
    return False


def _with_copies_written_back(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function with copies in 16 bits, and write those that it has changed back."""
    given = [each for each in _tensors((args, kwargs)) if isinstance(each, FullPrecisionTensor)]
    copies = {id(each): source_of(each).to(_low_dtype_of(each)) for each in given}
    result = func(
        *_map(lambda each: copies.get(id(each), each), args),
        **_map(lambda each: copies.get(id(each), each), kwargs),
    )
    for each in given:
        copy = copies[id(each)]
        if not copy.equal(source_of(each).to(copy.dtype)):  # collectives do not count their writes
            source_of(each).copy_(copy)
    return result


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input")


def _requested(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), None)


def _is_of_32_bits(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    others: Sequence[torch.Tensor],
) -> bool:
    """Whether a function without 16-bit operands returns the dtype that it computes in, as with the copy."""
    if func is _TENSOR.float or _requested(args, kwargs) is not None:
        return True
    wide = [each for each in others if each.dtype == torch.float32]
    if not wide:
        return False
    first = _first(args, kwargs)
    if func in _LIKE_FIRST:
        return not isinstance(first, FullPrecisionTensor)
    if func in _CASTS:
        return first is not wide[0]
    # Tensors without dims count only among themselves.
    full = [each for each in _tensors((args, kwargs)) if isinstance(each, FullPrecisionTensor)]
    return any(each.dim() for each in wide) or not any(each.dim() for each in full)


def _asks_for_16_bits(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if func in (_TENSOR.half, _TENSOR.bfloat16, torch.result_type):
        return True
    requested = _requested(args, kwargs)
    if requested is None:
        return func is _TENSOR.type and len(args) == 1 and not kwargs  # the name of the type
    return func is _TENSOR.view or (requested in _OF_16_BITS and (func in _CASTS or func in _NORMS))


def _on_copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that reads memory on the copy, which lives as long as the tensor."""
    copy = vars(args[0])["_held_copy"] = rounded(args[0])
    return func(copy, *args[1:], **kwargs)


def _on_source(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(source_of(args[0]), *args[1:], **kwargs)


def _data_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    if not torch.compiler.is_dynamo_compiling():
        vars(tensor)["_has_data"] = True
    return with_full_precision(func(source_of(tensor)), _low_dtype_of(tensor))


def _set_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Give a buffer or an input other memory; see `torch.Tensor.data`."""
    tensor, data = args
    source = source_of(tensor)
    source.data = _widened(data)
    vars(tensor)["_has_data"] = True
    with torch._C.DisableTorchFunctionSubclass():
        func(tensor, source)


def _to_numpy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an array of the 16-bit dtype, if numpy has it, else of float32."""
    if _low_dtype_of(args[0]) == torch.float16:
        return func(rounded(args[0]), *args[1:], **kwargs)
    return func(source_of(args[0]).detach().clone(), *args[1:], **kwargs)


def _require_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Make the tensor a leaf of a graph: every later read of it is in the graph."""
    tensor = args[0]
    if source_of(tensor).requires_grad:
        func(source_of(tensor), *args[1:], **kwargs)
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        func(tensor, *args[1:], **kwargs)
        vars(tensor)["_source"] = tensor.as_subclass(torch.Tensor)
        vars(tensor)["_is_leaf"] = tensor.requires_grad
    return tensor


def _node_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _own_node(args[0]) or func(source_of(args[0]))


def _is_leaf(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    is_own = not torch.compiler.is_dynamo_compiling() and "_is_leaf" in vars(args[0])
    return is_own or func(source_of(args[0]))


def _grad_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    if "_is_leaf" not in vars(tensor):
        result = func(*_map(source_of, args), **kwargs)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(tensor, *_map(source_of, args[1:]), **kwargs)
    return _map(lambda each: with_full_precision(each, _low_dtype_of(tensor)), result)


def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of autograd, whose tensors are those of the graph."""
    result = func(*_map(_in_graph, args), **_map(_in_graph, kwargs))
    if func is not torch.autograd.grad:
        return result
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    return tuple(
        with_full_precision(grad, _low_dtype_of(tensor)) if isinstance(tensor, FullPrecisionTensor) else grad
        for grad, tensor in zip(result, inputs, strict=True)
    )


def _in_graph(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, FullPrecisionTensor) and "_is_leaf" in vars(tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return get_gradient_edge(tensor)
    return source_of(tensor)


def _property(name: str) -> Any:
    return getattr(torch.Tensor, name)


_LOW = tuple(_CLASSES.values())
_TENSOR = torch.Tensor
_ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _property("dtype").__get__: lambda func, args, kwargs: _low_dtype_of(args[0]),
    _property("itemsize").__get__: lambda func, args, kwargs: 2,
    _TENSOR.element_size: lambda func, args, kwargs: 2,
    _property("nbytes").__get__: lambda func, args, kwargs: 2 * args[0].numel(),
    _property("_base").__get__: _on_source,
    _property("data").__get__: _data_of,
    _property("data").__set__: _set_data,
    _TENSOR.numpy: _to_numpy,
    _TENSOR.__array__: _to_numpy,
    _property("grad_fn").__get__: _node_of,
    _property("is_leaf").__get__: _is_leaf,
    _property("grad").__get__: _grad_of,
    _property("grad").__set__: _grad_of,
    _TENSOR.requires_grad_: _require_grad,
    _property("requires_grad").__set__: _require_grad,
    **dict.fromkeys(
        (
            *(_property(name).__get__ for name in ["shape", "device", "ndim", "layout", "requires_grad"]),
            *(_TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.stride, _TENSOR.__len__),
            *(_TENSOR.is_floating_point, torch.is_floating_point, _TENSOR.is_contiguous),
        ),
        _on_source,
    ),
    **dict.fromkeys(
        (_TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage, _TENSOR.__dlpack__), _on_copy
    ),
    **dict.fromkeys(OF_AUTOGRAD, _differentiate),
}
_CASTS = frozenset([_TENSOR.to, _TENSOR.type, _TENSOR.type_as, _TENSOR.float])
_NORMS = frozenset(
    [_TENSOR.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm]
)
# Other tensors give only a shape.
_OF_SHAPE = frozenset([_TENSOR.view_as, _TENSOR.reshape_as, _TENSOR.expand_as])
# The result has the dtype of the first tensor, also with float32 tensors after it.
_LIKE_FIRST = _OF_SHAPE | frozenset(
    [
        *(F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm, F.rms_norm, F.huber_loss),
        *(torch.batch_norm, torch.instance_norm, torch.layer_norm, torch.group_norm, torch.rms_norm),
        *(F.hinge_embedding_loss, torch.diagonal_scatter, _TENSOR.diagonal_scatter, torch.select_scatter),
        *(_TENSOR.select_scatter, torch.slice_scatter, _TENSOR.slice_scatter, torch.as_strided_scatter),
        *(_TENSOR.as_strided_scatter, torch.masked_fill, _TENSOR.masked_fill, torch.index_fill),
        *(_TENSOR.index_fill,),
    ]
)
_IN_PLACE = frozenset(
    [
        *(
            getattr(owner, name)
            for owner in (torch, _TENSOR, nn.init, F)
            for name in dir(owner)
            if name.endswith("_")
            and (name[0] != "_" or name.startswith("_foreach_"))
            and (owner is not torch or "resize" not in name)  # which the compiler cannot hash
        ),
        _TENSOR.__setitem__,
    ]
)
# With an activation. The difference of two near values is lost where both are rounded, and so are statistics
# that are written.
_WIDENED = frozenset(
    [
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
        *(F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm),
    ]
)
