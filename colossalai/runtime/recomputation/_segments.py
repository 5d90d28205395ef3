"""Segments of activation checkpointing: neighbouring blocks that are recomputed as one, and nested ones.

A checkpoint for each block (1604.06174) keeps the input of every block. A segment of several keeps the input
of its first. When the backward reaches it, it runs forward again, and its parts can be checkpointed again,
recursively, as in 1911.13214 and, long before, in Griewank, "Achieving logarithmic growth of temporal
and spatial complexity in reverse automatic differentiation" (1992). The user's own model runs, unchanged.

[Note: joint run of blocks]
The model calls its blocks one after the other, and a checkpoint wraps one call. So the call of the first
block runs all blocks of the segment, each with its hooks. It returns a placeholder, a tensor of the right
shape without values. The calls of the other blocks compute nothing: each takes the placeholder and returns
it, and the call of the last block returns the computed output. This is equivalent to the model if

- each block gets the output of the one before as its first positional argument, unchanged and at once;
- all other arguments are the same objects, or equal plain values, for every block, and the elements after the
  first of a tuple that a block returns are some of these;
- every block of the segment is called, once and in order.

All of it is checked in the calls. Any other use of the placeholder raises an error, between two blocks or
later. The model never computes other values than without segments.

The call is intercepted before the hooks (by a class before the block's, so that names do not change): a hook
that saw the placeholder would report a block that has not run. A hook of a block in a segment
of several runs whenever the block does, in the recomputation, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.nn import checkpoint

Lists = list[Any]
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class RecomputeSegment:
    """Blocks `first` to `last` - 1 of a chain, checkpointed as one: only the input of the first is kept.

    Attributes:
        first: Index of its first block.
        last: Index after its last block.
        inner: Segments of it that are checkpointed again when it is recomputed; they are in order,
            disjoint, and each is less than the whole.

    Raises:
        ValueError: `first` is not below `last`, or `inner` segments are not inside of it, or not in order.
    """

    first: int
    last: int
    inner: tuple["RecomputeSegment", ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(
                f"a segment from block {self.first} up to, and without, block {self.last} has no block: give "
                "0 <= first < last"
            )
        _check_order(self.inner, self.first, self.last, f"the segment from {self.first} to {self.last}")
        for each in self.inner:
            if (each.first, each.last) == (self.first, self.last):
                raise ValueError(
                    f"the segment from {each.first} to {each.last} is in one of the same blocks, by which "
                    "they would be recomputed for nothing: leave one of the two out"
                )

    @property
    def parts(self) -> "tuple[int | RecomputeSegment, ...]":
        """The blocks and inner segments that a recomputation runs, in order."""
        return parts_of(self.first, self.last, self.inner)

    def as_lists(self) -> Lists:
        """Return it as [first, last, [inner segments]], for JSON."""
        return [self.first, self.last, [each.as_lists() for each in self.inner]]

    @staticmethod
    def from_lists(lists: Sequence[Any]) -> "RecomputeSegment":
        """Return the segment from the lists of `as_lists`.

        Raises:
            ValueError: `lists` is not two numbers and a list of the same kind, or not a segment.
        """
        match lists:
            case [int(first), int(last), [*inner]]:
                return RecomputeSegment(first, last, tuple(map(RecomputeSegment.from_lists, inner)))
        raise ValueError(f"{lists!r:.80} is not a segment: it must be [first, last, [inner segments]]")


@dataclass(frozen=True)
class Segments:
    """Blocks of a model that are recomputed together; blocks in no segment keep all their activations.

    Attributes:
        segments: The segments, in order and disjoint.
        names: The full names of the blocks, in the order in which they run; segments are indices into it.

    Raises:
        ValueError: `segments` are not in order or beyond the blocks, or a name is there twice.
    """

    segments: tuple[RecomputeSegment, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_order(self.segments, 0, len(self.names), f"a chain of {len(self.names)} blocks")
        if twice := [name for number, name in enumerate(self.names) if name in self.names[:number]]:
            raise ValueError(f"the block {twice[0]!r} is in the chain twice: name each block once, in order")

    @property
    def names_by_segment(self) -> tuple[tuple[str, ...], ...]:
        """For each segment, the names of its blocks."""
        return tuple(self.names[each.first : each.last] for each in self.segments)

    def as_lists(self) -> Lists:
        """Return it as [[segments], [names]], for JSON."""
        return [[each.as_lists() for each in self.segments], list(self.names)]

    @staticmethod
    def from_lists(lists: Sequence[Any]) -> "Segments":
        """Return the segments from the lists of `as_lists`.

        Raises:
            ValueError: `lists` is not a list of segments and one of names, or these do not fit together.
        """
        match lists:
            case [[*segments], [*names]] if all(isinstance(name, str) for name in names):
                return Segments(tuple(map(RecomputeSegment.from_lists, segments)), tuple(names))
        raise ValueError(f"{lists!r:.80} are not segments: it must be [[segments], [names of blocks]]")


def parts_of(
    first: int, last: int, segments: Sequence[RecomputeSegment]
) -> tuple[int | RecomputeSegment, ...]:
    """Return the blocks and segments of a range of blocks, in order."""
    parts: list[int | RecomputeSegment] = []
    for segment in segments:
        parts += [*range(first, segment.first), segment]
        first = segment.last
    return (*parts, *range(first, last))


def _check_order(segments: Sequence[RecomputeSegment], first: int, last: int, whole: str) -> None:
    reached = first
    for each in segments:
        if each.first < reached or each.last > last:
            raise ValueError(
                f"the segment from {each.first} to {each.last} begins before {reached} or ends behind {last} "
                f"in {whole}: give segments in order, apart from each other and inside of it"
            )
        reached = each.last


class RecomputeHandle:
    """Removes recomputation from a module, as torch's `RemovableHandle` removes a hook.

    A deep copy of the module with its handle has its own handle.
    """

    def __init__(self) -> None:
        # Partials and bound methods, no closures: in a deep copy they are those of the copied modules.
        self._steps: list[Callable[[], Any]] = []

    def checkpoint_forward(self, part: nn.Module) -> None:
        """Checkpoint a module in every call."""
        own = vars(part).get("forward")  # a module can have its own, in addition to its class's
        self.behind(
            partial(delattr, part, "forward") if own is None else partial(setattr, part, "forward", own)
        )
        part.forward = partial(checkpoint, part.forward, False)

    def behind(self, step: Callable[[], Any]) -> None:
        """Add a function that undoes a change; the last one runs first."""
        self._steps.append(step)

    def remove(self) -> None:
        """Undo all changes of the module."""
        while self._steps:
            self._steps.pop()()


def run_in_segments(
    chosen: Segments, blocks: Mapping[str, nn.Module], module: nn.Module, handle: RecomputeHandle
) -> None:
    """Make the blocks of a model run in segments, in place; names of parameters do not change.

    Args:
        chosen: The segments.
        blocks: The present blocks by name; of a segment all or none (it is in another stage).
        module: The model.
        handle: Receives the functions that undo the changes.

    Raises:
        ValueError: A block has two names, is inside of another one, or is in segments already.
    """
    _refuse_overlaps(blocks)
    if twice := [name for name, block in blocks.items() if isinstance(block, _InSegment)]:
        raise ValueError(f"the block {twice[0]!r} is in a segment already: take the one before off first")
    known = dict(module.named_modules(remove_duplicate=False))
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for names in chosen.names_by_segment:
        if len(names) == 1 and names[0] in blocks:
            handle.checkpoint_forward(blocks[names[0]])
    for segment, names in zip(chosen.segments, chosen.names_by_segment, strict=True):
        if len(names) == 1 or names[0] not in blocks:
            continue
        runner = SegmentRunner(segment, names, [blocks[name] for name in names])
        caller = _caller_of(names, known)
        handle.behind(caller.register_forward_pre_hook(runner.begin).remove)
        handle.behind(caller.register_forward_hook(runner.end).remove)
        for number, name in enumerate(names):
            block = blocks[name]
            kind = type(block)
            if kind not in classes:  # blocks of one class keep a common class
                named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
                classes[kind] = type(kind.__name__, (_InSegment, kind), named)
            handle.behind(partial(setattr, block, "__class__", kind))
            handle.behind(partial(delattr, block, "place_in_segment"))
            block.__class__ = classes[kind]
            cast(_InSegment, block).place_in_segment = (runner, number)


def _caller_of(names: Sequence[str], known: Mapping[str, nn.Module]) -> nn.Module:
    """Return the innermost module that contains some modules and is called itself."""
    paths = [name.split(".")[:-1] for name in names]
    shared = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*paths, strict=False))]
    while shared and type(known[".".join(shared)]).forward is nn.Module.forward:
        shared.pop()
    return known[".".join(shared)]


def _refuse_overlaps(blocks: Mapping[str, nn.Module]) -> None:
    name_of: dict[nn.Module, str] = {}
    for name, block in blocks.items():
        if block in name_of:
            raise ValueError(
                f"{name_of[block]!r} and {name!r} are one block, which the model calls twice in a forward: a "
                "chain has every block once, so leave it out of the segments"
            )
        name_of[block] = name
    for name, block in blocks.items():
        for part in block.modules():
            if part is not block and part in name_of:
                raise ValueError(
                    f"the block {name_of[part]!r} is inside of {name!r}: a chain has one or the other"
                )


class _InSegment(nn.Module):
    """Base class that is put before the class of a block in a segment of several."""

    place_in_segment: "tuple[SegmentRunner, int]"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # See [Note: joint run of blocks]: the hooks of the block run inside this call.
        runner, number = self.place_in_segment
        return runner.call(number, args, kwargs)


def _run_itself(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block of a segment, with its hooks, as without a segment."""
    return super(_InSegment, cast(_InSegment, block)).__call__(*args, **kwargs)


