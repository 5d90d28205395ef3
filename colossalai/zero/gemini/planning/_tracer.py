"""The tracer: the one recorder of an iteration, for eviction plans and timelines.

[Note: memory other than model data]
The other memory of a step (activations, gradients before averaging, temporary results) is counted by storage,
in the one iteration that is recorded: a dispatch mode receives each tensor that a function of torch returns,
and a finalizer on its storage runs when the memory is freed. Resident size would include memory that an
allocator keeps. The interpreter keeps a finalizer and its function alive until then, so these must not
reference the model: neither the mode nor `is_model_data` does.

A later forward with larger inputs than any before is counted, too: its bytes can be more than those that the
plan was made for.

The mode is active from the first forward of the iteration until its gradients are read, so that it includes
the loss and the backward. Modes are a stack: if a mode of the user is active, this one ends after each
forward. A tracer that is freed in between, with its model, ends its mode.
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
from colossalai.zero.gemini.planning._eviction import EvictionPlan, Period
from colossalai.zero.gemini.planning._trace import Trace, TraceFollower, TraceMismatch

if TYPE_CHECKING:
    from colossalai.zero.gemini._timeline import ChunkTimeline

_LOOKS_AHEAD = 2  # periods whose chunks on disk are prefetched

_MOST_VALUES = 1000  # limit on the inspected values of a nest of inputs


class OtherBytes(TorchDispatchMode):
    """Counts the memory of results of torch functions; see [Note: memory other than model data].

    Args:
        device: The device whose memory is counted.
        is_model_data: Returns whether the storage object at an address belongs to a chunk; references none.
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
        """Stop after a forward, if another mode is active or the forward has failed."""
        if not self._is_alone or sys.exc_info()[0] is not None:
            self.stop()

    def stop(self) -> None:
        """Stop counting; counted storages are still tracked."""
        if self._is_on and _get_current_dispatch_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)

    def take_peak(self) -> int:
        """Return the most bytes since the last call."""
        peak, self._peak = self._peak, self._bytes
        return peak

    def set_aside(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that becomes model data, without counting it until it is registered."""
        peak = self._peak
        tensor = make()
        self.forget(tensor)
        self._peak = peak
        return tensor

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor that has become model data."""
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
        # Memory of another owner (a mapped file, a segment) can be larger than the tensor in it.
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
        has_grown: Whether iterations took more other bytes on this rank than planned.
    """

    def __init__(self, counter: OtherBytes, *, plans: bool) -> None:
        self.counter = counter
        self.plans = plans
        self.timeline: ChunkTimeline | None = None
        self.has_grown = False
        self._follower = TraceFollower()
        self._plan: EvictionPlan | None = None
        self._known = (0, 0)  # elements, and the longest dimension, of the largest inputs in the trace
        self._has_larger = False  # whether this iteration has larger ones
        weakref.finalize(self, counter.stop).atexit = False

    @property
    def _samples(self) -> bool:
        """Whether other memory is added to the trace: this iteration is recorded, or has larger inputs."""
        return self.plans and (self._follower.is_recording or self._has_larger)

    @property
    def is_counting(self) -> bool:
        """Whether other memory is counted in this iteration."""
        return self.timeline is not None or self._samples

    @property
    def trace(self) -> Trace | None:
        """The trace that is followed. None: after a mismatch, or while recording."""
        return self._follower.trace

    @property
    def is_followed(self) -> bool:
        """Whether there is a plan, and the iteration matches its trace."""
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
            gathered_bytes: Bytes of chunks that are still present.
        """
        if self.timeline is not None:
            self.timeline.end_step(gathered_bytes)

    def follow(self, plan: EvictionPlan) -> None:
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
            self._known = 0, 0  # the next trace does not include these inputs
        trace = self._follower.trace
        self.has_grown |= before is not None and trace is not None and trace is not before
        return trace if was_recording else None

    def _log(self, departure: TraceMismatch | None) -> None:
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
