"""Axial layers against those of transformers' ESMFold, which have the same outputs, on one device.

    python benchmarks/axial.py --json benchmarks/results/axial.json

A step is forward and backward of a layer, or of a block of the trunk, for pairs of residues with a mask; an
evaluation is the forward under `no_grad`. "chunks" computes triangle attention for `--chunk-size` residues at
a time (`trunk.set_chunk_size`). `peak_mib` is counted: the most live bytes of all tensors of a step,
gradients included, and memory within an operation not.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness.memory import PeakBytes
from harness.rounds import compare, report, time_rounds
from torch import Tensor, nn
from transformers.models.esm.configuration_esm import TrunkConfig
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

from colossalai.model_zoo.evoformer import FoldingBlock

Forward = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""Of sequence, pair, mask and chunk size."""


def forwards(theirs: nn.Module, own: FoldingBlock) -> dict[str, tuple[Forward, Forward]]:
    """Return the parts to compare, by name: of transformers, and ours."""

    def both(first: Any, second: Any) -> tuple[Forward, Forward]:
        return (
            lambda sequence, pair, mask, chunk_size: first(pair, mask=mask, chunk_size=chunk_size),
            lambda sequence, pair, mask, chunk_size: second(pair, mask, chunk_size),
        )

    multiply, multiply_own = theirs.tri_mul_out, own.outgoing
    return {
        "triangle attention": both(theirs.tri_att_start, own.starting),
        "triangle multiplication": (
            lambda sequence, pair, mask, chunk_size: multiply(pair, mask=mask),
            lambda sequence, pair, mask, chunk_size: multiply_own(pair, mask),
        ),
        "block": (
            lambda sequence, pair, mask, chunk_size: sum_of(
                theirs(sequence, pair, mask=mask[:, 0], chunk_size=chunk_size)
            ),
            lambda sequence, pair, mask, chunk_size: sum_of(own(sequence, pair, mask[:, 0], chunk_size)),
        ),
    }


def sum_of(tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of all elements."""
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def step_of(
    forward: Forward, inputs: tuple[Tensor, Tensor, Tensor], chunk_size: int | None, *, trains: bool
) -> Callable[[], None]:
    """Return a function that runs a training step or an evaluation."""

    def step() -> None:
        with torch.set_grad_enabled(trains):
            output = forward(*inputs, chunk_size)
        if trains:
            output.sum().backward()

    return step


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all parts."""
    config = TrunkConfig(sequence_state_dim=args.sequence_dim, pairwise_state_dim=args.pair_dim)
    theirs = EsmFoldTriangularSelfAttentionBlock(config)
    own = FoldingBlock.from_transformers(theirs)
    sequence = torch.randn(1, args.residues, args.sequence_dim)
    pair = torch.randn(1, args.residues, args.residues, args.pair_dim, requires_grad=True)
    inputs = (sequence, pair, torch.ones(1, args.residues, args.residues))
    params = [pair, *theirs.parameters(), *own.parameters()]
    found = []
    for part, (first, second) in forwards(theirs, own).items():
        for what, trains in (("step", True), ("evaluation", False)):
            steps = {
                "transformers": step_of(first, inputs, None, trains=trains),
                "colossalai": step_of(second, inputs, None, trains=trains),
            }
            if part != "triangle multiplication":
                steps["transformers, chunks"] = step_of(first, inputs, args.chunk_size, trains=trains)
                steps["colossalai, chunks"] = step_of(second, inputs, args.chunk_size, trains=trains)
            times = time_rounds(steps, rounds=args.rounds, warmup=1)
            for row in compare(times, baseline="transformers"):
                for param in params:
                    param.grad = None
                with PeakBytes() as peak:
                    steps[row["variant"]]()
                found.append({"part": part, "what": what, **row, "peak_mib": round(peak.peak / 2**20, 1)})
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--residues", type=int, default=192, help="default: %(default)s")
    parser.add_argument("--sequence-dim", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--pair-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--chunk-size", type=int, default=64, help="residues at a time (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    report(
        f"A block of ESMFold, {args.residues} residues, float32, {args.threads} threads",
        rows_of(args),
        settings=vars(args),
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
