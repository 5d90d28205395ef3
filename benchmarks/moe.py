"""Expert parallelism in one run: ours, that of transformers, FSDP2 with gathered experts, and one process.

    colossalai run --nproc_per_node 2 --set matmul=onednn benchmarks/moe.py --json results.json
    colossalai run --nproc_per_node 4 benchmarks/moe.py --backend gloo       # all bytes go through sockets

All variants train the same small Mixtral of transformers in float32 with AdamW on the same tokens. `one
process` is rank 0 alone with the whole batch; the losses of the others are compared with its losses before
the timing. `transformers ep` is the library's own method, `DistributedConfig(fsdp_size=, ep_size=,
ep_implementation="all_to_all")`, which shards all parameters but the experts; `fsdp2` is `fully_shard` on
each block, with all experts gathered; `ours` is `HybridParallelPlugin(ep_size=, zero_stage=1)`. Peers
communicate by gloo, ours by the backend of the job.

Variants differ in the library of their matrix products (`harness/products.py`): "ours" uses the choice of the
job, "ours torch" uses torch's, like the peers.

- A step ends when its slowest rank ends; `ratio` is relative to `transformers ep`.
- `peak_mb` is the peak of live bytes of a step without parameters, gradients and states, on the rank with the
  most. `sent_mb` is the number of bytes that the busiest rank sends in a step (`harness/sent.py`), and
  `experts_mb` its share for tokens sent to experts and back. `experts_formula` is that share for balanced
  routing: forward and backward send 2 k T H (p - 1)/p numbers each in every layer.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero
from harness.memory import PeakBytes
from harness.peers import peer_mesh
from harness.products import bits_at_medium, with_products
from harness.rounds import compare, report, time_rounds
from harness.sent import count_sent
from torch import nn
from torch.distributed.fsdp import fully_shard

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.communication import ledger

BASELINE = "transformers ep"
LAYERS, HIDDEN, EXPERTS, CHOICES = 4, 256, 8, 2


class Variant:
    """One way to train the model on this rank's part of the batch.

    Args:
        model: Callable that runs the forward.
        optimizer: Optimizer of the step.
        ids: Token ids.
        backward: Function that runs the backward. Default: `backward` of the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        ids: torch.Tensor,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> None:
        self.model, self.optimizer, self.ids, self.backward = model, optimizer, ids, backward
        self.loss = torch.zeros(())

    def step(self) -> None:
        """Train once; the loss stays in `loss`."""
        self.optimizer.zero_grad()
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        self.backward(loss)
        self.optimizer.step()
        self.loss = loss.detach()


class Absent(Variant):
    """Empty variant of the other ranks while one process trains alone."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def step(self) -> None:
        """Do nothing."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all variants."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def one_process(model: nn.Module, ids: torch.Tensor) -> Variant:
    """The whole batch on rank 0."""
    parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, ids)
    return Absent() if dist.get_rank() else Variant(model, optimizer_of(model), torch.cat(parts))


def fsdp2(model: nn.Module, ids: torch.Tensor) -> Variant:
    """Torch's stage 3: every rank gathers all experts of a block."""
    mesh = peer_mesh()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Variant(model, optimizer_of(model), ids)


@contextmanager
def meshes_of_gloo() -> Iterator[None]:
    """Use gloo for the meshes that are created in the block, the library's default on CPU."""
    plain = dist.init_device_mesh

    def made(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> Any:
        return plain(
            device,
            shape,
            mesh_dim_names=mesh_dim_names,
            backend_override=dict.fromkeys(mesh_dim_names, "gloo"),
        )

    dist.init_device_mesh = made
    try:
        yield
    finally:
        dist.init_device_mesh = plain


def of_transformers(model: nn.Module, ids: torch.Tensor) -> Variant:
    """The library's own expert parallelism, which loads the model from a folder."""
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    size = dist.get_world_size()
    way = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="all_to_all")
    with meshes_of_gloo():
        parallel = MixtralForCausalLM.from_pretrained(
            folder[0], distributed_config=way, dtype=torch.float32
        ).train()
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder[0]).iterdir():
            path.unlink()
        Path(folder[0]).rmdir()
    return Variant(parallel, optimizer_of(parallel), ids)


