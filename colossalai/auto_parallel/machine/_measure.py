"""Measurement of a device's rates: the times of the samples of `_samples.py` on this process's device.

[Note: bytes of an operation]
The bytes are those of all tensors that each kernel of an operation reads and writes, as `ByteCounter` counts
them: below autograd, so that a dropout on CPU counts as drawing, scaling and multiplying. Views are free.

[Note: conditions of a training]
A kernel that runs repeatedly on the same few tensors finds them in the cache, and writes its result to
recently freed memory. In training, a forward leaves behind everything that the backward reads. So a sample is
a small training: some MB of forwards in sequence, each on its own operands or on the previous result, all
results kept, then one backward through all of them. If a result is so large that the system allocates new
memory for each (32 MB with glibc), the times include this, as in training. The smallest samples, which give
the overhead of any operation, run few times in a row and alternate: in a model an operation comes after
others, and 32 in a row took less than half as long for each.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel.machine._rates import (
    FLOP_KINDS,
    Direction,
    Kind,
    OpRate,
    Optimizer,
    OptimizerRate,
    Rates,
    curve_through,
    fit_flop_rate,
    optimizer_bytes,
)
from colossalai.auto_parallel.machine._samples import DEVICE_POOL, POOL, Operands, Sample, all_samples
from colossalai.cluster import gather_values
from colossalai.communication import all_reduce
from colossalai.context import Axis, get_current_device
from colossalai.device import DeviceMesh

_ROUND_BYTES = 24e6  # bytes of the forwards of a round; see [Note: conditions of a training]
_MOST_COPIES = 32
_TINY = 2e-4  # seconds up to which samples alternate
_TINY_COPIES = 4  # in a row
_TINY_TURNS = 8  # in a round
_ROUNDS = 4  # number of rounds that fit into the time; large samples have fewer
_THOROUGH_S = 4.0  # seconds from which tensors of 32 MB are measured, too: they take most of the time
_SHORT = 0.02  # seconds up to which a sample is run twice more before its copies are chosen
# Kernels that move no bytes, in addition to torch's views.
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"})
_NUM_SMALL = 64  # tensors of an optimizer of small ones


class ByteCounter(TorchDispatchMode):
    """Count the bytes that kernels read and write within a block; see [Note: bytes of an operation].

    An expanded tensor has the bytes of its memory, and a lookup reads only the selected rows of a table.

    Attributes:
        num_bytes: Bytes counted so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or func.namespace == "prim" or name in _FREE:  # prim: queries of fake tensors
            return result
        read, written = _bytes_of((args, kwargs)), _bytes_of(result)
        if name in ("embedding", "gather", "index_select"):
            read += written - _bytes_of(args[0])
        self.num_bytes += read + written
        return result


def _bytes_of(values: Any) -> int:
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors)


def measure_rates(
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    seconds: float = 10.0,
    show_progress: bool = True,
) -> Rates:
    """Measure this process's device, with torch's current number of threads.

    In a job every rank calls it, and all are busy at the same time, as in training; the times are those of
    the slowest rank, and the result is the same on all of them. Products use the job's library for
    multiplication. Torch's random states do not change.

    Args:
        dtypes: Dtypes to measure; rates of others follow from these, see `time_of`.
        seconds: Approximate duration; each sample is measured at least once, which takes some seconds. Below
            4 tensors of 32 MB are left out.
        show_progress: Whether to draw a bar, if rank 0 has a terminal.

    Raises:
        ValueError: `dtypes` is empty or has a dtype that is not floating point, or `seconds` is not above 0.
    """
    if not dtypes or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"dtypes={list(dtypes)}: give at least one, all of them floating point types")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: give more than 0")
    everybody = _everybody()
    device = torch.device(everybody.mesh.device_type) if dist.is_initialized() else get_current_device()
    meter = _Meter(everybody, device)
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    measured: dict[str, Mapping[str, Mapping[str, OpRate]]] = {}
    with (
        torch.random.fork_rng(),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),  # an outer autocast would override `dtypes`
        _progress(show_progress, everybody.mesh.rank) as advance,
    ):
        for name, dtype in zip(names, dtypes, strict=True):
            pool = POOL if device.type == "cpu" else DEVICE_POOL
            largest = pool if seconds >= _THOROUGH_S else pool >> 2
            samples = list(all_samples(scale=1 if device.type == "cpu" else 4, largest=largest))
            meter.measure(samples, Operands(dtype, device, pool), seconds / len(dtypes), advance)
            measured[name] = _op_rates(samples)
        advance("optimizers")
        optimizers = {
            "adamw": _optimizer_rate("adamw", meter),
            "sgd": _optimizer_rate("sgd", meter),
        }
    kinds = measured[names[0]]
    return Rates(
        device=device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(),
        num_threads=torch.get_num_threads(),
        num_ranks=everybody.size,
        operations={kind: {name: measured[name][kind] for name in names} for kind in kinds},
        optimizers=optimizers,
    )


