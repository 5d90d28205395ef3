"""Uses of parameters whose values lie in chunks, seen where functions of torch take them.

[Note: how a use is seen]
A parameter of a model under Gemini becomes a `ChunkedParameter`: the same object, of another class, with one
NaN in the place of its memory. Its class is asked by every function of torch that gets it
(`__torch_function__`). Inside a module's forward, a backward or a recomputation the function gets a view of
the gathered chunk instead, which to autograd is a view of the parameter (`_value`). So control flow, tied and
reused weights, functional calls and checkpointing need no rules. Questions of shape and type are answered
without values; everything else is refused by name outside of a use.

The class is changed in place (`__class__`), since others hold the parameter: optimizers, tied modules, lists
such as that of `nn.LSTM`, hooks. A new object would leave them with the old one.

[Note: what autograd saves]
Views that autograd saves for the backward would keep their chunk's memory. The hooks of
`saved_tensors_hooks` see them by their storage, keep where in the chunk they lie, and fetch the chunk again
when the backward asks. A tensor that something else has saved (torch's checkpoint has hooks of its own,
inside these) keeps its memory, and counts as long as it does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colossalai.tensor import (
    ASKING_NO_VALUES,
    CHUNK_PLACE,
    OF_AUTOGRAD,
    FlatRange,
    FlatValues,
    follow_cut,
    set_flat_values,
    with_gradient_edges,
)
from colossalai.zero.gemini._chunk import Chunk

if TYPE_CHECKING:
    from colossalai.zero.gemini._residence import Residence


@dataclass(frozen=True, eq=False)
class ChunkPlace:
    """Where the values of a parameter lie.

    Attributes:
        residence: Which chunks are present on this rank.
        chunk: The chunk.
        index: The number of the parameter in it.
        name: Of the parameter in the model.
    """

    residence: "Residence"
    chunk: Chunk
    index: int
    name: str

    def view(self) -> torch.Tensor:
        """Return the values, as a view of the chunk, which is present."""
        assert self.chunk.whole is not None, f"the chunk of {self.name} is not present"
        return self.chunk.layout.view(self.chunk.whole, self.index)

    def held(self) -> FlatValues:
        """Return the values in this rank's section.

        Raises:
            RuntimeError: The whole was written in a block of `gathered`, and sections do not know it yet.
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
        return FlatValues(part, tensor, _Loaded(self.residence, self.chunk))


@dataclass(frozen=True)
class _Loaded:
    """Notes that the sections of a chunk were overwritten; equal for all parameters in it."""

    residence: "Residence"
    chunk: Chunk

    def __call__(self) -> None:
        self.residence.note_loaded(self.chunk)


class ChunkedParameter(nn.Parameter):
    """A parameter whose values lie in a chunk; see [Note: how a use is seen]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer, refuse, or call a function of torch that gets parameters of this class."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES and not _has_values_from(args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in OF_AUTOGRAD:
            args, kwargs = with_gradient_edges(func, args, kwargs)
            return func(*args, **kwargs)
        params = list(_params_among(args, kwargs.values()))
        places: dict[Residence, list[ChunkPlace]] = {}
        for param in params:
            place = place_of(param)
            places.setdefault(place.residence, []).append(place)
        _refuse_wrong_uses(func, args, next(iter(places.values()))[0])
        for residence, own in places.items():
            residence.begin_use(own, func)
        try:
            with torch._C.DisableTorchFunctionSubclass():  # what is asked of parameters here is no use
                versions = [param._version for param in params]
                args = tuple(map(_value, args))
                kwargs = {name: _value(value) for name, value in kwargs.items()}
            result = func(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                if versions != [param._version for param in params]:
                    _note_writes(params, versions)
            return result
        finally:
            for residence, own in places.items():
                residence.end_use(own)

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe it; its values are shown inside of `gathered()`."""
        place = place_of(self)
        if place.residence.is_use():
            return str(super().__repr__())
        return f"ChunkedParameter({place.name}, shape={tuple(self.shape)}, dtype={self.dtype}, in a chunk)"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter of the same values."""
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary parameter of the same values."""
        reduced: Any = nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)
        return reduced


def place_of(param: torch.Tensor) -> ChunkPlace:
    """Return where the values of a parameter lie."""
    place: ChunkPlace = getattr(param, CHUNK_PLACE)
    return place