def ours(model: nn.Module, ids: torch.Tensor) -> Variant:
    """Experts over all ranks, states of the rest over all ranks."""
    booster = Booster(plugin=HybridParallelPlugin(ep_size=dist.get_world_size(), zero_stage=1))
    boosted, optimizer, *_ = booster.boost(model, optimizer_of(model))
    return Variant(boosted, optimizer, ids, partial(booster.backward, optimizer=optimizer))


BUILDS: dict[str, Callable[[nn.Module, torch.Tensor], Variant]] = {
    "one process": one_process,
    BASELINE: of_transformers,
    "fsdp2": fsdp2,
    "ours": ours,
}


def from_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def check_same(variants: dict[str, Variant]) -> None:
    """Require that all have the mean loss of one process in each of three steps."""
    losses: dict[str, list[float]] = {}
    for name, variant in variants.items():
        losses[name] = []
        for _ in range(3):
            variant.step()
            of_ranks = from_all_ranks(float(variant.loss))
            losses[name].append(of_ranks[0] if name == "one process" else sum(of_ranks) / len(of_ranks))
    for name, found in losses.items():
        torch.testing.assert_close(
            found,
            losses["one process"],
            rtol=1e-4,
            atol=0.0,
            msg=f"{name}: {found}, not {losses['one process']}",
        )


def costs_of(name: str, variant: Variant) -> dict[str, Any]:
    """Return peak and traffic of a step."""
    with PeakBytes() as memory:
        variant.step()
    sent = count_sent(variant.step, is_ours=name == "ours")
    with ledger() as book:
        variant.step()
    of_experts = sum(entry.num_bytes for entry in book.entries if entry.op == "exchange")
    if name != "ours":
        of_experts = sent.of_all_to_all
    held = [memory.peak, sent.num_bytes, of_experts, sent.num_messages]
    peak, num_bytes, of_experts, messages = (max(each) for each in zip(*from_all_ranks(held), strict=True))
    return {
        "peak_mb": round(peak / 2**20, 1),
        "sent_mb": round(num_bytes / 2**20, 2),
        "experts_mb": round(of_experts / 2**20, 2),
        "messages": messages,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=2048,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 32,
        num_key_value_heads=HIDDEN // 32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        max_position_embeddings=args.seq,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).train()
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(config.vocab_size, (args.batch, args.seq))
    variants = {name: BUILDS[name](copy.deepcopy(model), ids) for name in BUILDS}
    check_same(variants)
    costs = {name: costs_of(name, variant) for name, variant in variants.items()}
    steps, around = with_products(
        {name: variant.step for name, variant in variants.items()},
        theirs=[name for name in BUILDS if name != "ours"],
    )
    chosen = {name: step for name, step in steps.items() if not name.endswith("medium")}
    times = zero.slowest(time_rounds(chosen, rounds=args.rounds, warmup=args.warmup, around=around))
    num_ranks = dist.get_world_size()
    numbers = 4 * CHOICES * args.batch * args.seq * HIDDEN * LAYERS * (num_ranks - 1) / num_ranks
    formula = {"experts_formula": round(4 * numbers / 2**20, 2)}
    return [
        row | costs[row["variant"].removesuffix(" torch")] | formula
        for row in compare(times, baseline=BASELINE)
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = partial(parser.add_argument, type=int)
    add("--rounds", default=20, help="rounds that count (default: %(default)s)")
    add("--warmup", default=2, help="rounds before them (default: %(default)s)")
    add("--batch", default=4, help="sequences on a rank (default: %(default)s)")
    add("--seq", default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--backend", default=None, help="by which ours communicate (default: the job's)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    given = {} if args.backend is None else {"backend": args.backend}
    colossalai.launch_from_torch(config={}, verbose=False, **given)
    report(
        f"Experts of a Mixtral over {dist.get_world_size()} ranks",
        measure(args),
        settings=vars(args) | {"medium_bits": bits_at_medium()},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
