"""Measured communication: the times of each operation along axes of a mesh, and the lines fitted to them.

[Note: timed calls]
A call is timed as in real use: through `colossalai.communication`, including the allocation of its result. An
untimed call directly precedes the timed ones: ranks leave a barrier at different moments, which on a busy
machine are further apart than a short message takes, so the call itself synchronizes them. Groups along an
axis communicate all at once, as in training. The time is the slowest rank's, the median of some rounds,
of fewer on a slow machine. A round has all sizes, so that a temporary disturbance of the machine affects no
size alone. Calls above 1 MB are timed once.
"""

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from colossalai._clock import Clock
from colossalai.cluster import gather_values
from colossalai.communication import all_gather, all_reduce, all_to_all, reduce_scatter, ring_forward
from colossalai.context import Axis, Mesh
from colossalai.device._fit import AlphaBeta, fit_alpha_beta
from colossalai.device._speed import OPERATIONS, Extents, Machine, MeshSpeed, extents_of

PROFILE_SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Eight sizes, from 1 KB to 16 MB."""

_LARGE = 1 << 20  # bytes above which a call is timed once
_NUM_ROUNDS = 7
_FEWEST_ROUNDS = 3
_PATIENCE_S = 0.5  # seconds of an operation along some axes, after which only the fewest rounds are run
_NUM_CALLS = 2  # calls of a round, in sequence
_FLOAT = 4  # bytes
_CLOCK = Clock(now=time.perf_counter)

Advance = Callable[[str], None]


def measure_speed(mesh: Mesh, *, show_progress: bool) -> MeshSpeed:
    """Measure all operations along every run of adjacent axes of a mesh; collective over the job.

    Args:
        mesh: The mesh; missing groups are created.
        show_progress: Whether to draw a bar on the terminal of rank 0.
    """
    names, shape = tuple(mesh.axes), tuple(mesh.axes.values())
    runs: dict[Extents, tuple[str, ...]] = {}
    for count in range(1, len(shape) + 1):
        for begin in range(len(shape) - count + 1):
            extents = extents_of(shape, range(begin, begin + count))
            if extents:
                runs.setdefault(extents, names[begin : begin + count])
    lines: dict[Extents, dict[str, AlphaBeta]] = {}
    with _progress(len(runs) * len(OPERATIONS), is_shown=show_progress and mesh.rank == 0) as advance:
        for extents, axes in runs.items():
            lines[extents] = {}
            for op in OPERATIONS:
                advance(f"{op} along {' and '.join(axes)}")
                times = measure_operation(op, mesh.axis(axes), PROFILE_SIZES)
                lines[extents][op] = fit_alpha_beta(list(times), list(times.values()))
    return MeshSpeed(shape, lines, machine_of_job(mesh.device_type))


def measure_operation(
    op: str, axis: Axis, sizes: Sequence[int], *, clock: Clock = _CLOCK
) -> dict[int, float]:
    """Return the seconds of an operation for each size; collective over the job.

    See [Note: timed calls].

    Args:
        op: One of `OPERATIONS`.
        axis: Axis of the operation; all groups along it communicate at the same time.
        sizes: See [Note: num_bytes]; rounded up to a multiple of the ranks of the axis.
        clock: Clock of the measurement.

    Returns:
        The seconds by rounded size.
    """
    everybody = axis.mesh.axis(tuple(axis.mesh.axes))
    unit = _FLOAT * axis.size
    calls = {(rounded := -(-size // unit) * unit): _call(op, axis, rounded) for size in sizes}
    next(iter(calls.values()))()  # the first call opens the connections
    found: dict[int, list[float]] = {size: [] for size in calls}
    begin = clock.now()
    for number in range(_NUM_ROUNDS):
        elapsed = _meet(everybody, clock.now() - begin)  # the same on all ranks: they stop together
        if number >= _FEWEST_ROUNDS and elapsed > _PATIENCE_S:
            break
        for size, call in calls.items():
            is_large = size > _LARGE
            if not is_large or number == 0:
                num_calls = 1 if is_large else _NUM_CALLS
                _meet(everybody, 0.0)
                call()
                _finish(axis.mesh)
                start = clock.now()
                for _ in range(num_calls):
                    call()
                _finish(axis.mesh)
                found[size].append((clock.now() - start) / num_calls)
    own = torch.tensor([seconds for each in found.values() for seconds in each], dtype=torch.float64)
    slowest = all_reduce(own.to(axis.mesh.device_type), everybody, dist.ReduceOp.MAX).cpu()
    parts = slowest.split([len(each) for each in found.values()])
    return {size: part.quantile(0.5).item() for size, part in zip(found, parts, strict=True)}


def machine_of_job(device_type: str) -> Machine:
    """Return the machine of this job; collective over it. Without a job: this host with one rank."""
    own = (platform.node() or socket.gethostname(), os.cpu_count() or 1)
    ranks = gather_values(own)
    return Machine(
        hosts=tuple(host for host, _ in ranks),
        cores=tuple(cores for _, cores in ranks),
        device=device_type
        if device_type == "cpu"
        else torch.get_device_module(device_type).get_device_name(),
        backend=dist.get_backend() if dist.is_initialized() else "",
        torch=torch.__version__,
    )


def _call(op: str, axis: Axis, num_bytes: int) -> Callable[[], object]:
    """Return a function that runs an operation once."""
    tensor = torch.zeros(axis.size, num_bytes // _FLOAT // axis.size, device=axis.mesh.device_type)
    part = tensor[0].clone()
    run: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather(part, 0, axis),
        "reduce_scatter": lambda: reduce_scatter(tensor, 0, axis),
        "all_reduce": lambda: all_reduce(tensor, axis),
        "all_to_all": lambda: all_to_all(tensor, axis, split_dim=0, gather_dim=1),
        "point_to_point": lambda: ring_forward(tensor, axis),
    }
    return run[op]


def _meet(everybody: Axis, own: float) -> float:
    """Wait for all ranks and for pending device work, and return the maximum of their numbers."""
    number = torch.tensor([own], device=everybody.mesh.device_type)
    return all_reduce(number, everybody, dist.ReduceOp.MAX).item()


def _finish(mesh: Mesh) -> None:
    """Wait for the device: on accelerators a call returns before it has completed."""
    if mesh.device_type != "cpu":
        torch.accelerator.synchronize()


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Advance]:
    """Draw a bar on a terminal; yields a function that takes the name of the next step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    is_drawn = is_shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_drawn) as progress:
        task = progress.add_task("", total=total, completed=-1)
        yield lambda what: progress.update(task, description=what, advance=1)
