"""Conversions of layouts: ours over gloo and through shared memory, and DTensor's `redistribute` over gloo.

    colossalai run --nproc_per_node 4 benchmarks/convert.py
    colossalai run --nproc_per_node 4 benchmarks/convert.py --json results.json

The cases are all pairs of cuts of a 2D and a 3D tensor over 2 x 2 ranks, with the order of axes that torch's
`Shard` supports. Times are those of the slowest rank. The variants take turns in every round. The ratio of a
pair is the median over the rounds; the table shows the median, or the share, over the pairs. "least cost" is
torch's private planner of that name. Bytes are sent bytes per rank over a ring: ours from the ledger of the
busiest rank, DTensor's from its planned moves.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import report, time_rounds
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as torch_planner

import colossalai
from colossalai.communication import ledger
from colossalai.context import Mesh
from colossalai.tensor import ConversionPlanner, ShardingLayout, ShardingSpec, convert

EXTENTS = {"0": 2, "1": 2}
PLANNERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "default": nullcontext,
    "least cost": torch_planner.use_min_cost_redistribution_plan,
}
Pair = tuple[ShardingLayout, ShardingLayout]


def shape_of(num_dims: int, num_bytes: int) -> tuple[int, ...]:
    """Return a shape whose dimensions are powers of two, in descending order, for float32."""
    exponent = int(math.log2(num_bytes // 4))
    return tuple(2 ** (exponent // num_dims + (dim < exponent % num_dims)) for dim in range(num_dims))


def all_pairs(mesh: Mesh, shape: tuple[int, ...]) -> list[Pair]:
    """Return all pairs of different cuts, with the axes of a dimension in mesh order."""
    layouts = []
    for places in itertools.product(range(-1, len(shape)), repeat=len(EXTENTS)):
        dims = tuple(
            tuple(axis for axis, place in zip(EXTENTS, places, strict=True) if place == dim)
            for dim in range(len(shape))
        )
        layouts.append(ShardingLayout(ShardingSpec(shape, dims, mesh)))
    return [(one, other) for one in layouts for other in layouts if one != other]


def mesh_through_memory() -> Mesh:
    """Return a second mesh of the job, whose ranks communicate through shared memory."""
    mesh = Mesh(EXTENTS, rank=dist.get_rank())
    for ranks in ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3)):
        group = dist.new_group(list(ranks), backend="shared_memory")
        if dist.get_rank() in ranks:
            assert group is not None, "this rank is a member"
            mesh.adopt_group(ranks, group)
    return mesh


def torch_bytes(source: Any, target: Any, local_bytes: float) -> float:
    """Return the bytes that a rank sends over a ring in DTensor's planned moves."""
    sent = 0.0
    for move in torch_planner._gen_transform_infos_non_cached(source._spec, target._spec):
        size = EXTENTS[str(move.mesh_dim)]
        before, after = move.src_dst_placements
        if before.is_shard() and after.is_replicate():
            sent += (size - 1) * local_bytes
            local_bytes *= size
        elif before.is_shard() and after.is_shard():
            sent += (size - 1) / size * local_bytes
        elif after.is_shard():
            local_bytes /= size
    return sent


def slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the time of the slowest rank for each variant and round."""
    table = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(times, table.tolist(), strict=True))


def figures_of_pair(pair: Pair, other: Mesh, *, planner: str, rounds: int) -> dict[str, float]:
    """Return the ratios of a pair, and the bytes of both."""
    source, target = (layout.spec for layout in pair)
    beside = [ShardingSpec(spec.shape, spec.dims, other) for spec in (source, target)]
    whole = torch.arange(math.prod(source.shape), dtype=torch.float32).reshape(source.shape)
    slice_ = source.cut(whole)
    mesh = source.mesh.device_mesh(tuple(EXTENTS))
    theirs = DTensor.from_local(slice_, mesh, source.to_placements(), run_check=False)
    placements = target.to_placements()
    torch_planner._gen_transform_infos.cache_clear()  # its keys do not include the planner
    found = {}
    with PLANNERS[planner]():
        moved = theirs.redistribute(mesh, placements)
        assert torch.equal(moved.to_local(), convert(slice_, source, target)), pair
        times = slowest(
            time_rounds(
                {
                    "gloo": lambda: convert(slice_, source, target),
                    "memory": lambda: convert(slice_, *beside),
                    "torch": lambda: theirs.redistribute(mesh, placements),
                },
                rounds=rounds,
                warmup=2,
            )
        )
        found["torch_bytes"] = torch_bytes(theirs, moved, slice_.nbytes)
    with ledger() as book:
        convert(slice_, source, target)
    sent = torch.tensor(book.num_bytes(), dtype=torch.float64)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    for name in ("gloo", "memory"):
        ratios = [ours / torch_s for ours, torch_s in zip(times[name], times["torch"], strict=True)]
        found[name] = statistics.median(ratios)
    return {**found, "bytes": sent.item(), "torch_s": statistics.median(times["torch"])}


def row_of(title: dict[str, Any], pairs: list[Pair], figures: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures over all pairs of a rank and a size."""
    planner = pairs[0][0].spec.mesh.derived(ConversionPlanner)
    greedy_is_worse = exact_is_worse = 0
    for pair in pairs:
        exact = planner.exact(*pair, 4)
        assert exact is not None, "a tensor without parts has a path to every cut"
        greedy_is_worse += planner.greedy(*pair, 4).cost > exact.cost + len(exact.steps)
        exact_is_worse += exact.cost > planner.direct(*pair, 4).cost + len(exact.steps)
    bytes_ratios = [
        each["bytes"] / each["torch_bytes"] if each["torch_bytes"] else 1.0 + each["bytes"]
        for each in figures
    ]
    return {
        **title,
        "pairs": len(pairs),
        "torch_ms": round(1e3 * statistics.median(each["torch_s"] for each in figures), 3),
        "gloo_ratio": round(statistics.median(each["gloo"] for each in figures), 3),
        "gloo_slower": round(sum(each["gloo"] > 1 for each in figures) / len(figures), 3),
        "memory_ratio": round(statistics.median(each["memory"] for each in figures), 3),
        "memory_slower": round(sum(each["memory"] > 1 for each in figures) / len(figures), 3),
        "bytes_ratio": round(
            sum(each["bytes"] for each in figures) / sum(each["torch_bytes"] for each in figures), 3
        ),
        "bytes_ratio_worst": round(max(bytes_ratios), 3),
        "greedy_worse": round(greedy_is_worse / len(pairs), 3),
        "path_worse": round(exact_is_worse / len(pairs), 3),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[64 << 10, 4 << 20], help="bytes of the whole"
    )
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 3], help="numbers of dimensions")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair (default: %(default)s)")
    parser.add_argument(
        "--most_pairs", type=int, help="approximate number of pairs of each kind (default: all)"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    colossalai.launch_from_torch(backend="gloo", verbose=False)
    if dist.get_world_size() != 4:
        raise SystemExit("the mesh is 2 x 2: start it with --nproc_per_node 4")
    torch.set_num_threads(1)
    mesh, other = Mesh(EXTENTS, rank=dist.get_rank()), mesh_through_memory()
    # With a flattened mesh, DTensor can also move both axes in one collective.
    mesh.device_mesh(tuple(EXTENTS))._flatten("both")
    rows = []
    for num_dims, size in itertools.product(args.dims, args.sizes):
        pairs = all_pairs(mesh, shape_of(num_dims, size))
        pairs = pairs[:: -(-len(pairs) // (args.most_pairs or len(pairs)))]
        for planner in PLANNERS:
            figures = [figures_of_pair(pair, other, planner=planner, rounds=args.rounds) for pair in pairs]
            title = {"against": f"DTensor, {planner}", "dims": num_dims, "bytes": size}
            rows.append(row_of(title, pairs, figures))
    report("All pairs of cuts over 2 x 2 ranks", rows, settings=vars(args), json_file=args.json)
    dist.barrier()


if __name__ == "__main__":
    main()
