"""Step time of Gemini, torch's FSDP2, DDP and our stage 2 in one run, and the overhead of Gemini's use hooks.

    colossalai run --nproc_per_node 2 --set matmul=onednn benchmarks/gemini.py --json results.json
    colossalai run --nproc_per_node 2 benchmarks/gemini.py --backend gloo    # all bytes go through sockets
    colossalai run --nproc_per_node 1 benchmarks/gemini.py --hidden 64 256 768

The GPT, the variants and the columns are those of `zero.py`; `ratio` is relative to FSDP2. The matrix
products are described in `harness/products.py`: "gemini" against "fsdp2" is the default of each library,
"gemini torch" against "fsdp2" has the same products on both sides.

On one rank, all chunks are present and nothing moves. The difference between Gemini and stage 2, with chunks
as large as its buckets, is then the overhead of the hooks that detect uses of parameters. One thread
computes, and its processor time is measured, to reduce the effect of other processes; `ratio` is relative to
stage 2.
"""

import argparse
import copy
import os
import time
from functools import partial
from typing import Any

import torch
import zero
from harness.products import bits_at_medium
from harness.rounds import compare, report, time_rounds
from torch import nn

import colossalai

VARIANTS = ["ddp", "fsdp2", "zero2", "gemini"]


def compared(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each variant, on several ranks."""
    model, batch = zero.problem(args)
    variants, costs = zero.build_all(args, model, batch)
    times = zero.time_all(args, variants)
    return [row | costs[row["variant"].split()[0]] for row in compare(times, baseline="fsdp2")]


def plain(model: nn.Module, batch: zero.Batch) -> zero.Variant:
    """Return the unchanged model."""
    return zero.Variant(
        model, torch.optim.AdamW(model.parameters(), lr=zero.LEARNING_RATE, fused=True), batch
    )


def cost_of_seeing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each size and variant, on one rank."""
    torch.set_num_threads(1)
    builds = {
        "plain": plain,
        "zero2": partial(zero.zero, stage=2, bucket_mb=args.bucket_mb),
        "gemini": partial(zero.gemini, bucket_mb=args.bucket_mb),
    }
    rows = []
    for hidden_size in args.hidden:
        model, batch = zero.problem(args, hidden_size=hidden_size)
        steps = {name: build(copy.deepcopy(model), batch).step for name, build in builds.items()}
        times = time_rounds(steps, rounds=args.rounds, warmup=args.warmup, clock=time.process_time)
        rows += [{"hidden_size": str(hidden_size)} | row for row in compare(times, baseline="zero2")]
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    zero.add_options(parser)
    parser.add_argument("--backend", default=None, help="by which ours communicate (default: the job's)")
    parser.add_argument(
        "--hidden", nargs="+", type=int, default=[64, 256, 768], help="on one rank (default: %(default)s)"
    )
    args = parser.parse_args()
    args.variants = VARIANTS
    given = {} if args.backend is None else {"backend": args.backend}
    colossalai.launch_from_torch(config={}, verbose=False, **given)
    is_alone = os.environ["WORLD_SIZE"] == "1"
    report(
        "What seeing uses costs, one rank" if is_alone else "Gemini and others, a GPT of hidden size 256",
        cost_of_seeing(args) if is_alone else compared(args),
        settings=vars(args) | {"medium_bits": bits_at_medium()},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