def _everybody() -> Axis:
    """Return the axis of all ranks of the job; of this process alone without a job."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return DeviceMesh(torch.arange(num_ranks)).mesh.axis("0")


class _Meter:
    """Measures times on all ranks at once.

    With one thread a time is the CPU time of that thread, so that other programs on the machine do not count.
    If ranks of one thread share cores, it is multiplied by the ranks of a core: a sample shorter than a slice
    of the scheduler is never interrupted by the other ranks, but a step of thousands of such operations is.
    With several threads it is wall-clock time.
    """

    def __init__(self, everybody: Axis, device: torch.device) -> None:
        self.everybody = everybody
        self.device = device
        host = platform.node()
        hosts = gather_values(host)
        is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if is_one_thread else time.perf_counter
        self._ranks_on_core = max(hosts.count(host) / (os.cpu_count() or 1), 1.0) if is_one_thread else 1.0

    def now(self) -> float:
        """Return the time after all pending work has completed."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return self._clock() * self._ranks_on_core

    def largest(self, own: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over all ranks; collective, and thus a barrier."""
        if self.everybody.size == 1:
            return list(own)
        numbers = torch.tensor(own, dtype=torch.float64).to(self.everybody.mesh.device_type)
        found: list[float] = all_reduce(numbers, self.everybody, dist.ReduceOp.MAX).tolist()
        return found

    def measure(
        self,
        samples: Sequence[Sample],
        operands: Operands,
        seconds: float,
        advance: Callable[[str], None],
    ) -> None:
        """Run every sample once to count and to warm up, then round by round until the time is up.

        A round has all samples, so that a temporary disturbance of the machine affects no sample alone.
        """
        begin = time.perf_counter()
        share = seconds / (_ROUNDS * len(samples))
        self._count(samples[0], operands)  # the first call in a process loads libraries
        tiny: list[Sample] = []
        for sample in samples:
            advance(sample.kind)
            taken = self._count(sample, operands)
            if taken < _SHORT:  # the counter and the first call take longer than a small sample
                taken = min(sum(self._round(sample, operands)) for _ in range(2))
            [taken] = self.largest([taken])  # the same number of copies on all ranks: they are busy together
            if taken < _TINY:
                tiny.append(sample)
                sample.copies = _TINY_COPIES
                continue
            fits = min(_ROUND_BYTES / max(sample.num_bytes[0], 1.0), share / taken, _MOST_COPIES)
            sample.copies = max(int(fits), 1)
        turns = [sample for sample in samples if sample not in tiny] + tiny * _TINY_TURNS
        if self.device.type != "cpu":  # first rounds load kernels and allocate memory
            for sample in samples:
                self._round(sample, operands)
        elapsed = 0.0
        while not all(sample.times for sample in samples) or elapsed < seconds:
            for sample in turns:
                [elapsed] = self.largest([time.perf_counter() - begin])
                if len(sample.times) < turns.count(sample) or elapsed < seconds:
                    sample.times.append(self._round(sample, operands))
        for sample in samples:
            # Medians before the maximum over ranks: otherwise each round would count its most disturbed rank.
            own = [statistics.median(column) for column in zip(*sample.times, strict=True)]
            forward, backward = self.largest(own)
            sample.times = [(forward, backward)]

    def _count(self, sample: Sample, operands: Operands) -> float:
        """Run a sample once, count its bytes, and return its approximate seconds."""
        tensors = sample.make(operands)
        start = self.now()
        with ByteCounter() as forward:
            result = sample.call(*tensors)
        gradient = torch.ones_like(result)
        with ByteCounter() as backward:
            torch.autograd.backward([result], [gradient])
        sample.num_bytes = (forward.num_bytes, backward.num_bytes)
        return self.now() - start

    def _round(self, sample: Sample, operands: Operands) -> tuple[float, float]:
        """Return the seconds of one forward and of one backward; see [Note: conditions of a training]."""
        copies = [sample.make(operands) for _ in range(sample.copies)]
        start = self.now()
        if sample.is_chain:
            first, *others = copies[0]
            results = [first]
            for _ in copies:
                results.append(sample.call(results[-1], *others))
            ends = results[-1:]
        else:
            results = ends = [sample.call(*tensors) for tensors in copies]
        middle = self.now()
        gradients = [torch.ones_like(end) for end in ends]
        del results  # now only autograd refers to them, and frees each as its backward ends
        before_backward = self.now()
        torch.autograd.backward(ends, gradients)
        end = self.now()
        return (middle - start) / len(copies), (end - before_backward) / len(copies)


def _op_rates(samples: Iterable[Sample]) -> Mapping[str, Mapping[str, OpRate]]:
    """Return the costs of each kind and direction from measured samples."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    found: dict[str, dict[str, OpRate]] = {}
    by_kind: dict[Kind, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    # The byte curve of products is the elementwise one: measure "elementwise" before `FLOP_KINDS`.
    for kind in sorted(by_kind, key=lambda kind: kind in FLOP_KINDS):
        found[kind] = {}
        for index, direction in enumerate(directions):
            of_kind = by_kind[kind]
            times = [sample.times[0][index] for sample in of_kind]
            overhead = min(times)
            rests = [max(seconds - overhead, 0.0) for seconds in times]
            if kind in FLOP_KINDS:
                shapes = [sample.shape for sample in of_kind if sample.shape is not None]
                flops = [sample.flops[index] for sample in of_kind]
                rate = fit_flop_rate(flops, shapes, rests, overhead=overhead)
                curve = found["elementwise"][direction].curve
                found[kind][direction] = OpRate(overhead, curve, rate)
            else:
                sizes = [sample.num_bytes[index] for sample in of_kind]
                found[kind][direction] = OpRate(overhead, curve_through(sizes, rests))
    return found


def _optimizer_rate(name: Optimizer, meter: _Meter) -> OptimizerRate:
    """Measure steps of a fused optimizer: with one small parameter, with many, and with larger ones."""

    def step_of(num_tensors: int, numel: int) -> float:
        params = [torch.zeros(numel, device=meter.device).requires_grad_() for _ in range(num_tensors)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer: torch.optim.Optimizer
        if name == "adamw":
            optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
        else:
            optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)
        optimizer.step()  # creates the states
        times = []
        for _ in range(3):
            meter.largest([0.0])
            start = meter.now()
            optimizer.step()
            times.append(meter.now() - start)
        return meter.largest([statistics.median(times)])[0]

    one, many = step_of(1, 16), step_of(_NUM_SMALL, 16)
    per_tensor = max(many - one, 0.0) / (_NUM_SMALL - 1)
    overhead = max(one - per_tensor, 0.0)
    numels = [1 << 16, 1 << 19, 1 << 22]
    if meter.device.type != "cpu":
        numels.append(1 << 26)
    rests = [max(step_of(1, numel) - one, 0.0) for numel in numels]
    sizes = [optimizer_bytes(name, 4 * numel) for numel in numels]
    return OptimizerRate(overhead, per_tensor, curve_through(sizes, rests))


@contextmanager
def _progress(is_wanted: bool, rank: int) -> Iterator[Callable[[str], None]]:
    """Draw the current sample on a terminal of rank 0."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (is_wanted and rank == 0 and console.is_terminal):
        yield lambda _: None
        return
    with console.status("measuring") as status:
        yield lambda what: status.update(f"measuring: {what}")
