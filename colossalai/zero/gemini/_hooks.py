"""Hooks: gather chunks when torch uses their parameters, and keep views out of the autograd graph.

[Note: interception of uses]
A parameter of a model under Gemini becomes a `ChunkedParameter`: the same object, of another class, with one
NaN in the place of its memory. Every function of torch that takes it calls `__torch_function__` of its class.
Inside a module's forward, a backward or a recomputation the function gets a view of the gathered chunk
instead, which to autograd is a view of the parameter (`_view_of`). So control flow, tied and reused weights,
functional calls and checkpointing need no rules. Shape and type are returned without values; any other
function raises an error with the parameter's name outside of a use.

The class is changed in place (`__class__`), since others hold the parameter: optimizers, tied modules, lists
such as that of `nn.LSTM`, hooks. A new object would leave them with the old one.

[Note: saved views]
Views that autograd saves for the backward would keep their chunk's memory. `saved_tensors_hooks` recognize
them by their storage, save their offset in the chunk, and fetch the chunk again when the backward needs it.
A tensor saved by other hooks (torch's checkpoint has its own hooks inside these) keeps its memory, and is
counted until it is freed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from colossalai.tensor import (
    ASKING_NO_VALUES,
    CHUNK_PLACE,
    OF_AUTOGRAD,
    FlatRange,
    FlatValues,
    cut_of,
    follow_cut,
    set_flat_values,
    with_gradient_edges,
)
from colossalai.zero.gemini._cache import ChunkCache, is_in_backward
from colossalai.zero.gemini._chunk import Chunk

_SavedView = tuple[Chunk, torch.Size, tuple[Any, ...], Any]  # chunk, sizes, strides, offset


@dataclass(frozen=True, eq=False)
class ParamHandle:
    """The fields that a use of a parameter reads, set once.

    Attributes:
        hooks: The hooks of its model.
        chunk: The chunk with its values.
        index: The number of the parameter in the chunk.
        place: Its sizes, strides and offset in the whole of the chunk.
        name: The name of the parameter in the model.
        is_colo: Whether it is a ColoTensor that tensor parallelism shards.
    """

    hooks: "ModelHooks"
    chunk: Chunk
    index: int
    place: tuple[torch.Size, tuple[int, ...], int]
    name: str
    is_colo: bool

    def view(self) -> torch.Tensor:
        """Return the values, as a view of the chunk, which is present."""
        assert self.chunk.whole is not None, f"{self.name} is used, and {self.chunk}"
        return torch.as_strided(self.chunk.whole, *self.place)

    def held(self) -> FlatValues:
        """Return the values in this rank's section.

        Raises:
            RuntimeError: The whole was written in a block of `gathered` that has not ended.
        """
        if self.chunk.is_apart and self.chunk.is_written:
            raise RuntimeError(
                f"{self.name}, or a parameter in its chunk, was written inside `with model.gathered():`, and "
                "other ranks get what was written at the end: leave the block first, then save or load"
            )
        layout = self.chunk.layout
        begin, end = layout.overlap(self.index, layout.axis.rank)
        tensor = self.chunk.fragment(self.index)
        shape = tuple(layout.params[self.index].shape)
        part = FlatRange(shape, begin, end, tuple(tensor.shape), tensor.device)
        return FlatValues(part, tensor, _Loaded(self.hooks.cache, self.chunk))


@dataclass(frozen=True)
class _Loaded:
    """Notes that the sections of a chunk were overwritten; equal for all parameters in it."""

    cache: ChunkCache
    chunk: Chunk

    def __call__(self) -> None:
        self.cache.note_loaded(self.chunk)


class ModelHooks:
    """The hooks of a model in chunks: on its modules, parameters and saved tensors.

    Args:
        cache: The chunks.

    Attributes:
        cache: As given.
        open_views: For each whole module whose forward is running, the values of its parameters as its
            backward sees them; the innermost last.
    """

    def __init__(self, cache: ChunkCache) -> None:
        self.cache = cache
        self.open_views: list[Mapping[nn.Parameter, torch.Tensor]] = []
        self._by_placeholder: dict[int, ParamHandle] = {}  # by the storage of the parameter's placeholder
        self._depth = 0  # of forwards, one in the other
        self._has_saved_hooks = False
        self._saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelHooks":
        """Return `self`: a copy of a model has ordinary parameters, and its hooks refer to this object."""
        return self

    def add(self, chunk: Chunk, names: Mapping[nn.Parameter, str]) -> None:
        """Replace the memory of the parameters of a chunk, which has their values, by placeholders.

        Args:
            chunk: The chunk.
            names: The names of parameters in the model.
        """
        layout = chunk.layout
        for index, param in enumerate(layout.params):
            place = layout.shapes[index], layout.strides[index], layout.starts[index]
            handle = ParamHandle(self, chunk, index, place, names[param], is_colo=cut_of(param) is not None)
            nothing = float("nan") if param.is_floating_point() or param.is_complex() else 0
            param.data = torch.full((), nothing, dtype=param.dtype, device=param.device).expand(param.shape)
            setattr(param, CHUNK_PLACE, handle)
            set_flat_values(param, handle.held)
            param.__class__ = ChunkedParameter  # See [Note: interception of uses]
            self._by_placeholder[param.untyped_storage()._cdata] = handle

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward of the model, or of a module in it."""
        self._depth += 1
        if self._depth > 1:
            return
        refuse_transformations("a forward of a model in chunks")  # `leave` is called in any case
        # Not in a recomputation: the hooks of torch's checkpoint count the tensors that it saves.
        if not is_in_backward():
            self._saved_hooks.__enter__()
            self._has_saved_hooks = True
            self.cache.begin_forward((args, kwargs), is_training=torch.is_grad_enabled())

    def leave(self, *_: Any) -> None:
        """End the forward that `enter` began."""
        self._depth -= 1
        if self._depth == 0 and self._has_saved_hooks:
            self._saved_hooks.__exit__()
            self._has_saved_hooks = False
            self.cache.end_forward()

    def is_use(self) -> bool:
        """Return whether values can be used now: in a forward, a backward or `gathered`."""
        return self._depth > 0 or self.cache.num_blocks > 0 or is_in_backward()

    def view_in_module(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the values of a parameter in the innermost whole module that has it and is running."""
        for views in reversed(self.open_views):
            if (view := views.get(param)) is not None:
                return view
        return None

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _SavedView":
        """Return the offset of a saved tensor in its chunk, or the tensor; see [Note: saved views]."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()._cdata
        handle = self._by_placeholder.get(storage)
        if handle is not None:  # an `autograd.Function` saves its argument
            return handle.chunk, *handle.place
        cache = self.cache
        chunk = cache.gathered_at.get(storage)
        if chunk is None and cache.tracer is not None and cache.tracer.plans:
            chunk = cache.sections_at.get(storage)  # a section that is the whole moves between iterations
        if chunk is None or chunk.whole is None or chunk.whole.untyped_storage()._cdata != storage:
            # A node that saves its own result would keep itself alive until a backward.
            return tensor.detach() if tensor.grad_fn is not None else tensor
        return chunk, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: "torch.Tensor | _SavedView") -> torch.Tensor:
        """Return a saved tensor, of a chunk that is gathered again if it was freed; collective then."""
        if isinstance(packed, torch.Tensor):
            return packed
        chunk, size, stride, offset = packed
        # Gathers the chunk if it was freed: all ranks unpack in the order of their backward.
        return torch.as_strided(self.cache.fetch(chunk), size, stride, offset)


