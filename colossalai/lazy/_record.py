"""Recording: the execution of operations on lazy tensors, without computing values.

The operation runs on the meta device, which gives shapes, dtypes and strides, and a step is added to the
tapes of the tensors that it makes or writes. A view is not a step: it shares the storage of its base.

[Note: random numbers] An operation that draws is also run for real, once, on scratch memory: there is no
other way to advance a generator by a number of draws, and later draws, lazy or not, must be those of an eager
build. So building takes as long as an eager build, and the memory of one tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from colossalai.lazy._random import Scratch, random_state
from colossalai.lazy._replay import value_of
from colossalai.lazy._tape import RandomState, Step, Tape, is_on_meta, place_of, start_tape, tape_of

Wrap = Callable[[Tensor], Tensor]

_OVERWRITING = {"copy_", "exponential_", "fill_", "normal_", "random_", "uniform_", "zero_"}


def is_factory(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation makes a tensor from no tensor."""
    takes_device = any(argument.name == "device" for argument in op._schema.arguments)
    return takes_device and not _tensors((args, kwargs))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Environment of the operations inside a context.

    Attributes:
        device: Device of tensors that are made on no device or on the meta device.
        scratch: Memory to draw into.
    """

    device: torch.device
    scratch: Scratch = field(default_factory=Scratch)


def run_lazily(op: Any, args: Any, kwargs: Any, *, context: Surroundings | None, wrap: Wrap) -> Any:
    """Run an operation that makes a tensor, or has a lazy one among its arguments, without its values.

    Args:
        op: An overload of `torch.ops`.
        args: Its arguments.
        kwargs: Its keyword arguments.
        context: The surrounding context. None: outside of a context.
        wrap: Makes a lazy tensor from a tensor on the meta device.

    Returns:
        Its outputs. Tensors are lazy, or real if nothing is known without the values.

    Raises:
        ValueError: `op` computes with lazy and real tensors outside of a context, or would write a tensor
            without values into a lazy one.
    """
    tensors = _tensors((args, kwargs))
    written = _written(op, args, kwargs)
    plain = [tensor for tensor in tensors if tape_of(tensor) is None]
    if any(is_on_meta(tensor) for tensor in plain):
        return _run_on_meta(op, args, kwargs, written)
    writes_real = any(tape_of(tensor) is None for tensor in written)
    if writes_real and any(tape_of(tensor) is not None for tensor in written):
        raise ValueError(f"{op} would write real and lazy tensors at once: call it for each kind")
    if writes_real or torch.Tag.data_dependent_output in op.tags:
        return _run_for_real(op, args, kwargs)
    if context is None and not written and any(tensor.dim() > 0 for tensor in plain):
        raise ValueError(
            f"{op} got tensors of a lazily built model, which have no values yet, and real ones: call "
            "LazyInitContext.materialize(model) first"
        )
    return _Recording(op, args, kwargs, tensors, written, context).run(wrap)


class _Recording:
    """The recording of one operation as a step."""

    def __init__(
        self,
        op: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        written: list[Tensor],
        context: Surroundings | None,
    ) -> None:
        self.op = op
        self.args = args
        self.tensors = tensors
        self.written = written
        self.scratch = Scratch() if context is None else context.scratch
        tapes = [tape for tensor in tensors if (tape := tape_of(tensor)) is not None]
        self.device = _device_of(kwargs, tapes[0].device if tapes or context is None else context.device)
        self.kwargs = {**kwargs, "device": self.device} if kwargs.get("device") is not None else kwargs
        if not tapes:
            self.kwargs = {**kwargs, "device": self.device}
        self.step_args = tree_map_only(Tensor, _recorded, (args, self.kwargs))  # before they are written

    def run(self, wrap: Wrap) -> Any:
        overwrites = self._overwrites()
        try:
            outputs = self._outputs_on_meta()
        except NotImplementedError:
            # The meta device has no such kernel, or the shape of the output depends on values.
            if not self.written:
                return _run_for_real(self.op, self.args, self.kwargs)
            outputs = self.written[0]
        flat, structure = tree_flatten(outputs)
        creates = []
        for position, output in enumerate(flat):
            if not isinstance(output, Tensor) or any(output is tensor for tensor in self.tensors):
                continue
            if tape_of(output) is None:
                tape = start_tape(output, self.device)
                creates.append((position, place_of(output, tape)))
            flat[position] = wrap(output)
        self._add_step(tuple(creates), overwrites)
        return tree_unflatten(flat, structure)

    def _outputs_on_meta(self) -> Any:
        args, kwargs = tree_map_only(Tensor, _on_meta, (self.args, self.kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            if not any(argument.name == "pin_memory" for argument in self.op._schema.arguments):
                del kwargs["pin_memory"]
        with torch._C._DisableTorchDispatch():
            return self.op(*args, **kwargs)

    def _add_step(self, creates: tuple[Any, ...], overwrites: Tape | None) -> None:
        tapes = [place.tape for _, place in creates]
        if self.op._overloadpacket is not torch.ops.aten.set_:  # it moves a tensor to another storage
            tapes += [tape for tensor in self.written if (tape := tape_of(tensor)) is not None]
        if not tapes:
            return
        args, kwargs = self.step_args
        step = Step(self.op, args, kwargs, creates, overwrites, self._draw())
        for tape in dict.fromkeys(tapes):
            tape.steps.append(step)

    def _draw(self) -> RandomState | None:
        # See [Note: random numbers]
        if torch.Tag.nondeterministic_seeded not in self.op.tags:
            return None
        state = random_state(self.device, self.kwargs.get("generator"))
        needs_no_values = len(self.tensors) == 1 and (self.written or self._name.endswith("_like"))

        def real(tensor: Tensor) -> Tensor:
            return self.scratch.like(tensor, self.device) if needs_no_values else value_of(tensor)

        with torch.no_grad(), torch._C._DisableTorchDispatch():
            args, kwargs = tree_map_only(Tensor, real, (self.args, self.kwargs))
            self.op(*args, **kwargs)
        return state

    def _overwrites(self) -> Tape | None:
        if len(self.written) != 1 or self._name not in _OVERWRITING:
            return None
        target = self.written[0]
        tape = tape_of(target)
        covers = target.is_contiguous() and target.nbytes == target.untyped_storage().nbytes()
        reads_itself = any(tensor is not target and tape_of(tensor) is tape for tensor in self.tensors)
        is_as_made = tape is not None and tape.num_bytes == target.nbytes
        return tape if covers and is_as_made and not reads_itself else None

    @property
    def _name(self) -> str:
        name: str = self.op._overloadpacket.__name__
        return name


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes in place, by its schema."""
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    named.update(kwargs)
    return [
        tensor
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(named.get(argument.name))
    ]


def _device_of(kwargs: Any, otherwise: torch.device) -> torch.device:
    """Return the future device of the output; "meta" is the device that a lazy tensor reports."""
    device: torch.device | None = kwargs.get("device")
    if device is None or device.type == "meta":
        return otherwise
    return device


def _recorded(tensor: Tensor) -> Any:
    """Return the recorded form of an argument: a copy of a real tensor, which may be written later."""
    tape = tape_of(tensor)
    return tensor.detach().clone() if tape is None else place_of(tensor, tape)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if is_on_meta(tensor) else tensor.detach().to("meta")


def _run_on_meta(op: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
    """Run an operation on meta tensors that are not lazy, as without a context: for shapes."""
    if any(tape_of(tensor) is not None for tensor in written):
        raise ValueError(f"{op} would write a tensor on the meta device, without values, into a lazy one")
    with torch._C._DisableTorchDispatch():
        return op(*args, **kwargs)


def _run_for_real(op: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
    with torch._C._DisableTorchDispatch():
        return op(*args, **kwargs)