@dataclass
class _SegmentArguments:
    """Arguments and results of every block of a segment other than the hidden state.

    Attributes:
        args: The positional arguments after the first.
        kwargs: The keyword arguments.
        returned: For each block the elements of its returned tuple after the first; None: it returns a
            tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: dict[int, tuple[Any, ...] | None] = field(default_factory=dict)


@dataclass
class _SegmentRun:
    """A segment whose first block has been called, and whose last one has not.

    Attributes:
        given: The arguments of the first one.
        output: The output of the last one.
        placeholder: The placeholder of the hidden state until then.
        next: The index of the next block to be called.
    """

    given: _SegmentArguments
    output: Any
    placeholder: "_Placeholder"
    next: int = 1


class SegmentRunner:
    """Runs the blocks of a segment as one when the model calls them one by one.

    Args:
        segment: The segment, of at least two blocks.
        names: Names of its blocks.
        blocks: Its blocks.
    """

    def __init__(self, segment: RecomputeSegment, names: Sequence[str], blocks: Sequence[nn.Module]) -> None:
        self._segment = segment
        self._names = tuple(names)
        self._blocks = tuple(blocks)
        self._pass: _SegmentRun | None = None
        self._runs: int | None = None  # number of runs in this forward of the owner; None: outside of one

    def begin(self, *_: Any) -> None:
        """Reset the state after an error; a hook before the owner's forward."""
        self._pass, self._runs = None, 0

    def end(self, *_: Any) -> None:
        """Check that the blocks have been called; a hook after the owner's forward.

        Raises:
            RuntimeError: A block has not been called.
        """
        self._runs = None
        if self._pass is not None:
            self._refuse(f"{self._names[self._pass.next]!r} is not called after the block before it")

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a block's call by the model; see the Note of this module.

        Args:
            number: Index of the block in the segment.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            RuntimeError: The blocks cannot run as one; the message has the call that prevents it.
        """
        block = self._blocks[number]
        if self._pass is not None:
            return self._pass_on(self._pass, number, args, kwargs)
        if number > 0 or not (block.training and torch.is_grad_enabled()):
            return _run_itself(block, args, kwargs)
        if self._runs is not None:
            self._runs += 1
            if self._runs > 1:
                self._refuse(f"{self._names[0]!r} is called twice in a forward")
        if not args or not isinstance(args[0], Tensor):
            self._refuse(f"{self._names[0]!r} is called without a tensor as its first positional argument")
        given = _SegmentArguments(args[1:], kwargs)
        output = self._run_checkpointed(self._segment, [args[0]], given)
        placeholder = _Placeholder(_hidden(output), self._names[0])
        self._pass = _SegmentRun(given, output, placeholder)
        return _shaped(placeholder, given.returned[0])

    def _run_checkpointed(
        self, segment: RecomputeSegment, carried: list[Tensor], given: _SegmentArguments
    ) -> Any:
        function = _FromKeptInput(partial(self._run_parts, segment, given=given), carried)
        return checkpoint(function, False, function.mark)

    def _run_parts(
        self, segment: RecomputeSegment, carried: list[Tensor], *, given: _SegmentArguments
    ) -> Any:
        """Run the parts of a segment; the hidden state is removed from `carried`."""
        *parts, last_part = segment.parts
        for part in parts:
            # No name of this frame refers to a hidden state while the next part runs, which can take long.
            carried.append(_hidden(self._run_part(part, carried, given)))
        return self._run_part(last_part, carried, given)

    def _run_part(self, part: int | RecomputeSegment, carried: list[Tensor], given: _SegmentArguments) -> Any:
        if not isinstance(part, int):
            return self._run_checkpointed(part, carried, given)
        number = part - self._segment.first
        output = _run_itself(self._blocks[number], (carried.pop(), *given.args), given.kwargs)
        given.returned[number] = self._other_outputs(number, output, given)
        return output

    def _other_outputs(self, number: int, output: Any, given: _SegmentArguments) -> tuple[Any, ...] | None:
        """Return the elements of a block's output other than the hidden state."""
        if isinstance(output, Tensor):
            return None
        name = self._names[number]
        if type(output) is not tuple or not output or not isinstance(output[0], Tensor):
            self._refuse(f"{name!r} returns a {type(output).__name__}, not a tensor or a tuple of one first")
        for place, value in enumerate(output[1:], start=1):
            known = any(value is each for each in (*given.args, *given.kwargs.values()))
            if not known and not isinstance(value, _PLAIN):
                self._refuse(
                    f"{name!r} returns a {type(value).__name__} of its own as element {place} of a tuple"
                )
        return output[1:]

    def _pass_on(
        self, current: _SegmentRun, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name, before = self._names[number], self._names[current.next - 1]
        if number != current.next:
            self._refuse(f"{name!r} is called behind {before!r}, instead of {self._names[current.next]!r}")
        if not args or args[0] is not current.placeholder:
            self._refuse(
                f"{name!r} does not get the output of {before!r}, as it is, for its first positional argument"
            )
        given = current.given
        if len(args) - 1 != len(given.args) or kwargs.keys() != given.kwargs.keys():
            self._refuse(f"{name!r} is called with other arguments than {self._names[0]!r}")
        pairs = [
            (f"argument {place}", *pair)
            for place, pair in enumerate(zip(args[1:], given.args, strict=True), 2)
        ]
        pairs += [(key, kwargs[key], value) for key, value in given.kwargs.items()]
        for what, value, first_value in pairs:
            if not _is_same(value, first_value):
                self._refuse(f"{what} is another one for {name!r} than for {self._names[0]!r}")
        if number == len(self._blocks) - 1:
            self._pass = None
            return current.output
        current.next += 1
        return _shaped(current.placeholder, given.returned[number])

    def _refuse(self, what: str) -> NoReturn:
        self._pass = None
        raise RuntimeError(
            f"the blocks {self._names[0]!r} to {self._names[-1]!r} cannot be recomputed as one segment: "
            f"{what}; take segments of one block each"
        )


class _FromKeptInput:
    """A function of a hidden state, to be checkpointed, that keeps its input itself.

    torch's own checkpoint holds its arguments while the function runs. For a block in several nested
    segments, these would be the inputs of all of them, while this forward keeps only the input of the
    outermost. So the function has no such argument: its first run takes the state out of the given list,
    later ones use the tensor saved by autograd. The hooks of the enclosing segment determine that one: the
    tensor itself, or its placeholder until the segment has been recomputed.

    Args:
        function: Takes a list with the hidden state, which it empties.
        carried: The same list, full.

    Attributes:
        mark: An empty tensor on its device whose graph node has the saved state: the argument of
            `checkpoint`, so that the enclosing segment's recomputation ends before this one begins.
    """

    def __init__(self, function: Callable[[list[Tensor]], Any], carried: list[Tensor]) -> None:
        self._function = function
        self._carried: list[Tensor] | None = carried
        self.mark: Tensor = _Keep.apply(carried[0], torch.empty(0, requires_grad=True))

    def __call__(self, _: Tensor) -> Any:
        carried, self._carried = self._carried, None
        return self._function(
            list(cast(Any, self.mark.grad_fn).saved_tensors) if carried is None else carried
        )


class _Keep(torch.autograd.Function):
    """Saves a tensor like any operation, under the hooks in force, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, _: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return torch.empty(0, device=kept.device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class _Placeholder(Tensor):
    """A tensor without values between the blocks of a segment; computing with it raises an error.

    Args:
        like: The tensor that it replaces, with the same shape, dtype and device.
        block: The first block of the segment.
    """

    block: str

    @staticmethod
    def __new__(cls: type["_Placeholder"], like: Tensor, block: str) -> "_Placeholder":
        made: _Placeholder = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        made.block = block
        return made

    def __init__(self, like: Tensor, block: str) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Refuse the operation."""
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Placeholder)]
        raise RuntimeError(
            f"the model uses ({func}) the output between two blocks of the segment that begins with "
            f"{found[0].block!r}, and the blocks of a segment run as one: take segments of one block "
            "each"
        )


def _hidden(output: Any) -> Tensor:
    """Return the input of the next block from the output of a block."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _shaped(hidden: Tensor, beside: tuple[Any, ...] | None) -> Any:
    return hidden if beside is None else (hidden, *beside)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two arguments are one object, equal plain values, or containers of such."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    return isinstance(value, _PLAIN) and bool(value == other)