class ChunkedParameter(nn.Parameter):
    """A parameter whose values are in a chunk; see [Note: interception of uses]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch on views of the gathered chunks, or raise outside of a use."""
        kwargs = kwargs or {}
        # Other parameters among its arguments are data: `torch.full_like(param, other)`.
        if func in _WITHOUT_VALUES and not _params_among(args[1:], kwargs.values()):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in OF_AUTOGRAD:
            args, kwargs = with_gradient_edges(func, args, kwargs)
            return func(*args, **kwargs)
        params = _params_among(args, kwargs.values())
        needed: dict[ChunkCache, dict[Chunk, str]] = {}
        for handle in map(_HANDLE, params):
            needed.setdefault(handle.hooks.cache, {})[handle.chunk] = handle.name
        _refuse_wrong_uses(func, args, _HANDLE(params[0]))
        for cache, chunks in needed.items():
            cache.pin(chunks, func)  # collective, if a chunk is not present
        try:
            with torch._C.DisableTorchFunctionSubclass():  # attributes of parameters are not uses
                versions = list(map(_VERSION, params))
                args = _with_views(args)
                if kwargs:
                    (kwargs,) = _with_views((kwargs,))
            result = func(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                if versions != list(map(_VERSION, params)):
                    _note_writes(params, versions)
            return result
        finally:
            _end_use(needed)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a description, with the values inside of `gathered()`."""
        handle = handle_of(self)
        if handle.hooks.is_use():
            return str(super().__repr__())
        return f"ChunkedParameter({handle.name}, shape={tuple(self.shape)}, dtype={self.dtype}, in a chunk)"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter of the same values."""
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary parameter of the same values."""
        reduced: Any = nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)
        return reduced


def handle_of(param: torch.Tensor) -> ParamHandle:
    """Return the handle of a parameter in a chunk."""
    return _HANDLE(param)


def is_chunked(param: object) -> bool:
    """Return whether the values of a parameter are in a chunk."""
    return type(param) is ChunkedParameter


def refuse_modules(model: nn.Module) -> None:
    """Refuse modules whose uses of parameters cannot be intercepted.

    Raises:
        ValueError: A module of `model` is compiled, gives sparse gradients, or writes into its weight.
    """
    for name, part in model.named_modules():
        if part._compiled_call_impl is not None:
            raise ValueError(
                f"{name or 'the model'} was compiled by module.compile(), and a compiled forward does not "
                "let uses of parameters be seen as they come: leave it out"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"{name} gives sparse gradients, and chunks take dense ones: build it with sparse=False"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{name} has max_norm={part.max_norm}: it writes into its weight in every forward, each "
                "rank into other rows; build it with max_norm=None"
            )


def refuse_transformations(what: str) -> None:
    """Raise inside a transformation of torch.

    Raises:
        RuntimeError: `what` happens under one of `torch.func`, or in `torch.jit.trace`.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing():
        raise RuntimeError(
            f"{what} under torch.func, vmap or torch.jit.trace: these do not run the model as it is; use "
            "them inside `with model.gathered():` on a copy of the model (copy.deepcopy)"
        )


def _with_views(nest: Any) -> Any:
    """Return a tuple or list of arguments with views in the places of parameters, also in nests in it."""
    found = []
    for value in nest:
        kind = type(value)  # `isinstance` calls the metaclass of `Parameter`, at several times the cost
        if kind is ChunkedParameter:
            value = _view_of(value)
        elif kind is list or kind is tuple:
            value = _with_views(value)
        elif kind is dict:
            value = dict(zip(value, _with_views(list(value.values())), strict=True))
        found.append(value)
    return found if type(nest) is list else tuple(found)


def _view_of(param: ChunkedParameter) -> torch.Tensor:
    """Return the values of a parameter, to autograd a view of it, or a result of its whole module."""
    handle = _HANDLE(param)
    if not (param.requires_grad and torch.is_grad_enabled()):
        use = handle.view()
    elif handle.hooks.open_views and (view := handle.hooks.view_in_module(param)) is not None:
        return view
    else:
        # A view of the parameter, so that its gradient is the parameter's, but of other memory. An
        # `autograd.Function` does the same in 10 us more, forward and backward.
        use, views, index = param.view_as(param), handle.chunk.views, handle.index
        if index not in views:
            views[index] = handle.view()
        use.data = views[index]
    return follow_cut(use, param) if handle.is_colo else use


def _end_use(needed: Mapping[ChunkCache, Mapping[Chunk, str]]) -> None:
    """End the pins of a function, and take its writes; then its chunks can be evicted."""
    written = []
    for cache, chunks in needed.items():
        for chunk, name in chunks.items():
            chunk.num_uses -= 1
            if chunk.whole is not None and chunk.whole._version != chunk.version:
                written.append((cache, chunk, name))
    for cache, chunk, name in written:  # last, since it raises where other ranks have copies
        cache.take_write(chunk, name)


def _note_writes(params: Iterable[ChunkedParameter], versions: Iterable[int]) -> None:
    """Count writes into views, which autograd counts for their parameters, as writes into the chunks."""
    for param, version in zip(params, versions, strict=True):
        if param._version != version:
            torch.autograd.graph.increment_version(handle_of(param).view())


def _params_among(*nests: Iterable[Any]) -> list[ChunkedParameter]:
    """Return the parameters in chunks among arguments of a function, in their order."""
    found: list[ChunkedParameter] = []
    for nest in nests:
        for value in nest:
            kind = type(value)
            if kind is ChunkedParameter:
                found.append(value)
            elif kind is list or kind is tuple:
                found += _params_among(value)
            elif kind is dict:
                found += _params_among(value.values())
    return found


def _refuse_wrong_uses(func: Callable[..., Any], args: tuple[Any, ...], handle: ParamHandle) -> None:
    """Raise if a function would get no values, or if its writes would be lost.

    Raises:
        RuntimeError: `func` is called outside of a use, sets the memory of a parameter, writes into a leaf of
            the graph, or is called by a transformation of torch.
    """
    if func is _SET_DATA:
        raise RuntimeError(
            f"the data of {handle.name} cannot be set, as its values lie in a chunk: write "
            "param.copy_(values) inside `with torch.no_grad(), model.gathered():`"
        )
    name = getattr(func, "__name__", None) or str(func)
    if not handle.hooks.is_use():
        raise RuntimeError(
            f"{name} of {handle.name}: its values lie in a chunk that is cut over the ranks, and are there "
            "in a forward or a backward only; put it inside `with model.gathered():`, which all ranks enter"
        )
    refuse_transformations(f"{name} of {handle.name}")
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place and args and is_chunked(args[0]) and args[0].requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} of {handle.name}: a leaf Variable that requires grad is being used in an in-place "
            "operation; write into it under torch.no_grad()"
        )


_HANDLE: Callable[[torch.Tensor], ParamHandle] = attrgetter(CHUNK_PLACE)  # in C: each use has several
_VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WITHOUT_VALUES = ASKING_NO_VALUES | {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
"""Functions whose first argument is passed unchanged."""
