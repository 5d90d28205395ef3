"""Step time, memory and traffic of data parallelism and ZeRO, torch's and ours, in one run.

    colossalai run --nproc_per_node 2 benchmarks/zero.py --json benchmarks/results/zero.json

All variants train the same GPT in float32 from the same weights on the same tokens with AdamW; after three
steps their weights are compared, before the timing. `ddp` is torch's `DistributedDataParallel` with the fused
AdamW, `ddp_foreach` the same with the foreach implementation, `redundancy` is DDP with
`ZeroRedundancyOptimizer`, `fsdp2` is `fully_shard` on each block and on the model; `zero1` and `zero2` are
our stages, `gemini` is our stage 3, in chunks.

Variants differ in the library of their matrix products (`harness/products.py`). Peers use torch's, and "...
medium" the "medium" precision; ours use the choice of the job (`colossalai run --set matmul=onednn`), and
"... torch" uses torch's.

- A step ends when its slowest rank ends. `ratio` is relative to `ddp`, `vs_fastest` to the variant of torch
  with the smallest median.
- `bytes_per_param` counts the memory behind all floating tensors that Python can reach after a step,
  gradients included, on the rank with the most; `formula` is that of 1910.02054. It excludes the buckets of
  DDP, which are as large as the gradients and not reachable from Python.
- `sent_per_param` is the number of bytes that a rank sends in a step, `messages` the number of messages, both
  as on a ring (`harness/sent.py`); `sent_formula` is that of the paper, 2 Psi elements (3 Psi for stage 3)
  times (n-1)/n.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness.peers import peer_group, peer_mesh
from harness.products import bits_at_medium, with_products
from harness.rounds import compare, report, time_rounds
from harness.sent import Sent, count_sent
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.utils import get_current_device

Batch = tuple[torch.Tensor, torch.Tensor]
LEARNING_RATE = 3e-4
ELEMENT = 4  # bytes of a float32


class Variant:
    """One way to train a model.

    Args:
        model: Callable that runs the forward.
        optimizer: Optimizer of the step.
        batch: This rank's tokens and labels.
        backward: Function that runs the backward. Default: `backward` of the loss.
        gathered: Context in which the whole parameters are available.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        batch: Batch,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
        gathered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.gathered = gathered
        self.model = model
        self.optimizer = optimizer
        self.batch = batch
        self.backward = backward

    def step(self) -> None:
        """Train on the batch once."""
        self.optimizer.zero_grad()
        self.backward(loss_of(self.model(self.batch[0]), self.batch[1]))
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        """Return the whole parameters."""
        with self.gathered():
            found = [param.detach() for param in self.model.parameters()]
            return [param.full_tensor() if isinstance(param, DTensor) else param.clone() for param in found]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def replicated(model: nn.Module) -> DistributedDataParallel:
    """Return a model under DDP with torch's defaults."""
    device = get_current_device()
    devices = None if device.type == "cpu" else [device]
    return DistributedDataParallel(model, device_ids=devices, process_group=peer_group())


def ddp(model: nn.Module, batch: Batch, **options: bool) -> Variant:
    """Plain DDP."""
    model = replicated(model)
    options = options or {"fused": True}
    return Variant(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **options), batch)


def redundancy(model: nn.Module, batch: Batch) -> Variant:
    """Torch's stage 1."""
    model = replicated(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        process_group=peer_group(),
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        fused=True,
    )
    return Variant(model, optimizer, batch)


def fsdp2(model: nn.Module, batch: Batch) -> Variant:
    """Torch's stage 3."""
    mesh = peer_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Variant(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), batch)


def zero(model: nn.Module, batch: Batch, *, stage: int, bucket_mb: float) -> Variant:
    """Ours."""
    plugin = LowLevelZeroPlugin(stage, precision="fp32", reduce_bucket_size_in_m=bucket_mb)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return Variant(model, optimizer, batch, partial(booster.backward, optimizer=optimizer))


def gemini(model: nn.Module, batch: Batch, *, bucket_mb: float) -> Variant:
    """Our stage 3, with chunks of about the size of the buckets."""
    plugin = GeminiPlugin(
        precision="fp32", min_chunk_size_mb=bucket_mb / ELEMENT, search_range_mb=0.5, hidden_dim=256
    )
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return Variant(model, optimizer, batch, partial(booster.backward, optimizer=optimizer), model.gathered)


THEIRS: dict[str, Callable[[nn.Module, Batch], Variant]] = {
    "ddp": ddp,
    "ddp_foreach": partial(ddp, foreach=True),
    "redundancy": redundancy,
    "fsdp2": fsdp2,
}
OURS = ("zero1", "zero2", "gemini")


def formula(name: str, num_ranks: int) -> float:
    """Return the bytes for each parameter: weights, gradients, two moments (1910.02054)."""
    params, grads, states = ELEMENT, ELEMENT, 2 * ELEMENT
    if name != "ddp" and name != "ddp_foreach":
        states /= num_ranks
    if name in ("zero2", "fsdp2", "gemini"):
        grads /= num_ranks
    if name in ("fsdp2", "gemini"):
        params /= num_ranks
    return params + grads + states


def live_storages(extra: Iterable[torch.Tensor] = ()) -> dict[int, int]:
    """Return address and bytes of the memory behind all floating tensors that Python can reach."""
    gc.collect()
    reached = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*reached, *extra)
        if not isinstance(tensor, DTensor) and tensor.is_floating_point() and tensor.numel() > 1
    }


