"""The guide of a cache: what the first iteration showed, and the plan that is followed from then on.

[Note: what is not model data]
What a step takes beside chunks (activations, gradients under way, temporary results) is counted by storages,
in the one iteration that is recorded: a dispatch mode sees each tensor that a function of torch returns, and
a finalizer on its storage says when the memory is free. Resident size would count what an allocator keeps.
Until then the interpreter holds what a finalizer calls, so nothing may lead from there to the model: the mode
does not, and neither does `is_model_data`.

A later forward with larger inputs than any before is counted, too: its bytes can be more than those that the
plan was made for.

The mode is on from the first forward of the iteration until its gradients are asked for, so that the loss and
the backward are seen, too. Modes are a stack: where somebody else's is on, ours is off after each forward.
A guide that is dropped in between, with its model, switches its mode off.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

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

_LOOKS_AHEAD = 2  # periods of which the system is asked to read what lies on disk

_MOST_VALUES = 1000  # of a nest of inputs that are looked at


class OtherBytes(TorchDispatchMode):
    """Counts the memory of tensors that functions of torch make; see [Note: what is not model data].

    Args:
        device: Where the memory counts.
        is_model_data: Whether a storage, by its address as an object, is one of chunks; it holds no chunks.

    Attributes:
        listener: Is told every peak that somebody takes.
    """

    def __init__(self, device: torch.device, is_model_data: Callable[[int], bool]) -> None:
        super().__init__()
        self._device_type = device.type
        self._is_model_data = is_model_data
        self._alive: dict[int, int] = {}
        self._bytes = self._peak = 0
        self._is_on = self._is_alone = False
        self.listener: Callable[[int], None] | None = None

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
        """Stop counting; what has been seen is still known."""
        if self._is_on and _get_current_dispatch_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)

    def take_peak(self) -> int:
        """Return the most bytes since this was asked."""
        peak, self._peak = self._peak, self._bytes
        if self.listener is not None:
            self.listener(peak)
        return peak

    def set_aside(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that is to be model data, and does not count while nobody knows it yet."""
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
        # Memory of somebody else (a mapped file, a segment) is not all taken by the tensor that lies in it.
        size = storage.nbytes() if storage.resizable() else tensor.numel() * tensor.element_size()
        self._alive[key] = size
        self._bytes += size
        self._peak = max(self._peak, self._bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._alive.pop(key, 0)


class Guide:
    """Says at each use who is to be dropped and fetched, once an iteration has been recorded.

    Args:
        counter: What counts other memory while an iteration is recorded; None: nothing does.

    Attributes:
        has_grown: Whether iterations took more other bytes on this rank than the plan was made for.
    """

    def __init__(self, counter: OtherBytes | None) -> None:
        self.counter = counter
        self._follower = TraceFollower()
        self._plan: ResidencePlan | None = None
        self._known = (0, 0)  # elements, and the longest dimension, of the largest inputs in the trace
        self._counts_larger = False  # whether this iteration has larger ones
        self.has_grown = False
        if counter is not None:
            weakref.finalize(self, counter.stop).atexit = False

    @property
    def is_recording(self) -> bool:
        """Whether the iteration will be a trace."""
        return self._follower.is_recording

    @property
    def is_counting(self) -> bool:
        """Whether other memory is counted in this iteration: it is recorded, or has larger inputs."""
        return self.is_recording or self._counts_larger

    @property
    def trace(self) -> Trace | None:
        """The trace that is followed; None while an iteration is off it, or recorded."""
        return self._follower.trace

    @property
    def is_followed(self) -> bool:
        """Whether there is a plan, and the iteration goes as it was planned."""
        return self._plan is not None and self._follower.trace is not None

    def begin_forward(self, inputs: Any) -> None:
        """Note the inputs of a forward in training; larger ones than before are counted.

        Args:
            inputs: A nest of tensors and other values.
        """
        numel, longest = _extent_of(inputs)
        if numel <= self._known[0] and longest <= self._known[1]:
            return
        self._known = max(numel, self._known[0]), max(longest, self._known[1])
        if self.counter is not None and not self.is_counting:
            self._counts_larger = True
            self.counter.take_peak()  # of what was before

    def use(self, chunk: int, held: Collection[int]) -> Period | None:
        """Hear of a use; return what the plan does there, None where nothing is planned.

        Args:
            chunk: The number of the chunk.
            held: Others that cannot be dropped now.
        """
        if self.counter is not None and self.is_counting:
            self._follower.sample(self.counter.take_peak())
        self._tell(self._follower.use(chunk, held))
        if self._plan is None or self._follower.trace is None:
            return None
        return self._plan.periods[self._follower.moment]

    def coming(self) -> Iterator[int]:
        """Yield the chunks that the plan fetches soon after the last use."""
        assert self._plan is not None, "a plan is followed"
        begin = self._follower.moment + 1
        for period in self._plan.periods[begin : begin + _LOOKS_AHEAD]:
            yield from (*period.fetch, *period.ahead)

    def end_iteration(self) -> Trace | None:
        """End the iteration; return its trace if it was recorded, to be planned from."""
        if self.counter is not None:
            self.counter.stop()
            if self.is_counting:
                self._follower.sample(self.counter.take_peak())
        before = self._follower.trace
        was_recording = self.is_recording
        self._tell(self._follower.end_iteration())
        self._counts_larger = False
        if self.is_recording and not was_recording:
            self._known = 0, 0  # what was counted is not in the trace that comes next
        trace = self._follower.trace
        self.has_grown |= before is not None and trace is not None and trace is not before
        return trace if was_recording else None

    def follow(self, plan: ResidencePlan) -> None:
        """Follow a plan that was made from the trace."""
        self._plan = plan
        self.has_grown = False

    def _tell(self, departure: Departure | None) -> None:
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
