"""Head and loss of a language model: whole logits, torch's loss in chunks, and colossalai's.

    python benchmarks/linear_cross_entropy.py --json benchmarks/results/linear_cross_entropy.json

A step is forward and backward of `cross_entropy(linear(x, weight), labels)`; an evaluation is the forward
under `no_grad`. The first variant is plain torch, the second `linear_cross_entropy` with
`LinearCrossEntropyOptions()`. "half ignored" has the label -100 at every other position, as in instruction
tuning. `peak_mib` is counted: the most live bytes of all tensors of a step, gradients included. Memory within
the single operation of torch's loss in chunks is not counted.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness.memory import PeakBytes
from harness.rounds import compare, report, time_rounds
from torch import Tensor, nn
from torch.nn import functional

from colossalai.nn import LinearCrossEntropyLoss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses_to_compare() -> dict[str, Loss]:
    """Return the losses by name; torch's in chunks if this version of torch has it."""
    losses: dict[str, Loss] = {
        "whole logits": lambda x, weight, labels: functional.cross_entropy(
            functional.linear(x, weight), labels
        )
    }
    if hasattr(functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        losses["torch, in chunks"] = lambda x, weight, labels: functional.linear_cross_entropy(
            x, weight, labels, options=options
        )
    losses["colossalai"] = LinearCrossEntropyLoss()
    return losses


def step_of(loss: Loss, x: Tensor, weight: Tensor, labels: Tensor, *, trains: bool) -> Callable[[], None]:
    """Return a function that runs a training step or an evaluation."""

    def step() -> None:
        x.grad = weight.grad = None
        with torch.set_grad_enabled(trains):
            value = loss(x, weight, labels)
        if trains:
            value.backward()

    return step


def rows_of(rows: int, hidden: int, classes: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures for one size: training, evaluation, and training with ignored labels."""
    x = torch.randn(rows, hidden, requires_grad=True)
    weight = (0.02 * torch.randn(classes, hidden)).requires_grad_()
    labels = torch.randint(classes, (rows,))
    ignored = labels.clone()
    ignored[::2] = -100
    found = []
    for what, chosen, trains in (
        ("step", labels, True),
        ("evaluation", labels, False),
        ("step, half ignored", ignored, True),
    ):
        steps = {
            name: step_of(loss, x, weight, chosen, trains=trains)
            for name, loss in losses_to_compare().items()
        }
        times = time_rounds(steps, rounds=args.rounds, warmup=1)
        for row in compare(times, baseline="whole logits"):
            x.grad = weight.grad = None
            with PeakBytes() as peak:
                steps[row["variant"]]()
            best = {name: min(seconds) for name, seconds in times.items()}
            found.append(
                {
                    "size": f"{rows} x {hidden} x {classes}",
                    "what": what,
                    **row,
                    "best_ms": round(1e3 * best[row["variant"]], 1),
                    "best_ratio": round(best[row["variant"]] / best["whole logits"], 4),
                    "peak_mib": round(peak.peak / 2**20, 1),
                }
            )
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["1024x256x8192", "2048x512x32000"],
        help="tokens x hidden x vocabulary (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    report(
        f"Linear layer and cross entropy in float32, {args.threads} threads",
        [row for size in args.sizes for row in rows_of(*map(int, size.split("x")), args)],
        settings={**vars(args), "matrix products": "torch's own"},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
