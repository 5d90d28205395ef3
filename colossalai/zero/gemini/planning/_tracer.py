"""The tracer: the one recorder of an iteration, from which chunks are planned and timelines are made.

[Note: other data]
Other data of a step than chunks (activations, gradients in flight, temporary results) are counted by
storages, in
the recorded iteration: a dispatch mode sees each tensor that a function of torch returns, and a finalizer on
its storage reports when the memory is free. Resident size would include memory kept by an allocator. Until
then the interpreter holds the finalizer's arguments, so these must not reference the model: the mode does
not, and neither does `is_model_data`.

A later forward with larger inputs than any before is counted, too: its bytes can exceed those of the plan.

The mode is on from the first forward of the iteration until its gradients are requested, so that the loss and
the
backward are included. Modes are a stack: if another mode is on, this one is off after each forward.
A tracer that is freed in between, with its model, switches its mode off.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
)
from torch.utils._pytree import tree_leaves

from colossalai.logging import get_dist_logger
from colossalai.zero.gemini.planning._trace import Departure, Trace, TraceFollower
from colossalai.zero.gemini.planning._victims import Period, ResidencePlan

if TYPE_CHECKING:
    from colossalai.zero.gemini._timeline import ChunkTimeline

_LOOKS_AHEAD = 2  # periods whose sections on disk are read ahead

_MOST_VALUES = 1000  # limit of inspected values in a nest of inputs


class OtherBytes(TorchDispatchMode):
    """Counts the memory of tensors that functions of torch make; see [Note: other data].

    Args:
        device: Device of the counted memory.
        is_model_data: Whether a storage, by its address as an object, is one of chunks; it holds no chunks.
    """

    def __init__(self, device: torch.device, is_model_data: Callable[[int], bool]) -> None:
        super().__init__()
        self._device_type = device.type
        self._is_model_data = is_model_data
        self._alive: dict[int, int] = {}
        self._bytes = self._peak = 0
        self._is_on = self._is_alone = False

    def start(self) -> None:
        """Begin to count."""
        if not self._is_on:
            self._is_on = True
            self._is_alone = _len_torch_dispatch_stack() == 0
            self.__enter__()

    def pause(self) -> None:
        """Stop after a forward, if the mode may not stay: another one is on, or the forward has failed."""
        if not self._is_alone or sys.exc_info()[0] is not None:
            self.stop()

    def stop(self) -> None:
        """Stop counting; earlier counts are kept."""
        if self._is_on and _get_current_dispatch_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)

    def take_peak(self) -> int:
        """Return the most bytes since the last call."""
        peak, self._peak = self._peak, self._bytes
        return peak

    def set_aside(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor of future model data, which does not count before it is registered."""
        peak = self._peak
        tensor = make()
        self.forget(tensor)
        self._peak = peak
        return tensor

    def forget(self, tensor: torch.Tensor) -> None:
        """Let a tensor not count, which has become model data."""
        self._forget(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or self._is_model_data(key):
            return
        # Foreign memory (a mapped file, a segment) can be larger than the tensor in it.
        size = storage.nbytes() if storage.resizable() else tensor.numel() * tensor.element_size()
        self._alive[key] = size
        self._bytes += size
        self._peak = max(self._peak, self._bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._alive.pop(key, 0)


class Tracer:
    """Records an iteration, for the plan of the next ones and for a timeline, and follows the plan.

    Args:
        counter: The counter of other memory.
        plans: Whether iterations are recorded and planned; if not, there is a timeline only.

    Attributes:
        counter: As given.
        plans: As given.
        timeline: The timeline that is recorded; None: none.
        has_grown: Whether iterations took more other bytes on this rank than the plan was made for.
    """

    def __init__(self, counter: OtherBytes, *, plans: bool) -> None:
        self.counter = counter
        self.plans = plans
        self.timeline: ChunkTimeline | None = None
        self.has_grown = False
        self._follower = TraceFollower()
        self._plan: ResidencePlan | None = None
        self._known = (0, 0)  # elements, and the longest dimension, of the largest inputs in the trace
        self._has_larger = False  # whether this iteration has larger ones
        weakref.finalize(self, counter.stop).atexit = False

    @property
    def _samples(self) -> bool:
        """Whether the trace gets other memory in this iteration: it is recorded, or has larger inputs."""
        return self.plans and (self._follower.is_recording or self._has_larger)

    @property
    def is_counting(self) -> bool:
        """Whether other memory is counted in this iteration."""
        return self.timeline is not None or self._samples

    @property
    def trace(self) -> Trace | None:
        """The trace that is followed; None while an iteration is off it, or recorded."""
        return self._follower.trace

    @property
    def is_followed(self) -> bool:
        """Whether there is a plan, and the iteration goes as it was planned."""
        return self._plan is not None and self._follower.trace is not None

    def begin_forward(self, inputs: Any) -> None:
        """Begin a forward in training; one with larger inputs than before is counted.

        Args:
            inputs: A nest of tensors and other values.
        """
        numel, longest = _extent_of(inputs) if self.plans else (0, 0)
        if numel > self._known[0] or longest > self._known[1]:
            self._known = max(numel, self._known[0]), max(longest, self._known[1])
            if not self._samples:
                self._has_larger = True
                self._take_peak()  # of the time before
        if self.is_counting:
            self.counter.start()

    def end_forward(self) -> None:
        """End a forward."""
        if self.is_counting:
            self.counter.pause()

    def use(self, chunk: int, held: Collection[int], *, is_backward: bool) -> Period | None:
        """Record a use; return the plan's period that it begins, None where nothing is planned.

        Args:
            chunk: The number of the chunk.
            held: Others that cannot be evicted now.
            is_backward: Whether it is in a backward.
        """
        peak = self._take_peak()
        if self.plans:
            if self._samples:
                self._follower.sample(peak)
            self._log(self._follower.use(chunk, held))
        if self.timeline is not None:
            self.timeline.use(chunk, is_backward=is_backward, is_planned=self.is_followed)
        if self._plan is None or self._follower.trace is None:
            return None
        return self._plan.periods[self._follower.moment]

    def gather(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return memory for a gathered chunk, which is not other memory."""
        return self.counter.set_aside(make) if self.is_counting else make()

    def keep(self, tensor: torch.Tensor) -> None:
        """Note that a tensor has become model data."""
        if self.is_counting:
            self.counter.forget(tensor)

    def hold(self, gathered_bytes: int) -> None:
        """Note how much gathered memory there is after a fetch."""
        if self.timeline is not None:
            self.timeline.hold(gathered_bytes)

    def move(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Note bytes that move between the compute tier and those below."""
        if self.timeline is not None:
            self.timeline.move(bytes_in=bytes_in, bytes_out=bytes_out)

    def coming(self) -> Iterator[int]:
        """Yield the chunks that the plan fetches soon after the last use."""
        assert self._plan is not None, "a plan is followed"
        begin = self._follower.moment + 1
        for period in self._plan.periods[begin : begin + _LOOKS_AHEAD]:
            yield from (*period.fetch, *period.ahead)

    def end_iteration(self) -> Trace | None:
        """End the iteration; return its trace if it was recorded, to be planned from."""
        self.counter.stop()
        peak, trace = self._take_peak(), None
        if self.plans:
            if self._samples:
                self._follower.sample(peak)
            trace = self._end_trace()
        if self.timeline is not None:
            self.timeline.begin_step()
        return trace

    def end_step(self, gathered_bytes: int) -> None:
        """End the step, before any section moves.

        Args:
            gathered_bytes: Of chunks that are still present.
        """
        if self.timeline is not None:
            self.timeline.end_step(gathered_bytes)

    def follow(self, plan: ResidencePlan) -> None:
        """Follow a plan that was made from the trace."""
        self._plan = plan
        self.has_grown = False

    def _take_peak(self) -> int:
        """Return the most other bytes since the last call, if they are counted."""
        if not self.is_counting:
            return 0
        peak = self.counter.take_peak()
        if self.timeline is not None:
            self.timeline.add_other(peak)
        return peak

    def _end_trace(self) -> Trace | None:
        """Return the trace of the iteration if it was recorded."""
        before, was_recording = self._follower.trace, self._follower.is_recording
        self._log(self._follower.end_iteration())
        self._has_larger = False
        if self._follower.is_recording and not was_recording:
            self._known = 0, 0  # of these inputs the next trace has nothing
        trace = self._follower.trace
        self.has_grown |= before is not None and trace is not None and trace is not before
        return trace if was_recording else None

    def _log(self, departure: Departure | None) -> None:
        if departure is not None:
            get_dist_logger().info(
                f"chunks: {departure}; the least recently used go until a whole iteration is recorded again",
                ranks=[0],
            )


def _extent_of(inputs: object) -> tuple[int, int]:
    """Return the number of elements of all tensors in a nest, and the longest of their dimensions.

    Looks into lists, tuples, mappings and dataclasses, and at the first thousand values.
    """
    numel = longest = 0
    values = [inputs]
    for value in values:  # which grows
        if isinstance(value, torch.Tensor):
            if not value.is_nested and value.layout is torch.strided:
                numel, longest = numel + value.numel(), max(longest, *value.shape, 0, 0)
            continue
        inner: Iterable[object] = ()
        if isinstance(value, list | tuple):
            inner = value
        elif isinstance(value, Mapping):
            inner = value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            inner = [getattr(value, field.name, None) for field in fields(value)]
        values += islice(inner, max(0, _MOST_VALUES - len(values)))
    return numel, longest
