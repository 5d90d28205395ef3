"""Step time and memory of 1D tensor parallelism: colossalai.nn layers against torch's `parallelize_module`.

    colossalai run --nproc_per_node 2 benchmarks/tensor_parallel.py --json results.json

Both train the same two-layer MLP and the same GPT block, from the same weights, on the same data, cut in the
same way; the losses are compared before the timing.

Variants differ in the library of their matrix products (`harness/products.py`). Peers use torch's, and "...
medium" the "medium" precision; ours use the choice of the job (`colossalai run --set matmul=onednn`), and
"... torch" uses torch's.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness.peers import peer_mesh
from harness.products import bits_at_medium, with_products
from harness.rounds import compare, report, time_rounds
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import colossalai
from colossalai.cli._benchmark._measure import saved_bytes
from colossalai.nn.layer import COLUMN, ROW, ParallelLinear, restart
from colossalai.utils import get_current_device

Layer = Callable[[int, int], nn.Module]


class MLP(nn.Module):
    """Two linear layers; the first is cut by columns, the second by rows."""

    def __init__(self, hidden: int, column: Layer, row: Layer) -> None:
        super().__init__()
        self.fc1 = column(hidden, 4 * hidden)
        self.fc2 = row(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm GPT block; every rank attends with its own heads."""

    def __init__(self, hidden: int, column: Layer, row: Layer, head_size: int = 64) -> None:
        super().__init__()
        self.head_size = head_size
        self.attention_norm = nn.LayerNorm(hidden)
        self.q = column(hidden, hidden)
        self.k = column(hidden, hidden)
        self.v = column(hidden, hidden)
        self.proj = row(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, column, row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        normal = self.attention_norm(x)
        q, k, v = (
            layer(normal).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


MODELS: Mapping[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "mlp": (MLP, {"fc1": ColwiseParallel, "fc2": RowwiseParallel}),
    "gpt_block": (
        Block,
        {
            "q": ColwiseParallel,
            "k": ColwiseParallel,
            "v": ColwiseParallel,
            "proj": RowwiseParallel,
            "mlp.fc1": ColwiseParallel,
            "mlp.fc2": RowwiseParallel,
        },
    ),
}


def ours(name: str, hidden: int) -> nn.Module:
    """Return a model of our layers."""
    restart("1d")
    kind, _ = MODELS[name]
    return kind(
        hidden,
        lambda a, b: ParallelLinear(a, b, scheme=COLUMN, weight_is_transposed=True),
        lambda a, b: ParallelLinear(a, b, scheme=ROW, weight_is_transposed=True),
    )


def theirs(name: str, hidden: int) -> nn.Module:
    """Return a model of torch's layers and DTensors."""
    kind, plan = MODELS[name]
    model = kind(hidden, nn.Linear, nn.Linear).to(get_current_device())
    return parallelize_module(model, peer_mesh(), {path: style() for path, style in plan.items()})


class Variant:
    """A model with its optimizer and its training step."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model = model.to(get_current_device())
        self.x = x.clone().requires_grad_()  # like the input of an inner layer
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> torch.Tensor:
        """Run forward, backward and update; return the loss."""
        self._zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def memory(self) -> dict[str, int]:
        """Return the bytes that a rank holds at the end of the forward, by kind."""
        self._zero_grad()
        params = list(self.model.parameters())
        with saved_bytes(params) as saved:
            loss = self.model(self.x).square().mean()
        loss.backward()
        return {
            "parameters": sum(_local(param).nbytes for param in params),
            "gradients": sum(_local(param.grad).nbytes for param in params),
            "saved_activations": saved.num_bytes,
        }

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.x.grad = None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_same(variants: Mapping[str, Variant], steps: int = 3) -> None:
    """Require that all variants have the same losses."""
    losses = {name: [variant.step().item() for _ in range(steps)] for name, variant in variants.items()}
    first, *others = losses.values()
    for other in others:
        torch.testing.assert_close(
            torch.tensor(other), torch.tensor(first), rtol=1e-5, atol=1e-6, msg=str(losses)
        )


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a model, one for each variant."""
    torch.manual_seed(0)
    x = torch.randn(args.batch, args.seq, args.hidden, device=get_current_device())
    variants = {}
    for build in (theirs, ours):
        torch.manual_seed(1)
        variants[build.__name__] = Variant(build(name, args.hidden), x)
    check_same(variants)
    memory = {key: variant.memory() for key, variant in variants.items()}
    steps, around = with_products({key: variant.step for key, variant in variants.items()}, theirs=["theirs"])
    times = time_rounds(steps, rounds=args.rounds, warmup=args.warmup, around=around)
    rows = compare(times, baseline="theirs")
    total = sum(memory["theirs"].values())
    for row in rows:
        kinds = memory[row["variant"].split()[0]]
        row |= {f"{kind}_mib": round(num_bytes / 2**20, 3) for kind, num_bytes in kinds.items()}
        row["memory_ratio"] = round(sum(kinds.values()) / total, 4)
    return [{"model": name} | row for row in rows]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before them (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="features of a token (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    world_size = int(os.environ["WORLD_SIZE"])
    tensor = {"size": world_size, "mode": "1d"}
    colossalai.launch_from_torch(config={"parallel": {"tensor": tensor}}, verbose=False)
    rows = [row for name in args.models for row in measure(name, args)]
    report(
        f"1D tensor parallelism, {world_size} ranks; theirs is torch's parallelize_module",
        rows,
        settings=vars(args) | {"medium_bits": bits_at_medium()},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