def is_chunked(param: object) -> bool:
    """Return whether the values of a parameter lie in a chunk."""
    return type(param) is ChunkedParameter


def put_into_chunk(param: nn.Parameter, place: ChunkPlace) -> None:
    """Let the values of a parameter lie in a chunk, which has them already; its memory is given back."""
    nothing = float("nan") if param.is_floating_point() or param.is_complex() else 0
    param.data = torch.full((), nothing, dtype=param.dtype, device=param.device).expand(param.shape)
    setattr(param, CHUNK_PLACE, place)
    set_flat_values(param, place.held)
    param.__class__ = ChunkedParameter  # See [Note: how a use is seen]


def refuse_modules(model: nn.Module) -> None:
    """Refuse modules whose uses of parameters cannot be seen, or change them.

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
    """Raise if a transformation of torch is under way.

    Raises:
        RuntimeError: `what` happens under one of `torch.func`, or in `torch.jit.trace`.
    """
    if _is_transformed():
        raise RuntimeError(
            f"{what} under torch.func, vmap or torch.jit.trace: these do not run the model as it is; use "
            "them inside `with model.gathered():` on a copy of the model (copy.deepcopy)"
        )


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()


def _value(nest: Any) -> Any:
    """Return what a function gets in the place of an argument: views in the places of parameters."""
    kind = type(nest)
    if kind is ChunkedParameter:
        place = place_of(nest)
        if not (nest.requires_grad and torch.is_grad_enabled()):
            return follow_cut(place.view(), nest)
        if place.residence.open_views and (view := place.residence.view_in_module(nest)) is not None:
            return view
        # To autograd a view of the parameter, so that its gradient is the parameter's; but of other memory.
        # An `autograd.Function` would say the same at 10 us more, there and back.
        use = nest.view_as(nest)
        use.data = place.chunk.values_of(place.index)
        return follow_cut(use, nest)
    if kind is list or kind is tuple:
        return kind(map(_value, nest))
    if kind is dict:
        return {key: _value(value) for key, value in nest.items()}
    return nest


def _note_writes(params: Iterable[ChunkedParameter], versions: Iterable[int]) -> None:
    """Let chunks know of writes into views that autograd counts as writes into their parameters."""
    for param, version in zip(params, versions, strict=True):
        if param._version != version:
            torch.autograd.graph.increment_version(place_of(param).view())


def _params_among(*nests: Iterable[Any]) -> Iterator[ChunkedParameter]:
    for nest in nests:
        for value in nest:
            kind = type(value)  # `isinstance` asks the metaclass of `Parameter`, at several times the cost
            if kind is ChunkedParameter:
                yield value
            elif kind is list or kind is tuple:
                yield from _params_among(value)
            elif kind is dict:
                yield from _params_among(value.values())


def _has_values_from(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function that needs no values of its first argument gets other parameters as data."""
    if len(args) < 2 and not kwargs:
        return False
    return next(_params_among(args[1:], kwargs.values()), None) is not None


def _refuse_wrong_uses(func: Callable[..., Any], args: tuple[Any, ...], place: ChunkPlace) -> None:
    """Raise where a function gets no values, or would do with them what is lost.

    Raises:
        RuntimeError: `func` is called outside of a use, sets the memory of a parameter, writes into a leaf of
            the graph, or is called by a transformation of torch.
    """
    name = getattr(func, "__name__", None) or str(func)
    if func is _SET_DATA:
        raise RuntimeError(
            f"the data of {place.name} cannot be set, as its values lie in a chunk: write "
            "param.copy_(values) inside `with torch.no_grad(), model.gathered():`"
        )
    if not place.residence.is_use():
        raise RuntimeError(
            f"{name} of {place.name}: its values lie in a chunk that is cut over the ranks, and are there in "
            "a forward or a backward only; put it inside `with model.gathered():`, which all ranks enter"
        )
    if _is_transformed():
        refuse_transformations(f"{name} of {place.name}")
    is_in_place = name.endswith("_") and not name.endswith("__")
    first = args[0] if args else None
    if (
        is_in_place
        and isinstance(first, ChunkedParameter)
        and first.requires_grad
        and torch.is_grad_enabled()
    ):
        raise RuntimeError(
            f"{name} of {place.name}: a leaf Variable that requires grad is being used in an in-place "
            "operation; write into it under torch.no_grad()"
        )


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WITHOUT_VALUES = ASKING_NO_VALUES | {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
"""Functions that get their first argument as it is."""
