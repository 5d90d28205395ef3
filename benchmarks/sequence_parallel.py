"""Step time, memory and traffic of attention over a sequence that is sharded: ring and Ulysses.

    colossalai run --nproc_per_node 2 benchmarks/sequence_parallel.py --json results.json

Both attend to the same random queries, keys and values, each in its preferred order of positions; the results
are compared before the timing.
"""

import argparse
import os
from typing import Any

import torch
from harness.rounds import compare, report, time_rounds

import colossalai
from colossalai.communication import ledger
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.sequence_parallel import ATTENTIONS, SequenceAttention, own_positions
from colossalai.utils import get_current_device


class Variant:
    """An attention with this rank's part of the operands.

    Args:
        attention: Name of the attention.
        whole: q, k, v and the gradient of the result, (4, batch, heads, seq, head_size), alike on all ranks.
        causal: Whether a query sees its own and earlier positions only.
    """

    def __init__(self, attention: SequenceAttention, whole: torch.Tensor, *, causal: bool) -> None:
        self.attention, self.causal = attention, causal
        self.axis = gpc.axis(ParallelMode.SEQUENCE)
        self.order = attention.order(causal=causal)
        self.positions = own_positions(whole.shape[3], self.axis, order=self.order, device=whole.device)
        *operands, self.grad = whole[:, :, :, self.positions].unbind(0)
        self.operands = [operand.clone().requires_grad_() for operand in operands]  # no shared memory

    def forward(self) -> torch.Tensor:
        """Attend."""
        return self.attention.attend(*self.operands, axis=self.axis, causal=self.causal, order=self.order)

    def step(self) -> None:
        """Run forward and backward."""
        for operand in self.operands:
            operand.grad = None
        self.forward().backward(self.grad)

    def costs(self) -> dict[str, float]:
        """Return the memory saved for the backward, and the traffic of each direction, in MiB."""
        saved: dict[int, int] = {}  # bytes of each storage that the forward keeps for the backward

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with keeping, ledger() as forward:
            out = self.forward()
        with ledger() as backward:
            out.backward(self.grad)
        found = {
            "saved": sum(saved.values()),
            "sent_forward": forward.num_bytes(),
            "sent_backward": backward.num_bytes(),
        }
        return {f"{name}_mib": round(num_bytes / 2**20, 3) for name, num_bytes in found.items()}


def check_same(variants: dict[str, Variant], whole: torch.Tensor, *, causal: bool) -> None:
    """Require that every variant has the results of one process."""
    q, k, v, _ = whole
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    for name, variant in variants.items():
        wanted = expected[:, :, variant.positions]
        torch.testing.assert_close(variant.forward(), wanted, rtol=1e-4, atol=1e-4, msg=name)


def measure(args: argparse.Namespace, *, causal: bool) -> list[dict[str, Any]]:
    """Return a row for each attention."""
    torch.manual_seed(0)
    shape = (4, args.batch, args.heads, args.seq, args.head_size)
    whole = torch.randn(shape, device=get_current_device())
    variants = {name: Variant(ATTENTIONS[name], whole, causal=causal) for name in args.attention}
    check_same(variants, whole, causal=causal)
    costs = {name: variant.costs() for name, variant in variants.items()}
    times = time_rounds(
        {name: variant.step for name, variant in variants.items()}, rounds=args.rounds, warmup=args.warmup
    )
    rows = compare(times, baseline=args.attention[0])
    return [{"causal": causal} | row | costs[row["variant"]] for row in rows]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS), help="all")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="heads (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=2048, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--head-size", type=int, default=64, help="features of a head (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    world_size = int(os.environ["WORLD_SIZE"])
    colossalai.launch_from_torch(config={"parallel": {"sequence": world_size}}, verbose=False)
    rows = [row for causal in (False, True) for row in measure(args, causal=causal)]
    report(
        f"attention over a sequence that {world_size} ranks share; ratios are to the first",
        rows,
        settings=vars(args),
        json_file=args.json,
    )
    gpc.destroy()


if __name__ == "__main__":
    main()