def build_and_count(build: Callable[[], Variant]) -> tuple[Variant, int]:
    """Return a variant after three steps, and the bytes that it has allocated."""
    before = live_storages()
    variant = build()
    for _ in range(3):
        variant.step()
    time.sleep(0.1)  # the threads of a backend release sent tensors shortly after their arrival
    grads = [param.grad for param in variant.model.parameters() if param.grad is not None]
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    after = live_storages(locals_)
    num_bytes = sum(size for address, size in after.items() if address not in before)
    return variant, max(_from_all_ranks(num_bytes))


def most_sent(name: str, variant: Variant) -> Sent:
    """Return the traffic of the busiest rank in a step."""
    sent = count_sent(variant.step, is_ours=name in OURS)
    return max(_from_all_ranks(sent), key=lambda each: each.num_bytes)


def check_same(variants: dict[str, Variant]) -> None:
    """Require that all variants have the same weights, up to the order of sums."""
    expected = variants["ddp"].weights()
    for name, variant in variants.items():
        for ours, theirs in zip(variant.weights(), expected, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=0, atol=LEARNING_RATE / 10, msg=f"{name} trains otherwise than ddp"
            )


def slowest(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the times of the slowest rank of each step."""
    of_ranks = _from_all_ranks(times)
    return {
        name: [max(step) for step in zip(*(own[name] for own in of_ranks), strict=True)] for name in times
    }


def build_all(
    args: argparse.Namespace, model: nn.Module, batch: Batch
) -> tuple[dict[str, Variant], dict[str, dict[str, Any]]]:
    """Return the variants after a check that they agree, with the memory and traffic of each."""
    builds: dict[str, Callable[[nn.Module, Batch], Variant]] = dict(THEIRS)
    builds["zero1"] = partial(zero, stage=1, bucket_mb=args.bucket_mb)
    builds["zero2"] = partial(zero, stage=2, bucket_mb=args.bucket_mb)
    builds["gemini"] = partial(gemini, bucket_mb=args.bucket_mb)
    num_params = sum(param.numel() for param in model.parameters())
    num_ranks = dist.get_world_size()
    share = (num_ranks - 1) / num_ranks
    variants, held = {}, {}
    for name in args.variants:
        build = builds[name]
        variants[name], held[name] = build_and_count(lambda build=build: build(copy.deepcopy(model), batch))
    check_same(variants)
    sent = {name: most_sent(name, variants[name]) for name in args.variants}
    return variants, {
        name: {
            "bytes_per_param": round(held[name] / num_params, 3),
            "formula": formula(name, num_ranks),
            "sent_per_param": round(sent[name].num_bytes / num_params, 4),
            "sent_formula": (3 if name in ("fsdp2", "gemini") else 2) * ELEMENT * share,
            "sockets_per_param": round(sent[name].through_sockets / num_params, 4),
            "messages": sent[name].num_messages,
        }
        for name in args.variants
    }


def time_all(args: argparse.Namespace, variants: Mapping[str, Variant]) -> dict[str, list[float]]:
    """Return the times of each variant for each library of matrix products."""
    steps, around = with_products(
        {name: variant.step for name, variant in variants.items()}, theirs=list(THEIRS)
    )
    return slowest(time_rounds(steps, rounds=args.rounds, warmup=args.warmup, around=around))


def measure(args: argparse.Namespace, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    variants, costs = build_all(args, model, batch)
    times = time_all(args, variants)
    medians = {name: statistics.median(times[name]) for name in args.variants if name in THEIRS}
    fastest = min(medians, key=lambda name: medians[name])
    to_fastest = {row["variant"]: row for row in compare(times, baseline=fastest)}
    return [
        row
        | {
            "fastest": fastest,
            "vs_fastest": to_fastest[row["variant"]]["ratio"],
            "vs_fastest_quartiles": to_fastest[row["variant"]]["ratio_quartiles"],
        }
        | costs[name]
        for row in compare(times, baseline="ddp")
        for name in row["variant"].split()[:1]
    ]


def problem(args: argparse.Namespace, *, hidden_size: int = 256) -> tuple[nn.Module, Batch]:
    """Return the model, the same on all ranks, and this rank's tokens and labels."""
    shape = GPTConfig(
        vocab_size=2048,
        max_position_embeddings=args.seq,
        hidden_size=hidden_size,
        num_layers=12,
        num_attention_heads=hidden_size // 32,
        embedding_dropout=0.0,
        dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(0)
    model = GPT(shape).to(get_current_device())
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(shape.vocab_size, (args.batch, args.seq + 1), device=get_current_device())
    return model, (tokens[:, :-1], tokens[:, 1:])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model and the number of rounds."""
    add = partial(parser.add_argument, type=int)
    add("--rounds", default=40, help="rounds that count (default: %(default)s)")
    add("--warmup", default=3, help="rounds before them (default: %(default)s)")
    add("--batch", default=2, help="sequences on a rank (default: %(default)s)")
    add("--seq", default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--bucket_mb", type=float, default=12.0, help="our buckets (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")


def _from_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--variants", nargs="+", default=[*THEIRS, *OURS], choices=[*THEIRS, *OURS], help="default: all"
    )
    args = parser.parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)
    model, batch = problem(args)
    rows = measure(args, model, batch)
    num_params = sum(param.numel() for param in model.parameters())
    report(
        f"Data parallelism and ZeRO, GPT with {num_params / 1e6:.1f}M parameters",
        rows,
        settings=vars(args) | {"parameters": num_params, "medium_bits": bits_at_medium()},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
