"""Step time of a GPT under plain torch DDP, the Engine and Booster, in one run.

    colossalai run --nproc_per_node 2 benchmarks/data_parallel.py --json benchmarks/results/data_parallel.json

All three train the same model on the same tokens with the same optimizer. The figure is the overhead of each
entry point.

Variants differ in the library of their matrix products (`harness/products.py`). Peers use torch's, and "...
medium" the "medium" precision; ours use the choice of the job (`colossalai run --set matmul=onednn`), and
"... torch" uses torch's.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from harness.peers import peer_group
from harness.products import bits_at_medium, with_products
from harness.rounds import compare, report, time_rounds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.utils import get_current_device

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all variants use."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def plain_ddp(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """Return a step of plain DDP."""
    device = get_current_device()
    devices = None if device.type == "cpu" else [device]
    model = DistributedDataParallel(model.to(device), device_ids=devices, process_group=peer_group())
    optimizer = make_optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def engine(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """Return a step by `colossalai.initialize`, with clipping from the config."""
    built, *_ = colossalai.initialize(model, make_optimizer(model), loss_of, verbose=False)

    def step() -> None:
        built.zero_grad()
        built.backward(built.criterion(built(batch[0]), batch[1]))
        built.step()

    return step


def booster(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """Return a step by `Booster.boost`."""
    door = Booster(plugin=TorchDDPPlugin())
    model, optimizer, criterion, *_ = door.boost(model, make_optimizer(model), loss_of)

    def step() -> None:
        optimizer.zero_grad()
        door.backward(criterion(model(batch[0]), batch[1]), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()

    return step


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before them (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences on a rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="features of a token (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    colossalai.launch_from_torch(config={"clip_grad_norm": 1.0}, verbose=False)
    shape = GPTConfig(
        vocab_size=2048,
        max_position_embeddings=args.seq,
        hidden_size=args.hidden,
        num_layers=6,
        num_attention_heads=8,
        embedding_dropout=0.0,
        dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPT(shape)
    tokens = torch.randint(shape.vocab_size, (args.batch, args.seq + 1), device=get_current_device())
    batch = (tokens[:, :-1], tokens[:, 1:])
    variants = {build.__name__: build(copy.deepcopy(model), batch) for build in (plain_ddp, engine, booster)}
    steps, around = with_products(variants, theirs=["plain_ddp"])
    times = time_rounds(steps, rounds=args.rounds, warmup=args.warmup, around=around)
    num_params = sum(param.numel() for param in model.parameters())
    report(
        f"Data parallelism, GPT with {num_params / 1e6:.1f}M parameters",
        compare(times, baseline="plain_ddp"),
        settings=vars(args) | {"parameters": num_params, "medium_bits": bits_at_medium()},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
