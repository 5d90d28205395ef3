"""Measurement of one model in one configuration, on all ranks of the job."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from colossalai.cli._benchmark._configurations import Configuration
from colossalai.cli._benchmark._models import Builder
from colossalai.cli._benchmark._results import BenchmarkSettings, Figures
from colossalai.communication import ledger
from colossalai.context import global_context
from colossalai.nn.layer import restart
from colossalai.tensor import cut_dims


class SavedBytes:
    """Counter of the bytes of all storages that autograd saves, each counted once.

    Args:
        except_of: Tensors whose storages are not counted, such as parameters.
    """

    def __init__(self, except_of: Iterable[torch.Tensor]) -> None:
        self.num_bytes = 0
        self._seen = {storage.data_ptr() for tensor in except_of for storage in _storages(tensor)}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is being saved, and return it."""
        for storage in _storages(tensor):
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.num_bytes += storage.nbytes()
        return tensor


@contextmanager
def saved_bytes(except_of: Iterable[torch.Tensor]) -> Iterator[SavedBytes]:
    """Count the bytes that the forward within the block saves; run the backward after the block."""
    count = SavedBytes(except_of)
    with torch.autograd.graph.saved_tensors_hooks(count.add, lambda tensor: tensor):
        yield count


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor; wrapper subclasses such as DTensor consist of other tensors."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh, too
                yield from _storages(part)
    else:
        yield tensor.untyped_storage()


@dataclass(frozen=True)
class Times:
    """Times of a step in seconds."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Shares:
    """Shares of a step's times inside collectives, and the bytes sent."""

    forward: float
    backward: float
    num_bytes: float


@dataclass(frozen=True)
class MeasuredStep:
    """A forward and a backward of a model."""

    model: nn.Module
    x: torch.Tensor
    dy: torch.Tensor

    def run(self) -> Times:
        """Run and time the forward and the backward."""
        self._begin()
        start = _now()
        y = self.model(self.x)
        middle = _now()
        y.backward(self.dy)
        return Times(middle - start, _now() - middle)

    def run_booked(self) -> Shares:
        """Run the forward and the backward with timed collectives."""
        self._begin()
        start = _now()
        with ledger(timed=True) as forward:
            y = self.model(self.x)
        middle = _now()
        with ledger(timed=True) as backward:
            y.backward(self.dy)
        return Shares(
            forward.seconds() / (middle - start),
            backward.seconds() / (_now() - middle),
            forward.num_bytes() + backward.num_bytes(),
        )

    def count_saved(self) -> int:
        """Return the bytes that the forward saves."""
        self._begin()
        with saved_bytes(self.model.parameters()) as count:
            y = self.model(self.x)
        y.backward(self.dy)
        return count.num_bytes

    def _begin(self) -> None:
        self.model.zero_grad()
        self.x.grad = None
        dist.barrier()


def measure(
    name: str,
    build: Builder,
    configuration: Configuration,
    settings: BenchmarkSettings,
    *,
    after_step: Callable[[], object],
) -> Figures:
    """Return the figures of a model in the configuration that the job was launched with.

    Args:
        name: Name of the model.
        build: Builds a layer of the model.
        configuration: The configuration.
        settings: Sizes and numbers of steps.
        after_step: Called `settings.warmup + settings.rounds` times.

    Raises:
        ValueError: The ranks of the configuration do not divide the sizes (raised on all ranks).
    """
    step = _prepare(build, settings)
    saved = step.count_saved()
    peak = _device_peak(step)
    rounds = []
    for _ in range(settings.warmup + settings.rounds):
        rounds.append((step.run(), step.run_booked()))
        after_step()
    times, shares = zip(*rounds[settings.warmup :], strict=True)
    forward_ms = 1e3 * statistics.median(took.forward for took in times)
    backward_ms = 1e3 * statistics.median(took.backward for took in times)
    params = list(step.model.parameters())
    largest = _over_ranks(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        forward_communication_ms=forward_ms * statistics.median(share.forward for share in shares),
        backward_communication_ms=backward_ms * statistics.median(share.backward for share in shares),
        bytes_sent=shares[0].num_bytes,
        num_parameters=sum(param.numel() for param in params),
        parameter_bytes=sum(param.nbytes for param in params),
        saved_bytes=saved,
        device_peak_bytes=peak or 0,
    )
    return Figures(
        model=name,
        configuration=configuration,
        forward_ms=round(largest["forward_ms"], 3),
        backward_ms=round(largest["backward_ms"], 3),
        forward_communication_ms=round(largest["forward_communication_ms"], 3),
        backward_communication_ms=round(largest["backward_communication_ms"], 3),
        bytes_sent=round(largest["bytes_sent"]),
        num_parameters=round(largest["num_parameters"]),
        parameter_bytes=round(largest["parameter_bytes"]),
        saved_bytes=round(largest["saved_bytes"]),
        device_peak_bytes=None if peak is None else round(largest["device_peak_bytes"]),
    )


def _prepare(build: Builder, settings: BenchmarkSettings) -> MeasuredStep:
    shape = (settings.batch_size, settings.seq_length, settings.hidden_size)
    cut = restart(global_context.tensor_mode)
    try:
        spec = cut_dims(shape, (cut.batch, (), cut.features), global_context.mesh)
    except ValueError as error:
        raise ValueError(f"the input (batch, seq, hidden): {error}") from error
    layers = [build(settings) for _ in range(settings.num_layers)]
    model = nn.Sequential(*layers).to(global_context.device)
    x = spec.cut(torch.randn(shape, device=global_context.device)).requires_grad_()
    return MeasuredStep(model, x, torch.randn_like(x))


def _over_ranks(**values: float) -> dict[str, float]:
    """Return the maximum of each value over the ranks."""
    result = torch.tensor(list(values.values()), dtype=torch.float64, device=global_context.device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return dict(zip(values, result.tolist(), strict=True))


def _device_peak(step: MeasuredStep) -> int | None:
    if not torch.accelerator.is_available():
        return None
    torch.accelerator.reset_peak_memory_stats()
    step.run()
    return torch.accelerator.max_memory_allocated()


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
