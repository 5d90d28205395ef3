"""A block of the Evoformer by dynamic axial parallelism, against one process.

    colossalai run --nproc_per_node 2 benchmarks/axial_ranks.py --json results.json

A step is forward and backward of a stack of blocks. "one process" runs on rank 0 alone, while the others
wait. `saved_mib` is counted: the tensors of the forward that a rank saves for its backward, its part of the
inputs included and parameters not; `share` is that relative to one process. Sent bytes are counted by the
ledger. The bytes of 1D tensor parallelism are computed: each of its nine layers sums its output over the
ranks, as it does gradients.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from harness.rounds import compare, report, time_rounds
from torch import Tensor

import colossalai
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.model_zoo.evoformer import Evoformer

Inputs = tuple[Tensor, Tensor]


def step_of(model: Evoformer, inputs: Inputs) -> Callable[[], None]:
    """Return a function that runs forward and backward."""

    def step() -> None:
        for x in (*inputs, *model.parameters()):
            x.grad = None
        total_of(model(*inputs)).backward()

    return step


def total_of(tensors: Inputs) -> Tensor:
    """Return the sum of all elements."""
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def costs_of(model: Evoformer, inputs: Inputs) -> dict[str, float]:
    """Return the MiB that the forward saves, and those sent in each direction."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # addresses are not used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), ledger() as forward:
        total = total_of(model(*inputs))
    kept.clear()
    with ledger() as backward:
        total.backward()
    found = {
        "saved": sum(saved.values()),
        "sent_forward": forward.num_bytes(),
        "sent_backward": backward.num_bytes(),
    }
    return {f"{name}_mib": round(num_bytes / 2**20, 2) for name, num_bytes in found.items()}


def bytes_of_1d(inputs: Inputs, num_ranks: int, num_blocks: int) -> float:
    """Return the MiB that 1D tensor parallelism of the same blocks sends in each direction.

    Three layers of a block update the alignment, and six the pairs: the outer product mean, two triangle
    multiplications, two triangle attentions, the transition.
    """
    msa, pair = inputs
    return num_blocks * 2 * (num_ranks - 1) / num_ranks * (3 * msa.nbytes + 6 * pair.nbytes) / 2**20


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--residues", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--msa-dim", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--pair-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_ranks = int(os.environ["WORLD_SIZE"])
    shape = {"c_m": args.msa_dim, "c_z": args.pair_dim, "num_blocks": args.blocks}

    def build() -> Evoformer:
        torch.manual_seed(0)
        model = Evoformer(**shape, msa_dropout=0.0, pair_dropout=0.0)
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.02)
        return model

    alone = build()
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": num_ranks, "mode": "dap"}}}, verbose=False)
    shared = build()
    inputs = (
        torch.randn(1, args.sequences, args.residues, args.msa_dim, requires_grad=True),
        torch.randn(1, args.residues, args.residues, args.pair_dim, requires_grad=True),
    )
    if gpc.get_global_rank() == 0:
        costs = {"one process": costs_of(alone, inputs)}
    costs_of_dap = costs_of(shared, inputs)
    steps = {
        "one process": step_of(alone, inputs) if gpc.get_global_rank() == 0 else lambda: None,
        f"dap on {num_ranks} ranks": step_of(shared, inputs),
    }
    rows = compare(time_rounds(steps, rounds=args.rounds, warmup=1), baseline="one process")
    more: list[dict[str, Any]] = []
    of_1d: list[dict[str, Any]] = []
    if gpc.get_global_rank() == 0:
        costs[f"dap on {num_ranks} ranks"] = costs_of_dap
        whole = costs["one process"]["saved_mib"]
        more = [
            {"variant": name, **found, "share": round(found["saved_mib"] / whole, 4)}
            for name, found in costs.items()
        ]
        sent = round(bytes_of_1d(inputs, num_ranks, args.blocks), 2)
        of_1d = [{"variant": "1d (computed)", "sent_forward_mib": sent, "sent_backward_mib": sent}]
    report(
        f"Evoformer, {args.sequences} x {args.residues}, {args.blocks} blocks, float32, one thread each",
        rows,
        settings=vars(args) | {"num_ranks": num_ranks},
        json_file=args.json,
        more={"costs": more, "tensor_parallelism": of_1d},
    )
    gpc.destroy()


if __name__ == "__main__":
    main()
