"""Accuracy of a profiled mesh's predicted times for message sizes that the profile did not measure.

    colossalai run --nproc_per_node 4 benchmarks/bandwidth.py
    colossalai run --nproc_per_node 4 benchmarks/bandwidth.py --rounds 5 --json bandwidth.json

A round profiles a mesh with `DeviceMesh.profile`. Before and after the profile, sizes between its own are
measured in the same way; their median is the reference. The error of a prediction is its relative difference
from the reference. `fit` is the error that the profile reports. `above` is the share of predictions that are
too long. `again` is the relative difference between the medians before and after the profile, which is the
machine's own drift. Ranks communicate by each backend in turn.
"""

import argparse
import itertools
import math
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import quartiles, report

import colossalai
from colossalai.core import global_context as gpc
from colossalai.device import OPERATIONS, PROFILE_SIZES, DeviceMesh, measure_operation

Kind = tuple[tuple[str, ...], str]
BETWEEN = [math.isqrt(small * large) for small, large in itertools.pairwise(PROFILE_SIZES)]


def shape_of(num_ranks: int) -> tuple[int, int]:
    """Return the most square grid of ranks."""
    inner = next(extent for extent in range(math.isqrt(num_ranks), 0, -1) if num_ranks % extent == 0)
    return num_ranks // inner, inner


def measure(args: argparse.Namespace, backend: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each operation, and their summary."""
    colossalai.launch_from_torch({}, backend=backend, verbose=False)
    shape = shape_of(dist.get_world_size())
    mesh = DeviceMesh(torch.arange(dist.get_world_size()), shape)
    kinds = [axes for axes in (("0",), ("1",), ("0", "1")) if mesh.mesh.axis_size(axes) > 1]
    errors: dict[str, list[float]] = {op: [] for op in OPERATIONS}
    fits: dict[str, list[float]] = {op: [] for op in OPERATIONS}
    again: dict[str, list[float]] = {op: [] for op in OPERATIONS}
    seconds = []

    def times_between() -> dict[Kind, list[dict[int, float]]]:
        return {
            (axes, op): [measure_operation(op, mesh.mesh.axis(axes), args.sizes) for _ in range(args.repeats)]
            for axes in kinds
            for op in OPERATIONS
        }

    before = times_between()
    for _ in range(args.rounds):
        start = time.perf_counter()
        speed = mesh.profile(show_progress=False)
        seconds.append(time.perf_counter() - start)
        after = times_between()
        for (axes, op), found in after.items():
            for size in found[0]:
                truth = statistics.median(times[size] for times in (*before[axes, op], *found))
                errors[op].append(speed.cost(op, size, axes) / truth - 1)
                first, second = (
                    statistics.median(times[size] for times in each) for each in (before[axes, op], found)
                )
                again[op].append(abs(first / second - 1))
            fits[op].append(speed.line(op, axes).error)
        before = after
    gpc.destroy()
    rows = [
        {
            "backend": backend,
            "operation": op,
            "predictions": len(errors[op]),
            "median_error": round(statistics.median(map(abs, errors[op])), 3),
            "quartile_3": round(quartiles(map(abs, errors[op]))[2], 3),
            "above": round(statistics.mean(error > 0 for error in errors[op]), 2),
            "fit": round(statistics.median(fits[op]), 3),
            "again": round(statistics.median(again[op]), 3),
        }
        for op in OPERATIONS
    ]
    every = [abs(error) for found in errors.values() for error in found]
    return rows, {
        "median_error": round(statistics.median(every), 3),
        "median_again": round(statistics.median(each for found in again.values() for each in found), 3),
        "profile_seconds": [round(each, 2) for each in seconds],
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backends", nargs="+", default=["shared_memory", "gloo"], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=BETWEEN, help="bytes to predict (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="profiles (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="measurements of each size (default: %(default)s)"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    overall = {}
    for backend in args.backends:
        found, overall[backend] = measure(args, backend)
        rows += found
    colossalai.launch_from_torch({}, verbose=False)
    settings = {**vars(args), "overall": overall, "load": os.getloadavg()}
    title = f"{dist.get_world_size()} ranks: errors of predicted times"
    report(title, rows, settings=settings, json_file=args.json)
    dist.barrier()


if __name__ == "__main__":
    main()
