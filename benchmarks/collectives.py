"""Collectives and messages between the ranks of one machine: through shared memory, and by gloo.

    colossalai run --nproc_per_node 2 benchmarks/collectives.py
    colossalai run --nproc_per_node 8 benchmarks/collectives.py --sizes 1024 1048576 --json collectives.json

The time of a call is from the arrival of the last rank to the end of the last rank, by the clock that all
processes of a machine share. Both backends take turns in the same processes. The figure of a run is the
median of its calls; the table shows medians over the runs. `copy` is the time of copying between warm buffers
on all ranks at once, for the bytes that the algorithm must move (the table on the design page). It is a lower
bound of any algorithm that uses slots. `lent` is the relative time when each rank's operand is in memory that
the other ranks can read, like ZeRO's buckets: this saves a copy.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import report

import colossalai
from colossalai.communication.shared_memory import empty_in_arena

SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
Maker = Callable[[int, Any, bool], Callable[[], object]]


def operand(size: int, group: Any, lends: bool) -> torch.Tensor:
    """Return a tensor of `size` bytes, in memory that the other ranks can read if it is lent."""
    lent = empty_in_arena(group, size // 4, torch.float32) if lends else None
    return torch.zeros(size // 4) if lent is None else lent.zero_()


def all_reduce(size: int, group: Any, lends: bool) -> Callable[[], object]:
    """Reduce `size` bytes of each rank."""
    tensor = operand(size, group, lends)
    return lambda: dist.all_reduce(tensor, group=group)


def all_gather(size: int, group: Any, lends: bool) -> Callable[[], object]:
    """Gather `size` bytes in total."""
    output = torch.zeros(size // 4)
    source = operand(size // dist.get_world_size(), group, lends)
    return lambda: gather_all(output, source, group=group)


def reduce_scatter(size: int, group: Any, lends: bool) -> Callable[[], object]:
    """Reduce `size` bytes of each rank, which keeps its part."""
    source = operand(size, group, lends)
    output = torch.zeros(size // 4 // dist.get_world_size())
    return lambda: scatter_sum(output, source, group=group)


def all_to_all(size: int, group: Any, _: bool) -> Callable[[], object]:
    """Exchange `size` bytes of each rank."""
    source, output = torch.zeros(size // 4), torch.zeros(size // 4)
    return lambda: dist.all_to_all_single(output, source, group=group)


def broadcast(size: int, group: Any, _: bool) -> Callable[[], object]:
    """Copy `size` bytes of rank 0 to all."""
    tensor = torch.zeros(size // 4)
    return lambda: dist.broadcast(tensor, 0, group=group)


def message(size: int, group: Any, _: bool) -> Callable[[], object]:
    """Send `size` bytes from rank 0 to the last one."""
    tensor, last = torch.zeros(size // 4), dist.get_world_size() - 1

    def call() -> None:
        if dist.get_rank() == 0:
            dist.send(tensor, last, group=group)
        elif dist.get_rank() == last:
            dist.recv(tensor, 0, group=group)

    return call


gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LENT = ("all_reduce", "all_gather", "reduce_scatter")  # other ranks can read their operands in place
# Each call, and the bytes that it must copy on a rank, as parts of its size, for p ranks.
CALLS: dict[str, tuple[Maker, Callable[[int], float]]] = {
    "all_reduce": (all_reduce, lambda p: (p - 1) / p + 1 + 1),
    "all_gather": (all_gather, lambda p: 1 / p + (p - 1) / p),
    "reduce_scatter": (reduce_scatter, lambda p: (p - 1) / p + 1),
    "all_to_all": (all_to_all, lambda p: 2 * (p - 1) / p),
    "broadcast": (broadcast, lambda p: 1.0),
    "message": (message, lambda p: 1.0),
}


def timed(call: Callable[[], object], count: int, barrier: Callable[[], object]) -> list[tuple[float, float]]:
    """Return the start and end times of each of `count` calls on this rank."""
    times = []
    for _ in range(count):
        barrier()
        start = time.perf_counter()
        call()
        times.append((start, time.perf_counter()))
    return times


def longest(times: list[tuple[float, float]]) -> list[float]:
    """Return the seconds of each call from the arrival of the last rank to the end of the last rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, times)
    calls = zip(*told, strict=True)
    return [max(end for _, end in call) - max(start for start, _ in call) for call in calls]


def copy_seconds(size: int, part: float, count: int) -> float:
    """Return the seconds to copy `part` times `size` bytes between warm buffers, on all ranks at once."""
    source, target = torch.zeros(size // 4), torch.zeros(size // 4)
    rest = int(part % 1 * source.numel())

    def copy() -> None:
        for _ in range(int(part)):
            target.copy_(source)
        target[:rest].copy_(source[:rest])

    copy()
    return statistics.median(longest(timed(copy, count, dist.barrier)))


def measure(
    args: argparse.Namespace, shared: dist.ProcessGroup, gloo: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return a row for each call and size."""
    rows, p = [], dist.get_world_size()
    for name in args.calls:
        groups = {"ours": shared, "gloo": gloo} | ({"lent": shared} if name in LENT else {})
        make, copied = CALLS[name]
        for size in args.sizes:
            count = max(args.least, min(args.calls_of_a_run, int(64e6 / size)))
            calls = {key: make(size, group, key == "lent") for key, group in groups.items()}
            found: dict[str, list[float]] = {key: [] for key in groups}
            for run in range(args.rounds + 1):
                for key in (*groups,)[:: 1 if run % 2 else -1]:
                    figure = statistics.median(longest(timed(calls[key], count, dist.barrier)))
                    if run:
                        found[key].append(figure)
            seconds = {key: statistics.median(found[key]) for key in groups}
            ours, theirs = seconds["ours"], seconds["gloo"]
            copy = copy_seconds(size, copied(p), count)
            rows.append(
                {
                    "call": name,
                    "bytes": size,
                    "gloo_us": round(1e6 * theirs, 1),
                    "ours_us": round(1e6 * ours, 1),
                    "ratio": round(ours / theirs, 3),
                    "lent": round(seconds["lent"] / ours, 3) if "lent" in seconds else None,
                    "copy_us": round(1e6 * copy, 1),
                    "vs_copy": round(ours / copy, 2),
                }
            )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--calls_of_a_run", type=int, default=50, help="at most (default: %(default)s)")
    parser.add_argument("--least", type=int, default=3, help="calls of a run at least (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    colossalai.launch_from_torch(backend="gloo", verbose=False)
    torch.set_num_threads(1)
    shared = dist.new_group(backend="shared_memory")
    assert shared is not None, "every rank is in it"
    rows = measure(args, shared, dist.group.WORLD)
    if dist.get_rank() == 0:
        ratios = [row["ratio"] for row in rows]
        settings = {**vars(args), "ranks": dist.get_world_size(), "median_ratio": statistics.median(ratios)}
        report(f"{dist.get_world_size()} ranks of one machine", rows, settings=settings, json_file=args.json)
    dist.barrier()


if __name__ == "__main__":
    main()
